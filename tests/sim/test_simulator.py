"""What the simulator charges, and when: against schedules computed by hand."""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from gfdit.core import (
    Admission,
    Decision,
    Dispatch,
    ExecutionLayout,
    RequestView,
    SchedulerView,
    TaskKind,
)
from gfdit.core.cost.file import ArtifactSize
from gfdit.core.cost.table import TableCostModel
from gfdit.observe.timeline import MIGRATE, TimelineWriter, read_timeline
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from gfdit.sim.rank_faults import RankFailure, SlowRank
from gfdit.sim.results import summarize
from gfdit.sim.simulator import SimulationOptions, Simulator, Status, jitter_factor
from tests.sim.runs import Idle, Replay, ends, run, spans_of
from tests.sim.tables import AROUND_S, DECODE_S, ENCODE_S, MIGRATION_S, STEP_S, line, table

# Times


def test_a_request_alone_takes_the_sum_of_its_task_times() -> None:
    (request,) = run(Fcfs(1), [line("a", 3.0, num_steps=7)]).requests
    assert request.latency_s == approx(AROUND_S + 7 * STEP_S[1], abs=1e-9)
    assert request.rank_seconds == approx(AROUND_S + 7 * STEP_S[1], abs=1e-9)


def test_fcfs_on_two_ranks_as_computed_by_hand(tmp_path: Path) -> None:
    trace = [line("a", 0.0, num_steps=2), line("b", 0.1, num_steps=1), line("c", 0.2, num_steps=3)]
    # a: rank 0 from 0.0 for 1.75 + 2 * 2.0. b: rank 1 from 0.1 for 1.75 + 2.0.
    # c: at 0.2 rank 0 has 5.75 s left (running tasks count in full) and rank 1 has 3.75 s, so it waits for b.
    expected = {"a": 5.75, "b": 3.85, "c": 3.85 + 1.75 + 6.0}
    assert ends(run(Fcfs(1), trace)) == {name: approx(at_s, abs=1e-6) for name, at_s in expected.items()}
    spans = [span for span in spans_of(Fcfs(1), trace, tmp_path) if span.request == "c"]
    assert [span.rank for span in spans] == [1] * 6
    assert [span.start_s for span in spans] == approx([3.85, 4.35, 4.60, 6.60, 8.60, 10.60], abs=1e-6)


def test_a_migration_delays_the_dispatch_that_waits_for_it(tmp_path: Path) -> None:
    policy = Replay(((0,), (1,), (1, 0)))
    done = run(policy, [line("a", num_steps=3)])
    # Two copies before step 1 (to rank 1), one before step 2 (latents back to rank 0); decoding needs nothing new.
    busy_s = AROUND_S + 2 * STEP_S[1] + STEP_S[2]
    assert ends(done) == {"a": approx(busy_s + 3 * MIGRATION_S)}
    assert done.requests[0].rank_seconds == approx(busy_s + STEP_S[2])
    assert done.num_migrations == 3  # conditioning and latents, then latents
    spans = spans_of(policy, [line("a", num_steps=3)], tmp_path)
    moves = [(span.rank, span.task, span.ranks, span.duration_s) for span in spans if span.kind == MIGRATE]
    assert len(moves) == 6 and all(seconds == approx(MIGRATION_S) for *_, seconds in moves)
    assert {task for _, task, ranks, _ in moves if ranks == (1, 0)} == {"a/latents/2"}


def test_what_is_measured_without_jitter_is_exactly_what_was_expected() -> None:
    """Else rounding would change the policy's estimates from task to task."""
    trace = [line(f"r{i}", 0.1 * i, num_steps=7) for i in range(5)]
    simulator = Simulator(RandomLayout(), table(), trace, SimulationOptions(4, dispatch_latency_s=0.01))
    simulator.run()
    cost = simulator._control.cost
    assert isinstance(cost, TableCostModel) and len(cost.measured) > 4
    assert {measured.ratio for measured in cost.measured.values()} == {1.0}


def test_dispatch_latency_is_paid_by_every_task() -> None:
    done = run(Fcfs(1), [line("a", num_steps=3)], dispatch_latency_s=0.125)
    assert ends(done) == {"a": approx(AROUND_S + 3 * STEP_S[1] + 6 * 0.125)}


def test_copies_take_their_bytes_one_after_the_other_on_the_lanes_of_their_ranks(tmp_path: Path) -> None:
    sizes = (("conditioning", 500_000_000), ("latents", 250_000_000))
    artifacts = tuple(ArtifactSize("m", kind, 512, 512, 1, False, num_bytes) for kind, num_bytes in sizes)
    costs = replace(table(), artifacts=artifacts)  # 1e9 bytes/s
    path = tmp_path / "timeline.json"
    with TimelineWriter(path, 4, base_s=0.0) as writer:
        policy = Replay(((0,), (0, 1, 2, 3), (1,)))
        done = Simulator(policy, costs, [line("a", num_steps=3)], SimulationOptions(4)).run(writer)
    # Both to ranks 1, 2 and 3, each once a rank; decoding on rank 0 wants the last latents back.
    conditioning_s, latents_s, back_s = 0.25 + 3 * 0.5, 0.25 + 3 * 0.25, 0.25 + 0.25
    busy_s = AROUND_S + 2 * STEP_S[1] + STEP_S[4]
    assert ends(done) == {"a": approx(busy_s + conditioning_s + latents_s + back_s)}
    moves = {(s.task, s.rank): (s.start_s, s.end_s) for s in read_timeline(path) if s.kind == MIGRATE}
    start_s = ENCODE_S + 0.25 + STEP_S[1]
    for rank in range(4):
        assert moves["a/conditioning", rank] == approx((start_s, start_s + conditioning_s), abs=1e-6)
        latents = (start_s + conditioning_s, start_s + conditioning_s + latents_s)
        assert moves["a/latents/1", rank] == approx(latents, abs=1e-6)


def test_a_sender_is_busy_with_one_copy_at_a_time(tmp_path: Path) -> None:
    """Rank 0 made what two requests need elsewhere, at the same time: the second waits for its lane."""

    class Spread(Idle):
        def schedule(self, view: SchedulerView) -> Decision:
            dispatches, free = [], set(view.free_ranks)
            for task in view.ready:
                rank = 0 if task.kind in (TaskKind.ENCODE, TaskKind.PREPARE) else 1 + "ab".index(task.request_id)
                if rank in free and (task.kind is not TaskKind.DENOISE or view.now_s >= 1.5):
                    dispatches.append(Dispatch((task.id,), ExecutionLayout((rank,))))
                    free.discard(rank)
            return Decision(tuple(dispatches))

    trace = [line("a", num_steps=1), line("b", num_steps=1)]
    done = run(Spread(), trace, num_ranks=3)
    # Both are prepared at 1.5; a's two copies, then b's two.
    a_s = 1.5 + 2 * MIGRATION_S + STEP_S[1] + DECODE_S
    assert ends(done) == {"a": approx(a_s), "b": approx(a_s + 2 * MIGRATION_S)}


def test_running_ahead_hides_the_dispatch_latency_of_steps_that_stay_where_they_are() -> None:
    stay = run(Fcfs(1), [line("a", num_steps=3)], dispatch_latency_s=0.125, run_ahead=1)
    assert ends(stay) == {"a": approx(AROUND_S + 3 * STEP_S[1] + 0.125)}  # only the first waits
    # Encode, then step 0 with its rank; step 1 elsewhere; step 2 on both; decode on one again.
    moved = run(Replay(((0,), (1,), (1, 0))), [line("a", num_steps=3)], dispatch_latency_s=0.125, run_ahead=1)
    busy_s = AROUND_S + 2 * STEP_S[1] + STEP_S[2] + 3 * MIGRATION_S
    assert ends(moved) == {"a": approx(busy_s + 4 * 0.125)}


def test_nothing_was_queued_for_a_request_that_waited_between_its_steps() -> None:
    class Turns(Idle):  # one rank, two requests, step by step in turns
        run_ahead = True

        def schedule(self, view: SchedulerView) -> Decision:
            task = min(view.ready, key=lambda task: sum(view.requests[task.request_id].tasks_left.values()) * -1)
            return Decision((Dispatch((task.id,), ExecutionLayout((0,))),)) if view.free_ranks else Decision()

    trace = [line("a"), line("b")]
    done = run(Turns(), trace, num_ranks=1, dispatch_latency_s=0.125, run_ahead=1)
    assert done.last_end_s == approx(2 * (AROUND_S + 2 * STEP_S[1]) + 10 * 0.125)


def test_jitter_draws_are_log_normal_with_mean_one() -> None:
    factors = [jitter_factor(0.2, f"7 r{i}/denoise/3") for i in range(20_000)]
    assert statistics.fmean(factors) == approx(1.0, abs=0.006)
    assert statistics.stdev(factors) == approx(0.202, abs=0.006)
    assert jitter_factor(0.2, "7 r0/denoise/3") == approx(
        0.9200960248445914, rel=1e-12
    )  # on every version of Python


def test_only_denoising_is_parallel(tmp_path: Path) -> None:
    spans = spans_of(Fcfs(4), [line("a")], tmp_path, num_ranks=4)
    assert {(span.kind, span.sp) for span in spans if span.kind != MIGRATE} == {
        ("encode", 1),
        ("prepare", 1),
        ("denoise", 4),
        ("decode", 1),
    }


def test_a_model_without_prepare_times_prepares_while_encoding() -> None:
    done = Simulator(Fcfs(1), table(prepare=False), [line("a")], SimulationOptions(1)).run()
    assert ends(done) == {"a": approx(ENCODE_S + 2 * STEP_S[1] + DECODE_S)}


def test_jitter_spreads_task_times_around_the_table_alike_for_every_policy() -> None:
    trace = [line("a", num_steps=100)]
    ones, again, others = (
        ends(run(Fcfs(1), trace, num_ranks=1, jitter=0.1, seed=seed))["a"] for seed in (1, 1, 2)
    )
    elsewhere = ends(run(Idle(), trace, num_ranks=1, jitter=0.1, seed=1))["a"]
    assert ones == again == elsewhere != others
    # 100 draws of 10 %: a mean within 4 % of the table is four standard deviations.
    assert ones == approx(AROUND_S + 100 * STEP_S[1], rel=0.04)


@settings(max_examples=25)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 4)), min_size=1, max_size=8),
    num_ranks=st.integers(1, 5),
    policy=st.sampled_from([Fcfs, Equipartition, RandomLayout]),
    jitter=st.sampled_from([0.0, 0.3]),
)
def test_work_is_conserved(
    arrivals: list[tuple[float, int]], num_ranks: int, policy: type[Any], jitter: float
) -> None:
    trace = [line(f"r{i}", at_s, num_steps=steps) for i, (at_s, steps) in enumerate(sorted(arrivals))]
    done = run(policy(), trace, num_ranks, jitter=jitter)
    assert [request.trace for request in done.requests] == trace
    assert all(request.status is Status.COMPLETED for request in done.requests)
    assert done.num_tasks == sum(3 + request.num_steps for request in trace)
    busy_s = sum(request.rank_seconds for request in done.requests)
    assert busy_s <= num_ranks * (done.last_end_s - done.first_start_s) + 1e-9
    assert 0 < summarize(done)["rank_busy_ratio"] <= 1 + 1e-9
    assert not done.faults


def test_ranks_run_one_task_at_a_time(tmp_path: Path) -> None:
    trace = [line(f"r{i}", 0.3 * i, num_steps=5) for i in range(8)]
    spans = [s for s in spans_of(RandomLayout(), trace, tmp_path, num_ranks=4) if s.kind != MIGRATE]
    assert len({span.task for span in spans}) == 8 * 8
    for rank in range(4):
        mine = [span for span in spans if span.rank == rank]
        assert all(before.end_s <= after.start_s + 1e-6 for before, after in itertools.pairwise(mine))


# Requests that do not complete


def test_a_request_that_is_never_scheduled_is_served_all_the_same_and_the_policy_named() -> None:
    done = run(Idle(), [line("a"), line("b", 0.5)])
    assert [request.status for request in done.requests] == [Status.COMPLETED, Status.COMPLETED]
    assert any("left every rank idle" in fault for fault in done.faults)


def test_a_policy_that_only_asks_to_be_woken_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gfdit.sim.simulator.MAX_WAKE_UPS", 500)
    done = run(Idle(every_s=1e-3), [line("a"), line("b", 0.5)])
    assert [request.status for request in done.requests] == [Status.COMPLETED, Status.STARVED]
    assert "'idle' woke up 500 times in a row" in done.faults[0]


def test_a_policy_is_woken_when_it_asks() -> None:
    class Patient(Fcfs):
        def schedule(self, view: SchedulerView) -> Decision:
            return super().schedule(view) if view.now_s >= 2.0 else Decision(wake_at_s=2.0)

    assert ends(run(Patient(1), [line("a"), line("b", 1.0)])) == dict.fromkeys("ab", approx(2 + AROUND_S + 4))


def test_the_latest_wish_to_be_woken_replaces_the_one_before() -> None:
    seen_s = []

    class Restless(Idle):  # leaves b waiting, so that it is asked whenever there is an event
        def schedule(self, view: SchedulerView) -> Decision:
            seen_s.append(view.now_s)
            return Decision(wake_at_s=5.1 - 0.8 * view.now_s) if view.now_s < 2 else super().schedule(view)

    run(Restless(), [line("a"), line("b", 1.0)])
    assert seen_s[:3] == [0.0, 1.0, 5.1 - 0.8] and 5.1 not in seen_s


def test_rejected_requests_and_faults_of_the_policy_are_told_apart() -> None:
    class Picky(Fcfs):
        def admit(self, request: RequestView, view: SchedulerView) -> Admission:
            return Admission.reject("full") if request.id == "b" else Admission.accept()

        def schedule(self, view: SchedulerView) -> Decision:
            if view.ready[0].request_id == "c":
                return Decision((Dispatch((view.ready[0].id,), ExecutionLayout((7,))),))
            return super().schedule(view)

    done = run(Picky(1), [line("a"), line("b", 20.0), line("c", 30.0)])
    assert [(request.status, request.end_s) for request in done.requests] == [
        (Status.COMPLETED, approx(AROUND_S + 4)),
        (Status.REJECTED, 20.0),
        (Status.COMPLETED, approx(30.0 + AROUND_S + 4)),
    ]
    assert done.requests[1].detail == "full" and "rank 7 does not exist" in done.faults[0]


# Mistakes of the user


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "n"}, "request 'a': no cost for model 'n', known: m"),
        ({"cfg": True}, "no cost for encode of model 'm' at sp1 with cfg, known: sp1"),
    ],
)
def test_what_the_table_lacks_is_an_error_before_anything_runs(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        run(Fcfs(1), [line("first"), line("a", 1.0, **change)])
    assert told in str(caught.value)


def test_too_few_ranks_for_the_table() -> None:
    with pytest.raises(ValueError, match="runs 'm' on 4 ranks or more, there are 2"):
        Simulator(Fcfs(2), table({4: 1.0}), [line("a")], SimulationOptions(2))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_ranks": 0}, "number of ranks must be at least 1, got 0"),
        ({"jitter": -0.1}, "jitter must be a non-negative number, got -0.1"),
        ({"jitter": float("nan")}, "jitter must be a non-negative number, got nan"),
        ({"dispatch_latency_s": -1.0}, "dispatch_latency_s must be a non-negative number, got -1.0"),
        ({"run_ahead": 2}, "run_ahead must be 0 or 1, got 2"),
        ({"failures": (RankFailure(4, 1.0),)}, "there is no rank 4, ranks: 0 to 3"),
        ({"slow_ranks": (SlowRank(7, 2.0),)}, "there is no rank 7, ranks: 0 to 3"),
        ({"failures": (RankFailure(1, 5.0), RankFailure(1, 4.0, 2.0))}, "rank 1 fails at 5.0 s, but is down"),
    ],
)
def test_impossible_options(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        SimulationOptions(**{"num_ranks": 4} | options)
