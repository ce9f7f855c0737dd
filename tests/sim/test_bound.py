"""The bound on attainment: right where the optimum is known, never below what a policy reaches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.loading import known_policies, load_policy
from gfdit.sim.bounds.fluid import attainment_bound
from gfdit.sim.bounds.work import Mode, efficient
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.results import summarize
from gfdit.sim.simulator import SimulationOptions, Simulator
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS, generate, request_classes
from tests.sim.tables import AROUND_S, STEP_S, line, table
from tests.support.thorough import thorough

ALONE_S = AROUND_S + 2 * STEP_S[1]  # two steps on one rank
FASTEST_S = AROUND_S + 2 * STEP_S[4]


def num_met(trace: list[TraceRequest], num_ranks: int, costs: CostTable | None = None, **options: float) -> int:
    bound = attainment_bound(trace, costs or table(), num_ranks=num_ranks, **options)  # type: ignore[arg-type]
    assert bound.num_requests == len(trace)
    return bound.num_met


@pytest.mark.parametrize(
    ("deadlines_s", "num_ranks", "expected"),
    [
        ([ALONE_S], 1, 1),
        ([ALONE_S - 0.01], 1, 0),
        ([FASTEST_S], 4, 1),
        ([FASTEST_S - 0.01], 4, 0),
        ([FASTEST_S], 2, 0),
        ([2.5 * ALONE_S] * 3, 1, 2),
        ([ALONE_S] * 5, 4, 4),
        # Two of these need eight ranks while both denoise.
        ([FASTEST_S + 0.1] * 2, 4, 1),
        ([FASTEST_S + 0.1] * 2, 8, 2),
        ([None, None, ALONE_S - 0.01], 1, 2),
    ],
)
def test_known_optimum(deadlines_s: list[float | None], num_ranks: int, expected: int) -> None:
    trace = [line(f"r{i}", deadline_s=deadline_s) for i, deadline_s in enumerate(deadlines_s)]
    assert num_met(trace, num_ranks) == expected
    assert num_met(trace, num_ranks, time_limit_s=10.0) == expected


def test_work_cannot_be_done_before_it_arrives() -> None:
    trace = [line(f"r{i}", 100.0, deadline_s=ALONE_S + 0.1) for i in range(3)]
    assert num_met([line("early", deadline_s=ALONE_S), *trace], 1) == 2
    apart = [replace(request, arrival_s=100.0 * i) for i, request in enumerate(trace)]
    assert num_met(apart, 1) == 3


def test_grace_moves_the_deadlines() -> None:
    trace = [line("a", deadline_s=ALONE_S - 1.0)]
    assert num_met(trace, 1) == 0 and num_met(trace, 1, grace_s=1.0) == 1


def test_a_batch_shares_its_ranks() -> None:
    trace = [line(f"r{i}", num_steps=10, deadline_s=AROUND_S + 23.0) for i in range(2)]
    costs = table({1: 2.0})
    alone = next(entry for entry in costs.entries if entry.seconds == 2.0)
    batched = replace(costs, entries=(*costs.entries, replace(alone, batch=2, seconds=2.1)))
    assert num_met(trace, 1, costs) == 1
    assert num_met(trace, 1, batched) == 2


def test_modes_that_mixtures_beat_are_left_out() -> None:
    one, two, four, slow = Mode(2.0, 1), Mode(1.9, 2), Mode(0.75, 4), Mode(1.0, 8)
    assert efficient([two, slow, four, one]) == (one, four)
    assert efficient([Mode(1.0, 1), Mode(1.2, 0.5), Mode(2.0, 4)]) == (Mode(1.2, 0.5), Mode(1.0, 1))


def test_joined_intervals_only_loosen() -> None:
    trace, costs = crowded(0)
    bounds = [num_met(trace, 4, costs, max_intervals=count) for count in (1, 3, 10, 200)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[-1]


def test_the_integer_programme_only_tightens() -> None:
    trace, costs = crowded(0)
    options = {"max_intervals": 50}
    assert num_met(trace, 4, costs, time_limit_s=1.0, **options) <= num_met(trace, 4, costs, **options)


def crowded(seed: int) -> tuple[list[TraceRequest], CostTable]:
    """Far more work than four ranks can do."""
    costs = load_cost_table("wan2.2-synthetic")
    classes = request_classes(TableCostModel(costs), num_steps=10)
    return generate(PATTERNS["short"], classes, num_ranks=4, load=3.0, seed=seed)[:80], costs


def reached(policy: str, trace: list[TraceRequest], costs: CostTable, num_ranks: int) -> int:
    run = Simulator(load_policy(policy, {}), costs, trace, SimulationOptions(num_ranks)).run()
    return round(summarize(run)["slo_attainment"] * len(trace))


@pytest.mark.parametrize("seeds", [range(1), *thorough([range(1, 8)])], ids=str)
def test_no_policy_is_above_it(seeds: range) -> None:
    halved_is_wrong = 0
    for seed in seeds:
        trace, costs = crowded(seed) if seed == 0 else easy(seed)
        bound, halved = num_met(trace, 4, costs), num_met(trace, 2, costs)
        for policy in known_policies():
            met = reached(policy, trace, costs, 4)
            assert met <= bound, (seed, policy)
            halved_is_wrong += met > halved
    # Negative control: with half the capacity it would not be a bound.
    assert halved_is_wrong


def easy(seed: int) -> tuple[list[TraceRequest], CostTable]:
    draw = random.Random(seed)
    arrivals_s = sorted(draw.uniform(0, 120) for _ in range(60))
    deadlines_s = [draw.uniform(1.2, 4.0) * ALONE_S for _ in arrivals_s]
    pairs = zip(arrivals_s, deadlines_s, strict=True)
    trace = [line(f"r{i}", arrival_s, deadline_s=deadline_s) for i, (arrival_s, deadline_s) in enumerate(pairs)]
    return trace, table()
