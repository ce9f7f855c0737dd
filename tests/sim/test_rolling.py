"""Planned anew at every arrival: a schedule by the rules, that looks at nothing that is yet to come."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from gfdit.core.cost.table import TableCostModel
from gfdit.sim.bounds.best_known import KnownSchedule, best_known
from gfdit.sim.bounds.exact import optimal_num_met
from gfdit.sim.bounds.fluid import attainment_bound
from gfdit.sim.bounds.rolling import rolling
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS, generate, workload_classes
from tests.sim.tables import table
from tests.sim.test_best_known import check, instance

Schedule = Callable[[Sequence[TraceRequest]], KnownSchedule]
FLUX = load_cost_table("flux-h100")


@pytest.fixture(scope="module")
def crowded() -> list[TraceRequest]:
    pattern = PATTERNS["tetriserve-uniform"]
    classes = workload_classes(pattern, TableCostModel(FLUX))
    return generate(pattern, classes, num_ranks=8, load=1.2, seed=0)[:60]


def test_never_above_the_optimum_of_small_instances_and_mostly_near_it() -> None:
    found = []
    for seed in range(10):
        trace, num_ranks = instance(random.Random(seed)), (2, 4)[seed % 2]
        schedule = rolling(trace, table(), num_ranks=num_ranks)
        check(schedule, trace, table(), num_ranks)
        found.append((schedule.num_met, optimal_num_met(trace, table(), num_ranks=num_ranks)))
    assert all(met <= optimum for met, optimum in found)
    assert sum(met for met, _ in found) >= 0.8 * sum(optimum for _, optimum in found)


def test_of_a_crowded_mix_it_is_a_schedule(crowded: list[TraceRequest]) -> None:
    found = rolling(crowded, FLUX, num_ranks=8)
    check(found, crowded, FLUX, 8)
    assert 0.5 < found.attainment < attainment_bound(crowded, FLUX, num_ranks=8).attainment


def starts_ns(schedule: KnownSchedule, before_ns: float) -> dict[int, list[int]]:
    """Of every request that is met, when its tasks begin."""
    found = {}
    for index, runs in enumerate(schedule.runs):
        if runs is not None:
            of_tasks = [
                run.start_ns + number * (run.end_ns - run.start_ns) // run.num_tasks
                for run in runs
                for number in range(run.num_tasks)
            ]
            found[index] = [start_ns for start_ns in of_tasks if start_ns < before_ns]
    return found


def looks_ahead(schedule: Schedule, trace: Sequence[TraceRequest]) -> bool:
    """Whether what begins before a request comes depends on it or on those behind it."""
    whole = schedule(trace)
    for count in range(5, len(trace), 5):
        now_ns = trace[count].arrival_s * 1e9
        before, after = starts_ns(schedule(trace[:count]), now_ns), starts_ns(whole, now_ns)
        if any(before[index] != after[index] for index in before.keys() & after.keys()):
            return True
    return False


def test_it_does_not_look_ahead(crowded: list[TraceRequest]) -> None:
    assert not looks_ahead(lambda trace: rolling(trace, FLUX, num_ranks=8), crowded)
    assert looks_ahead(lambda trace: best_known(trace, FLUX, num_ranks=8, num_moves=20), crowded)
