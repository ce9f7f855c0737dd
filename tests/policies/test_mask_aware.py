"""Batches of edits on ranks of their own, and where edits are placed."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfdit.core import TaskKind
from gfdit.core.cost.file import CostEntry, CostTable, MaskedSteps
from gfdit.core.policy.loading import load_policy
from gfdit.observe.timeline import Span, TimelineWriter, read_timeline
from gfdit.policies.mask_aware import MaskAware
from gfdit.sim.costs.edit_costs import EditCosts
from gfdit.sim.options import SimulationOptions
from gfdit.sim.rank_faults import RankFailure
from gfdit.sim.simulator import SimulationRun, Simulator, Status
from gfdit.sim.trace import TraceRequest
from tests.sim.tables import line, table

STEP_S, BATCH_OF_TWO_S = 2.0, 3.0  # of full steps; encode 0.5 s, prepare 0.25 s, decode 1 s


def costs() -> CostTable:
    """Steps are in proportion to masks; a batch of n takes (1 + n) s on one rank."""
    batches = [
        CostEntry("m", TaskKind.DENOISE, 512, 512, 1, False, 1, 1, size, 1.0 + size) for size in range(2, 9)
    ]
    made = table({1: STEP_S})
    return replace(made, entries=(*made.entries, *batches), masked_steps=(MaskedSteps("m", 0.0, 1.0),))


EDITS = EditCosts(10, 0.1, 0.0, 1.0, 1.0, 1.0, 9.0, recorded=("t",))
"""An edit of ``t`` computes as much as its mask says."""


def edit(name: str, arrival_s: float, mask_ratio: float = 0.5, num_steps: int = 4) -> TraceRequest:
    return line(name, arrival_s, num_steps=num_steps, mask_ratio=mask_ratio, template="t")


def run(policy: MaskAware, trace: Sequence[TraceRequest], num_ranks: int = 1, **more: Any) -> SimulationRun:
    options = SimulationOptions(num_ranks, edits=EDITS, check_every_event=True, **more)
    return Simulator(policy, costs(), trace, options).run()


def spans(policy: MaskAware, trace: Sequence[TraceRequest], folder: Path, num_ranks: int = 1) -> list[Span]:
    path = folder / "timeline.json"
    with TimelineWriter(path, num_ranks, base_s=0.0) as writer:
        done = Simulator(policy, costs(), trace, SimulationOptions(num_ranks, edits=EDITS)).run(writer)
    assert not done.faults
    return read_timeline(path)


def homes(found: Sequence[Span]) -> dict[str, int]:
    """The rank of each request: one alone."""
    ranks: dict[str, set[int]] = {}
    for span in found:
        ranks.setdefault(span.request, set()).add(span.rank)
    assert all(len(own) == 1 for own in ranks.values())
    return {name: min(own) for name, own in ranks.items()}


def placed(placement: Any, folder: Path) -> list[int]:
    """Where four edits go. ``long`` has many small steps, ``wide`` few large ones, ``small`` as few small ones."""
    trace = [
        edit("a-long", 0.0, 0.1, 40),  # 1.75 + 40 x 0.2 = 9.75 s
        edit("b-wide", 0.01, 0.9, 2),  # 1.75 + 2 x 1.8 = 5.35 s
        edit("c-small", 0.02, 0.2, 2),
        edit("d-small", 0.03, 0.2, 2),
    ]
    found = homes(spans(MaskAware(placement=placement), trace, folder, num_ranks=2))
    return [found[request.id] for request in trace]


def test_by_the_latency_of_all(tmp_path: Path) -> None:
    """With c, rank 0 would take 9.75 + 1.75 s, and for 2 of 40 steps (3 x 0.15 - 0.2) s longer; rank 1 far less.

    With d rank 1: 3 x 1.75 + 2 x 4 x (0.9 + 0.2 + 0.2) / 3 = 8.7 s; rank 0: 3.5 + 2 x 0.45 + 38 x 0.2 = 12 s.
    """
    assert placed("pipeline", tmp_path) == [0, 1, 1, 1]


@pytest.mark.parametrize(("placement", "rank"), [("pipeline", 1), ("tokens", 1), ("count", 0)])
def test_of_as_many_steps_those_of_small_masks_are_less(placement: Any, rank: int, tmp_path: Path) -> None:
    trace = [edit("a-wide", 0.0, 0.9, 10), edit("b-small", 0.01, 0.1, 10), edit("c", 0.02, 0.5, 10)]
    assert homes(spans(MaskAware(placement=placement), trace, tmp_path, num_ranks=2))["c"] == rank


def test_by_what_they_compute_in_a_step(tmp_path: Path) -> None:
    """10 + 20 % against 90 + 20 %, then 30 + 20 %: rank 0 has all but the wide one, however long it takes."""
    assert placed("tokens", tmp_path) == [0, 1, 0, 0]


def test_by_their_number(tmp_path: Path) -> None:
    assert placed("count", tmp_path) == [0, 1, 0, 1]


def test_who_arrives_joins_at_the_next_step_and_who_ends_leaves(tmp_path: Path) -> None:
    """The first one's steps take 1 s alone and 1.5 s with the other one."""
    found = spans(MaskAware(), [edit("a", 0.0), edit("b", 1.0, num_steps=1)], tmp_path)
    steps = [(span.request, span.start_s, span.end_s) for span in found if span.kind == "denoise"]
    assert steps == [
        ("a", 0.75, 1.75),
        ("a", 2.5, 4.0),  # b was encoded and prepared before it
        ("b", 2.5, 4.0),
        ("a", 5.0, 6.0),  # b was decoded
        ("a", 6.0, 7.0),
    ]


def test_a_static_batch_ends_before_the_next_one_begins(tmp_path: Path) -> None:
    trace = [edit("a", 0.0), edit("b", 1.0, num_steps=1), edit("c", 2.0), edit("d", 7.0)]
    found = spans(MaskAware(batching="static"), trace, tmp_path)
    ends_s = {name: max(span.end_s for span in found if span.request == name) for name in "abcd"}
    starts_s = {name: min(span.start_s for span in found if span.request == name) for name in "abcd"}
    assert ends_s["a"] == starts_s["b"] == 5.75, "alone, with nobody between"
    steps_s = {name: [s.start_s for s in found if (s.request, s.kind) == (name, "denoise")] for name in "bc"}
    assert steps_s["b"] == steps_s["c"][:1], "both were there when it ended"
    assert ends_s["b"] < ends_s["c"] == starts_s["d"], "b has left the batch, and d may not join it"


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_no_batch_is_larger_than_it_may_be(batching: Any, tmp_path: Path) -> None:
    trace = [edit(f"r{index}", 0.0) for index in range(7)]
    found = spans(MaskAware(batching=batching, max_batch=3), trace, tmp_path)
    together: dict[float, int] = {}
    for span in found:
        if span.kind == "denoise":
            together[span.start_s] = together.get(span.start_s, 0) + 1
    assert max(together.values()) == 3


def test_requests_of_another_size_take_turns() -> None:
    trace = [edit("a", 0.0), replace(edit("b", 0.0), height=1024), edit("c", 0.0)]
    done = run(MaskAware(), trace)
    assert {request.status for request in done.requests} == {Status.COMPLETED} and not done.faults


ARRIVALS = st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 1), st.integers(1, 5)), min_size=1, max_size=14)


@settings(max_examples=40, deadline=None)
@given(
    ARRIVALS,
    st.sampled_from(("pipeline", "tokens", "count")),
    st.sampled_from(("continuous", "static")),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 1),
)
def test_nobody_starves(
    arrivals: list[tuple[float, float, int]],
    placement: Any,
    batching: Any,
    num_ranks: int,
    max_batch: int,
    run_ahead: int,
) -> None:
    trace, at_s = [], 0.0
    for index, (gap_s, ratio, num_steps) in enumerate(arrivals):
        at_s += gap_s
        trace.append(edit(f"r{index:02}", at_s, ratio, num_steps))
    policy = MaskAware(placement, batching, max_batch)
    done = run(policy, trace, num_ranks, run_ahead=run_ahead)
    assert {request.status for request in done.requests} == {Status.COMPLETED} and not done.faults


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("down_s", [None, 3.0])
def test_requests_of_a_lost_rank_are_placed_anew(batching: Any, down_s: float | None) -> None:
    trace = [edit(f"r{index}", 0.3 * index) for index in range(9)]
    lost = (RankFailure(1, 3.0, down_s),)
    done = run(MaskAware(batching=batching), trace, 3, failures=lost)
    assert {request.status for request in done.requests} == {Status.COMPLETED} and not done.faults


def test_the_same_trace_gives_the_same_times() -> None:
    trace = [edit(f"r{index}", 0.3 * index, 0.1 + 0.1 * (index % 5)) for index in range(12)]
    first, second = ([request.end_s for request in run(MaskAware(), trace, 3).requests] for _ in range(2))
    assert first == second


def test_it_is_installed_and_checks_its_arguments() -> None:
    entries = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    spec = entries["project"]["entry-points"]["gfdit.policies"]["mask-aware"]
    assert isinstance(load_policy(spec, {"placement": "count", "max_batch": "4"}), MaskAware)
    for size in (0, 9):
        with pytest.raises(ValueError, match=f"max_batch must be from 1 to 8, got {size}"):
            MaskAware(max_batch=size)
