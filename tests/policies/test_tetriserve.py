"""The parts of TetriServe against exhaustive search, and the policy against its baselines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfdit.core import Decision, ParallelSpec, Policy, RankView, Request, SchedulerView, Shape, TaskKind
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.estimates import ServiceTimes
from gfdit.core.policy.ranks import RankCounts
from gfdit.policies._allocation import Degree, minimal_allocation, useful_degrees
from gfdit.policies._knapsack import pack
from gfdit.policies._prospects import Prospect
from gfdit.policies._round import Job, Plan, fill, scale_up
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.rssp import Rssp
from gfdit.policies.tetriserve import TetriServe
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.simulator import SimulationOptions, Simulator
from gfdit.sim.workloads import PATTERNS, generate, workload_classes

OPTION = st.tuples(st.integers(0, 8), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
GROUPS = st.lists(st.lists(OPTION, max_size=3), max_size=5)


def total(groups: list[list[tuple[int, float]]], chosen: list[int | None]) -> tuple[int, float]:
    picked = [group[index] for group, index in zip(groups, chosen, strict=True) if index is not None]
    return sum(width for width, _ in picked), sum(value for _, value in picked)


@settings(max_examples=60)
@given(groups=GROUPS, capacity=st.integers(0, 12))
def test_the_knapsack_equals_exhaustive_search(groups: list[list[tuple[int, float]]], capacity: int) -> None:
    every = itertools.product(*([None, *range(len(group))] for group in groups))
    fitting = [total(groups, list(chosen)) for chosen in every]
    best = max((value, -width) for width, value in fitting if width <= capacity)
    width, value = total(groups, pack(groups, capacity))
    assert (value, -width) == best


STEP_S = {ParallelSpec(1): 1.0, ParallelSpec(2): 0.55, ParallelSpec(4): 0.32, ParallelSpec(8): 0.3}
DEGREES = useful_degrees(STEP_S, 8)


def cost(mix: list[tuple[Degree, int]]) -> tuple[float, float]:
    """Rank-seconds and seconds."""
    rank_s = sum(spec.size * seconds * count for (spec, seconds), count in mix)
    return rank_s, sum(seconds * count for (_, seconds), count in mix)


@settings(max_examples=40)
@given(num_steps=st.integers(1, 6), available_s=st.floats(0.1, 8.0))
def test_a_minimal_allocation_wastes_at_most_one_step_of_rounding(num_steps: int, available_s: float) -> None:
    every = [
        [(degree, count) for degree, count in zip(DEGREES, counts, strict=True) if count]
        for counts in itertools.product(range(num_steps + 1), repeat=len(DEGREES))
        if sum(counts) == num_steps
    ]
    in_time = [mix for mix in every if cost(mix)[1] <= available_s]
    found = minimal_allocation(DEGREES, num_steps, available_s)
    if not in_time:
        assert not found
        return
    assert sum(count for _, count in found) == num_steps
    assert cost(found)[1] <= available_s + 1e-6
    widest = max(spec.size * seconds for spec, seconds in DEGREES)
    assert cost(found)[0] <= min(cost(mix)[0] for mix in in_time) + widest
    alone = minimal_allocation(DEGREES, num_steps, available_s, mixed=False)
    assert len(alone) == 1 and cost(alone)[0] >= cost(found)[0] - 1e-9


def test_two_degrees_cost_less_than_one() -> None:
    assert minimal_allocation(DEGREES, 10, 8.0) == [(DEGREES[0], 5), (DEGREES[1], 5)]
    assert minimal_allocation(DEGREES, 10, 8.0, mixed=False) == [(DEGREES[1], 10)]
    assert minimal_allocation(DEGREES, 10, 2.9) == []


def test_a_degree_that_gains_nothing_is_not_used() -> None:
    flat = {ParallelSpec(1): 1.0, ParallelSpec(2): 1.0, ParallelSpec(4): 0.5}
    assert [spec.size for spec, _ in useful_degrees(flat, 8)] == [1, 4]
    assert [spec.size for spec, _ in useful_degrees(flat, 3)] == [1]


def attainment(policy: Policy, workload: str, slo_scale: float) -> float:
    """Over three traces of 100 requests at the rate of the evaluation."""
    table = load_cost_table("flux-h100")
    classes = workload_classes(PATTERNS[workload], TableCostModel(table), slo_scale=slo_scale)
    met = 0
    for seed in range(3):
        trace = generate(PATTERNS[workload], classes, num_ranks=8, seed=seed, num_requests=100)
        policy = type(policy)(**{name: getattr(policy, name) for name in POLICY_ARGS.get(policy.name, ())})
        run = Simulator(policy, table, trace, SimulationOptions(8)).run()
        met += sum(request.met_deadline() for request in run.requests)
    return met / 300


POLICY_ARGS = {"fcfs": ("group_size",)}


@pytest.mark.parametrize(
    ("workload", "slo_scale"),
    [("tetriserve-uniform", 1.0), pytest.param("tetriserve-skewed", 1.5, marks=pytest.mark.thorough)],
)
def test_it_meets_more_deadlines_than_rssp_and_any_fixed_degree(workload: str, slo_scale: float) -> None:
    others: list[Policy] = [Rssp(), *(Fcfs(size) for size in (1, 2, 4, 8))]
    best = max(attainment(policy, workload, slo_scale) for policy in others)
    assert attainment(TetriServe(), workload, slo_scale) > best


def test_rssp_takes_the_published_degrees() -> None:
    table = load_cost_table("flux-h100")
    classes = workload_classes(PATTERNS["tetriserve-uniform"], TableCostModel(table))
    trace = generate(PATTERNS["tetriserve-uniform"], classes, num_ranks=8, seed=0, num_requests=40)
    seen: dict[int, set[int]] = {}
    policy = Rssp()
    schedule = policy.schedule

    def recording(view: SchedulerView) -> Decision:
        decision = schedule(view)
        steps = {task.id: task for task in view.ready if task.kind is TaskKind.DENOISE}
        for dispatch in decision.dispatches:
            if (task := steps.get(dispatch.tasks[0])) is not None:
                seen.setdefault(task.shape.height, set()).add(dispatch.layout.parallel.sp)
        return decision

    policy.schedule = recording  # type: ignore[method-assign]
    Simulator(policy, table, trace, SimulationOptions(8)).run()
    assert seen == {256: {1}, 512: {1}, 1024: {2}, 2048: {8}}


def job(num_steps: int, due_s: float) -> Job:
    request = Request("r", "m", Shape(512, 512), num_steps, 0.0)
    specs = tuple([spec for spec, _ in DEGREES])
    left_s = tuple([num_steps * step_s for _, step_s in DEGREES])
    rank_s = tuple([num_steps * spec.size * step_s for spec, step_s in DEGREES])
    times = ServiceTimes(dict(DEGREES), {}, {})
    return Job(Prospect(request, times, DEGREES, specs, num_steps, 0.0, left_s, rank_s, 1.0, due_s), 0.0)  # type: ignore[arg-type]


def test_only_what_lasts_for_the_round_is_widened() -> None:
    for num_steps, size in ((10, 8), (2, 2), (1, 1)):  # in a round of 1.2 s: steps of 1, 0.55, 0.32, 0.3
        plan: Plan = {"r": (job(num_steps, 99.0), DEGREES[0])}
        scale_up(plan, RankCounts(ranks(7)), round_end_s=1.2)
        assert plan["r"][1][0].size == size


def test_an_allocation_of_two_degrees_begins_with_the_narrower_as_published() -> None:
    for widest_first, size in ((False, 1), (True, 2)):
        plan: Plan = {}
        fill(plan, [job(10, 8.0)], RankCounts(ranks(8)), mixed=True, widest_first=widest_first)
        assert plan["r"][1][0].size == size


def ranks(count: int) -> list[RankView]:
    return [RankView(rank, None, None, frozenset({"m"}), 0) for rank in range(count)]
