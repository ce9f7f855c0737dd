"""Ranks that fail and ranks that are slow: against schedules computed by hand, and at random."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from gfdit.core import TaskKind
from gfdit.core.cost.table import CostKey, TableCostModel
from gfdit.observe.timeline import TimelineWriter, read_timeline
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from gfdit.sim.rank_faults import RankFailure, SlowRank
from gfdit.sim.simulator import SimulationOptions, Simulator, Status
from tests.sim.runs import Replay, ends, run
from tests.sim.tables import AROUND_S, DECODE_S, MIGRATION_S, STEP_S, line, table


def test_a_layout_is_as_slow_as_its_slowest_rank() -> None:
    trace = [line("a", num_steps=2)]
    policy = Replay(((0,), (0, 1)))
    slow = run(policy, trace, slow_ranks=(SlowRank(1, 3.0),))
    assert ends(slow) == {"a": approx(AROUND_S + STEP_S[1] + 3 * STEP_S[2] + 2 * MIGRATION_S)}
    # Slow from the middle of step 0 (0.75 to 2.75 s) to the middle of what is left of it.
    some_time = run(policy, trace, slow_ranks=(SlowRank(0, 2.0, 1.75, 2.75),))
    assert ends(some_time)["a"] == approx(AROUND_S + STEP_S[1] + 0.5 + STEP_S[2] + 2 * MIGRATION_S)


def test_the_control_plane_learns_that_ranks_are_slow() -> None:
    """What is measured is what it took, so policies plan with it."""
    simulator = Simulator(
        Fcfs(1), table(), [line("a", num_steps=5)], SimulationOptions(1, slow_ranks=(SlowRank(0, 2.0),))
    )
    simulator.run()
    cost = simulator._control.cost
    assert isinstance(cost, TableCostModel)
    ratios = {key.kind: measured.ratio for key, measured in cost.measured.items() if isinstance(key, CostKey)}
    assert ratios[TaskKind.DENOISE] == approx(2.0)


def test_what_only_a_lost_rank_held_is_made_again_elsewhere() -> None:
    trace = [line(name, num_steps=4) for name in "abcd"]
    done = run(Fcfs(1), trace, failures=(RankFailure(1, 3.0),))
    assert [request.status for request in done.requests] == [Status.COMPLETED] * 4
    request_s = AROUND_S + 4 * STEP_S[1]
    assert done.last_end_s == approx(4 * request_s)  # all of them on rank 0, b from its beginning
    assert done.requests[1].rank_seconds == approx(3.0 + request_s)
    assert not done.faults


def test_a_request_is_not_tried_for_ever() -> None:
    """A request is given up, to be sent again, with the fourth rank that is lost under it."""
    failures = tuple(RankFailure(0, at_s, 0.25) for at_s in (1.0, 2.0, 3.0, 4.0))
    (request,) = run(Fcfs(1), [line("a", num_steps=4)], num_ranks=1, failures=failures).requests
    assert request.status is Status.LOST and request.end_s == 4.0
    assert "rank 0 was lost" in request.detail and "after 3 retries" in request.detail


def test_a_rank_that_joins_again_is_used_again() -> None:
    trace = [line("a", num_steps=1), line("b", 10.0, num_steps=1)]
    down = run(Fcfs(1), trace, num_ranks=1, failures=(RankFailure(0, 8.0, 5.0),))
    assert ends(down) == {"a": approx(AROUND_S + 2.0), "b": approx(13.0 + AROUND_S + 2.0)}
    for_good = run(Fcfs(1), trace, num_ranks=1, failures=(RankFailure(0, 8.0),))
    assert [request.status for request in for_good.requests] == [Status.COMPLETED, Status.STARVED]


def test_peers_of_a_lost_rank_reset_their_edges_before_they_go_on(tmp_path: Path) -> None:
    trace = [line("a", num_steps=2), line("b", 0.5, num_steps=2)]
    path = tmp_path / "timeline.json"
    options = SimulationOptions(4, failures=(RankFailure(3, 2.0),), dispatch_latency_s=0.125)
    with TimelineWriter(path, 4, base_s=0.0) as writer:
        done = Simulator(Fcfs(4), table(), trace, options).run(writer)
    # Before each task the latency; before a's step 0, at 1.625, two copies. Then there are three ranks, so SP2.
    reset_s = 2.0 + 0.125
    a_s = 2 * STEP_S[2] + DECODE_S + 3 * 0.125  # step 0 again, from the copies that are left
    b_s = AROUND_S + 2 * STEP_S[2] + 2 * MIGRATION_S + 5 * 0.125
    assert [(request.status, request.end_s) for request in done.requests] == [
        (Status.COMPLETED, approx(reset_s + a_s)),
        (Status.COMPLETED, approx(reset_s + a_s + b_s)),
    ]
    step = [(s.start_s, s.end_s) for s in read_timeline(path) if s.request == "a" and s.kind == "denoise"]
    assert sorted(step)[:5] == [approx((1.625, 2.0), abs=1e-6)] * 4 + [approx((2.25, 3.5), abs=1e-6)]


def test_a_task_that_waits_for_a_copy_from_a_lost_rank_waits_no_longer() -> None:
    # Step 1 waits on rank 1 for copies from rank 0, from 2.75 s on, when rank 0 is lost.
    done = run(Replay(((0,), (1,))), [line("a")], failures=(RankFailure(0, 2.75 + MIGRATION_S / 2, 0.25),))
    (request,) = done.requests
    assert request.status is Status.COMPLETED
    assert request.rank_seconds == approx(2.75 + AROUND_S + 2 * STEP_S[1])
    # Lost after the copies it has sent, it does not matter.
    later = run(Replay(((0,), (1,))), [line("a")], failures=(RankFailure(0, 2.75 + 2.5 * MIGRATION_S, 0.125),))
    assert later.requests[0].status is Status.COMPLETED


@settings(max_examples=40)
@given(
    failures=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 12), st.one_of(st.none(), st.floats(0.01, 4))), max_size=5
    ),
    slow=st.lists(st.tuples(st.integers(0, 3), st.floats(0.5, 4), st.floats(0, 9), st.floats(0.1, 9)), max_size=3),
    policy=st.sampled_from([Fcfs, Equipartition, RandomLayout]),
    run_ahead=st.integers(0, 1),
    dispatch_latency_s=st.sampled_from([0.0, 0.03]),
)
def test_whatever_fails_nothing_is_lost_from_the_books(
    failures: list[tuple[int, float, float | None]],
    slow: list[tuple[int, float, float, float]],
    policy: type[Any],
    run_ahead: int,
    dispatch_latency_s: float,
) -> None:
    trace = [line(f"r{i}", 0.4 * i, num_steps=1 + i % 3) for i in range(7)]
    up_from_s: dict[int, float] = {}
    possible = []
    for rank, at_s, down_s in sorted(failures, key=lambda failure: failure[1]):
        if at_s >= up_from_s.get(rank, 0.0):
            possible.append(RankFailure(rank, at_s, down_s))
            up_from_s[rank] = possible[-1].until_s
    done = run(
        policy(),
        trace,
        num_ranks=4,
        failures=tuple(possible),
        slow_ranks=tuple(SlowRank(rank, factor, at_s, at_s + for_s) for rank, factor, at_s, for_s in slow),
        run_ahead=run_ahead,
        dispatch_latency_s=dispatch_latency_s,
    )
    for request in done.requests:
        assert request.status in (Status.COMPLETED, Status.LOST, Status.STARVED)
        assert request.status is not Status.STARVED or len(possible) > 3  # no rank left
        assert possible or request.status is Status.COMPLETED
    assert not done.faults


@pytest.mark.parametrize(
    ("text", "failure"),
    [("3@10", RankFailure(3, 10.0)), ("0@1.5+20", RankFailure(0, 1.5, 20.0)), ("2@1e2", RankFailure(2, 100.0))],
)
def test_rank_failures_as_text(text: str, failure: RankFailure) -> None:
    assert RankFailure.parse(text) == failure


@pytest.mark.parametrize(
    "text", ["", "3", "3@", "@1", "x@1", "-1@1", "1@-1", "1@2+-3", "1@nan", "1@2+", "1@2+inf"]
)
def test_wrong_rank_failures(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"must be RANK@TIME_S or RANK@TIME_S\+DOWN_S.*got " + re.escape(repr(text))
    ):
        RankFailure.parse(text)


@pytest.mark.parametrize(
    ("text", "slow"),
    [("3@2", SlowRank(3, 2.0)), ("0@1.5:10-20", SlowRank(0, 1.5, 10.0, 20.0))],
)
def test_slow_ranks_as_text(text: str, slow: SlowRank) -> None:
    assert SlowRank.parse(text) == slow


@pytest.mark.parametrize("text", ["", "3", "3@0", "3@-1", "3@2:", "3@2:5", "3@2:5-4", "3@2:-1-4", "3@inf", "x@2"])
def test_wrong_slow_ranks(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be RANK@FACTOR or .*got " + re.escape(repr(text))):
        SlowRank.parse(text)
