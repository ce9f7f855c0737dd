"""The best known schedule: one that keeps all rules, never above the optimum, and mostly equal to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from gfdit.core import ExecutionLayout, TaskView
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.bounds.best_known import KnownSchedule, best_known
from gfdit.sim.bounds.exact import optimal_num_met
from gfdit.sim.bounds.fluid import TOLERANCE_S
from gfdit.sim.bounds.rolling import rolling
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS, generate, workload_classes
from tests.sim.tables import DECODE_S, ENCODE_S, PREPARE_S, STEP_S, line, table


def check(schedule: KnownSchedule, trace: Sequence[TraceRequest], costs: CostTable, num_ranks: int) -> None:
    """Every task of every request that is met, in order, as long as the table says, on ranks that there are."""
    cost = TableCostModel(costs)
    graphs = GraphBuilder(cost, num_ranks)
    changes: list[tuple[int, int]] = []
    num_met = 0
    for request, runs in zip((each.request() for each in trace), schedule.runs, strict=True):
        if runs is None:
            num_met += request.deadline_s is None
            continue
        num_met += 1
        views = iter([TaskView.of(request, task) for task in graphs.build(request).tasks])
        now_s = request.arrival_s
        for run in runs:
            assert run.start_ns / 1e9 >= now_s - 1e-9
            now_s = run.start_ns / 1e9
            changes += [(run.start_ns, run.num_ranks), (run.end_ns, -run.num_ranks)]
            for _ in range(run.num_tasks):
                view = next(views)
                (spec,) = (spec for spec in cost.candidates(view) if spec.size == run.num_ranks)
                now_s += cost.task_s(view, ExecutionLayout(tuple(range(spec.size)), spec))
            assert run.end_ns / 1e9 == pytest.approx(now_s, abs=1e-6)
        assert next(views, None) is None
        assert request.deadline_s is not None and now_s <= request.deadline_s + 2 * TOLERANCE_S
    busy = 0
    for _, change in sorted(changes):
        busy += change
        assert busy <= num_ranks
    assert schedule.num_met == num_met


def instance(draw: random.Random) -> list[TraceRequest]:
    arrival_s, trace = 0.0, []
    for index in range(draw.randint(2, 4)):
        steps = draw.randint(1, 2)
        alone_s = ENCODE_S + PREPARE_S + steps * STEP_S[1] + DECODE_S
        deadline_s = round(draw.uniform(0.7, 2.0) * alone_s, 2)
        trace.append(line(f"r{index}", arrival_s, num_steps=steps, deadline_s=deadline_s))
        arrival_s += draw.choice((0.0, 0.25, 1.0, 2.0))
    return trace


def test_at_the_optimum_of_most_small_instances_and_never_above() -> None:
    equal = 0
    for seed in range(10):
        trace, num_ranks = instance(random.Random(seed)), (2, 4)[seed % 2]
        found = best_known(trace, table(), num_ranks=num_ranks, num_moves=200)
        check(found, trace, table(), num_ranks)
        optimum = optimal_num_met(trace, table(), num_ranks=num_ranks)
        assert found.num_met <= optimum, seed
        equal += found.num_met == optimum
    assert equal >= 8


@pytest.mark.parametrize("name", ["tetriserve-uniform", "tetriserve-skewed"])
def test_of_a_crowded_mix_it_is_a_schedule(name: str) -> None:
    costs, pattern = load_cost_table("flux-h100"), PATTERNS[name]
    classes = workload_classes(pattern, TableCostModel(costs))
    trace = generate(pattern, classes, num_ranks=8, load=1.2, seed=0)[:60]
    start, found = (best_known(trace, costs, num_ranks=8, num_moves=count) for count in (0, 300))
    check(found, trace, costs, 8)
    assert found.num_met > start.num_met


def test_the_same_again_from_the_same_seed() -> None:
    trace = [line(f"r{i}", 0.5 * i, deadline_s=9.0) for i in range(12)]
    found = [best_known(trace, table(), num_ranks=4, seed=seed, num_moves=50) for seed in (1, 1, 2)]
    assert found[0] == found[1] and found[0].runs != found[2].runs


@pytest.mark.parametrize("schedule", [best_known, rolling])
def test_deadlines_none_impossible_and_with_grace(schedule: Callable[..., KnownSchedule]) -> None:
    fastest_s = ENCODE_S + PREPARE_S + 2 * STEP_S[4] + DECODE_S
    trace = [line("free"), line("late", deadline_s=fastest_s - 0.5), line("just", 100.0, deadline_s=fastest_s)]
    found = schedule(trace, table(), num_ranks=4)
    assert [runs is None for runs in found.runs] == [True, True, False]
    assert (found.num_met, found.attainment) == (2, 2 / 3)
    assert schedule(trace, table(), num_ranks=4, grace_s=0.5).num_met == 3
    assert schedule([replace(trace[0])], table(), num_ranks=1).num_met == 1
    with pytest.raises(ValueError, match="no cost for model"):
        schedule([line("other", model="x")], table(), num_ranks=1)
