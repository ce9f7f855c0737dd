"""Memory of artifacts: no rank holds more than it may, requests wait for room, and nothing fails."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfdit.core import ControlPlane, Policy, RankRecord, Request, Shape
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.views import ArtifactView, FieldView
from gfdit.core.control.artifact_budget import MAX_SHAPES, SETTLED_STEPS, ArtifactBudget, PeakBytes
from gfdit.core.cost.table import NominalCostModel
from gfdit.core.layouts import SINGLE as ONE_RANK
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from gfdit.policies.static import Static
from gfdit.policies.triage import Triage
from tests.support.cluster import Cluster, Faults
from tests.support.workload import make_request

ARTIFACT_BYTES = 100
PEAK_BYTES = 3 * ARTIFACT_BYTES  # conditioning, and latents before and after a step
POLICIES = {
    "fcfs": Fcfs,
    "equipartition": Equipartition,
    "static": Static,
    "triage": Triage,
    "random-layout": RandomLayout,
}


class Watched(ControlPlane):
    """Notes the most that a rank held, and how many requests had started and not ended."""

    limit_bytes: int | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, max_artifact_bytes=self.limit_bytes, **options)
        self.most_bytes = self.most_started = 0

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        commands = super().handle(event, now_s)
        self.most_bytes = max([self.most_bytes, *self.state.artifact_bytes().values()])
        started = sum(record.started for record in self.state.requests.values())
        self.most_started = max(self.most_started, started)
        return commands


class Alike(Cluster):
    """Every artifact is as large."""

    def _view_of(self, artifact: str) -> ArtifactView:
        return ArtifactView((FieldView("x", "uint8", 1, (ARTIFACT_BYTES,)),))


def run(policy: Policy, seed: int, limit_bytes: int | None, faults: Faults | None = None) -> tuple[Alike, Watched]:
    plane = type("Limited", (Watched,), {"limit_bytes": limit_bytes})
    cluster = Alike(policy, 4, seed, plane=plane, faults=faults)
    cluster.run([make_request(f"r{index}", num_steps=5, prepare=False) for index in range(9)])
    control = cluster.control
    assert isinstance(control, Watched) and control.idle
    return cluster, control


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), room=st.integers(1, 4))
def test_no_rank_holds_more_than_it_may_and_every_request_completes(name: str, seed: int, room: int) -> None:
    cluster, control = run(POLICIES[name](), seed, room * PEAK_BYTES)
    assert {type(ending) for endings in cluster.endings.values() for ending in endings} == {cmd.CompleteRequest}
    assert control.most_bytes <= room * PEAK_BYTES
    assert control.most_started <= room
    assert not cluster.reports


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_faults_leave_nothing_reserved(seed: int) -> None:
    _, control = run(Equipartition(), seed, 2 * PEAK_BYTES, Faults(0.05, 0.02, 0.01, 0.05))
    control.check_integrity()


def test_without_a_limit_ranks_hold_more() -> None:
    """Negative control, and what a limit is for."""
    without = [run(RandomLayout(), seed, None)[1] for seed in range(5)]
    assert max(control.most_bytes for control in without) > PEAK_BYTES
    assert max(control.most_started for control in without) > 3


def test_room_is_used() -> None:
    assert {run(Fcfs(), seed, 3 * PEAK_BYTES)[1].most_started for seed in range(5)} == {3}


def test_what_is_larger_than_all_there_is_runs_alone() -> None:
    cluster, control = run(Fcfs(), 1, 1)
    assert control.most_started == 1 and len(cluster.endings) == 9


def request(request_id: str, side: int = 512, model: str = "m") -> Request:
    return Request(request_id, model, Shape(side, side), 10, 0.0)


def test_what_a_request_takes_is_learned_from_others() -> None:
    budget = ArtifactBudget(1000)
    assert budget.fits(request("a"))
    budget.reserve(request("a"))
    assert not budget.fits(request("b")), "nothing is known of such a request"
    budget.observe(request("a"), 50, SETTLED_STEPS - 1)
    assert not budget.fits(request("b")), "the first step is not all"
    budget.observe(request("a"), 200, SETTLED_STEPS)
    assert budget.fits(request("b")) and budget.fits(request("b", side=1024))
    assert not budget.fits(request("b", side=2048)), "sixteen times the tokens"
    assert not budget.fits(request("b", model="other"))
    budget.reserve(request("b", side=1024))
    assert not budget.fits(request("c"))
    budget.release("a")
    assert budget.fits(request("c"))


@given(
    seen=st.lists(st.tuples(st.integers(1, 2048), st.integers(1, 2048), st.integers(0, 10**12)), max_size=40),
    height=st.integers(1, 2048),
    width=st.integers(1, 2048),
)
def test_a_shape_is_expected_to_take_what_the_most_telling_of_all_others_says(
    seen: list[tuple[int, int, int]], height: int, width: int
) -> None:
    peaks, by_shape = PeakBytes(), dict[Shape, int]()
    for *side, num_bytes in seen:
        shape = Shape(*side)
        peaks.add(shape, num_bytes)
        by_shape[shape] = max(num_bytes, by_shape.get(shape, 0))
    asked = Shape(height, width)
    each = [peak * max(1.0, asked.num_tokens / shape.num_tokens) for shape, peak in by_shape.items()]
    assert peaks.expected(asked) == by_shape.get(asked, pytest.approx(max(each, default=0), rel=1e-15))
    for shape, peak in by_shape.items():
        assert peaks.expected(shape) == peak


def test_of_many_shapes_the_last_are_remembered_and_the_others_never_underestimated() -> None:
    peaks = PeakBytes()
    shapes = [Shape(16 * (1 + index % 128), 16 * (1 + index // 128)) for index in range(2 * MAX_SHAPES)]
    draw = random.Random(1)
    taken = {shape: draw.randrange(1000) * shape.num_tokens for shape in shapes}
    for shape, num_bytes in taken.items():
        peaks.add(shape, num_bytes)
    assert all(peaks.expected(shape) >= num_bytes for shape, num_bytes in taken.items())
    assert [peaks.expected(shape) for shape in shapes[-100:]] == [taken[shape] for shape in shapes[-100:]]
    assert peaks.num_shapes <= MAX_SHAPES


def test_who_waits_at_the_door_can_be_cancelled_and_keeps_its_place() -> None:
    control = ControlPlane(Fcfs(), [RankRecord(0, frozenset({"m"}))], NominalCostModel(), max_artifact_bytes=1)
    for name in ("a", "b", "c"):
        control.handle(ev.RequestArrived(*make_request(name, candidates=(ONE_RANK,))), 0.0)
    with pytest.raises(ValueError, match="already alive"):
        control.handle(ev.RequestArrived(*make_request("b")), 1.0)
    assert control.handle(ev.RequestCancelled("b"), 1.0) == [cmd.CancelRequest("b")]
    control.check_integrity()
    control.handle(ev.RequestCancelled("a"), 1.0)
    (running,) = control.state.dispatches.values()
    commands = control.handle(ev.TaskFinished(running.id, 0, 0.1), 2.0)
    assert cmd.CancelRequest("a") in commands
    assert [c.tasks[0].id for c in commands if isinstance(c, cmd.RunTask)] == ["c/encode"]


def test_a_limit_is_a_number_of_bytes() -> None:
    with pytest.raises(ValueError, match="max_artifact_bytes must be at least 1, got 0"):
        ArtifactBudget(0)
