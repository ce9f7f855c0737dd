"""Several steps as one task: what stays as it was, what is rounded, and what it cannot be combined with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from gfdit.cli.main import main
from gfdit.core import ExecutionLayout, ParallelSpec, TaskKind, TaskView
from gfdit.core.routing import ask_for
from gfdit.core.tasks import Shape
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.triage import Triage
from gfdit.sim.bounds.fluid import check_bounded
from gfdit.sim.coarse import CoarseCostModel, Rounding
from gfdit.sim.compare import Job, PolicyChoice, simulate
from gfdit.sim.fleet import Fleet, FleetOptions
from gfdit.sim.rank_faults import RankFailure
from gfdit.sim.simulator import SimulationOptions, Simulator
from gfdit.sim.trace import TraceRequest, write_trace
from tests.sim.runs import ends, run
from tests.sim.tables import AROUND_S, STEP_S, line, table

TRACE = [line("a", 0.0, num_steps=12), line("b", 0.1, num_steps=6), line("c", 0.2, num_steps=9)]


def test_a_policy_that_decides_once_finds_everything_as_it_was() -> None:
    fine, coarse = (run(Fcfs(1), TRACE, steps_per_task=steps) for steps in (1, 3))
    assert ends(coarse) == {name: approx(at_s, abs=1e-6) for name, at_s in ends(fine).items()}
    assert [one.rank_seconds for one in coarse.requests] == approx([one.rank_seconds for one in fine.requests])
    assert (fine.num_tasks, coarse.num_tasks) == (27 + 3 * 3, 9 + 3 * 3)


def test_requests_give_way_after_whole_tasks_only() -> None:
    """The short one waits for five steps instead of one."""
    trace = [line("long", 0.0, num_steps=20), line("short", AROUND_S + 0.1, num_steps=5)]
    fine, coarse = (run(Triage(objective="latency"), trace, 1, steps_per_task=steps) for steps in (1, 5))
    waits_s = [(done.requests[1].start_s or 0.0) - trace[1].arrival_s for done in (fine, coarse)]
    # It comes 1.1 s after the first step has begun, behind encoding and preparing.
    assert waits_s[0] < STEP_S[1] < 4 * STEP_S[1] < waits_s[1] < 5 * STEP_S[1]


def test_what_was_measured_is_learned_for_a_step() -> None:
    task = TaskView("a/denoise", "a", "m", TaskKind.DENOISE, 0, Shape(512, 512), False, (ParallelSpec(1),), ())
    layout, cost = ExecutionLayout((0,)), CoarseCostModel(table(), 4)
    assert cost.task_s(task, layout) == 4 * STEP_S[1]
    version = cost.version
    cost.observe(task, layout, 4 * STEP_S[1])
    assert cost.version == version and cost.task_s(task, layout) == 4 * STEP_S[1]
    for _ in range(20):
        cost.observe(task, layout, 8 * STEP_S[1])
    assert cost.task_s(task, layout) == approx(8 * STEP_S[1], rel=0.01)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.integers(2, 10))
def test_no_steps_are_lost_or_gained_over_all(numbers: list[int], steps_per_task: int) -> None:
    rounding = Rounding(steps_per_task)
    found = [rounding.of(line("a", num_steps=number).request()).num_steps for number in numbers]
    assert all(number >= 1 for number in found)
    if min(numbers) >= steps_per_task:
        assert abs(sum(found) * steps_per_task - sum(numbers)) <= steps_per_task / 2
        assert all(abs(n * steps_per_task - of) <= steps_per_task for n, of in zip(found, numbers, strict=True))


def test_requests_of_few_steps_do_not_shorten_others() -> None:
    rounding = Rounding(10)
    found = [rounding.of(line("a", num_steps=number).request()).num_steps for number in [*[1] * 100, *[40] * 10]]
    assert found[:100] == [1] * 100 and sum(found[100:]) >= 39


def test_a_lost_rank_loses_what_its_task_had_done() -> None:
    done = run(Fcfs(1), [line("a", num_steps=10)], 1, steps_per_task=5, failures=(RankFailure(0, 10.0, 1.0),))
    assert done.requests[0].end_s == approx(11.0 + AROUND_S + 10 * STEP_S[1])


def test_the_result_says_nothing_of_widening() -> None:
    """A request that was rounded up would have widened something, by the table."""
    fine, coarse = (
        simulate(
            Job(PolicyChoice("fcfs"), tuple(TRACE), table(), SimulationOptions(2, steps_per_task=steps))
        ).result
        for steps in (1, 5)
    )
    assert fine["rank_widening_ratio"] == 0.0 and coarse["rank_widening_ratio"] is None


def test_a_router_is_told_of_steps() -> None:
    """It scales what is known to take so many steps, and of a request knows those that the client asks for."""
    asked = []

    class Watched(Fleet):
        def _deadline_aware(self, request: TraceRequest) -> int:
            loads = [server.known.load for server in self._servers]
            asked.append(ask_for(loads, "512x512", request.num_steps, None).rank_s)
            return super()._deadline_aware(request)

    trace = [line("a", 0.0, num_steps=12), line("b", 0.5, num_steps=12), line("c", 3.0, num_steps=12)]
    options = SimulationOptions(1, steps_per_task=3)
    Watched(lambda: Fcfs(1), table(), trace, options, FleetOptions(2, "deadline-aware")).run()
    assert asked[-1] == approx(AROUND_S + 12 * STEP_S[1])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps_per_task": 0}, "steps_per_task must be at least 1, got 0"),
        ({"steps_per_task": 2, "jitter": 0.1}, "jitter is of single steps: leave it out, or steps_per_task"),
        ({"steps_per_task": 2, "run_ahead": 1}, "run_ahead is of single steps"),
        ({"steps_per_task": 2, "dispatch_latency_s": 0.1}, "dispatch_latency_s is of single steps"),
    ],
)
def test_what_it_cannot_be_combined_with(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        SimulationOptions(2, **options)


def test_no_workflows_and_no_bound() -> None:
    options = SimulationOptions(2, steps_per_task=2)
    with pytest.raises(ValueError, match="steps of workflows are single tasks"):
        Simulator(Fcfs(1), table(), (), options, lambda request: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="no upper bound with several steps a task"):
        check_bounded(options)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, costs = str(tmp_path / "trace.jsonl"), str(tmp_path / "costs.json")
    write_trace(trace, TRACE)
    table().save(costs)
    given_ = ["--trace", trace, "--costs", costs, "--policy", "fcfs", "--steps-per-task"]
    assert main(["sim", *given_, "3", "--ranks", "2"]) == 0
    assert main(["sweep", *given_, "3", "--ranks", "2"]) == 0
    assert main(["plan", *given_, "3", "--mean-s", "100"]) == 0
    assert "fewest: 1 rank on 1 node" in capsys.readouterr().out
    assert main(["sim", *given_, "3", "--ranks", "2", "--bound"]) == 2
    assert "no upper bound with several steps a task" in capsys.readouterr().err
    assert main(["plan", *given_, "0", "--mean-s", "100"]) == 2
    assert "steps_per_task must be at least 1, got 0" in capsys.readouterr().err
