"""Triage: what it keeps, who goes first, how wide, and how long anybody can be made to wait."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gfdit.core import Decision, ExecutionLayout, Policy, SchedulerView
from gfdit.core.cost.nodes import Nodes
from gfdit.core.cost.table import TableCostModel
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.srtf import Srtf
from gfdit.policies.tetriserve import TetriServe
from gfdit.policies.triage import Triage
from gfdit.sim.compare import PolicyChoice
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import SimulationRun, Simulator
from gfdit.sim.sweep import Grid, run_sweep
from gfdit.sim.trace import TraceRequest
from tests.support.thorough import thorough

TABLE = load_cost_table("qwen-image-h20")
SIZES = (512, 1024, 1536)


def request(name: str, arrival_s: float, size: int, deadline_s: float | None, priority: int = 0) -> TraceRequest:
    return TraceRequest(
        id=name,
        arrival_s=arrival_s,
        model="qwen-image",
        height=size,
        width=size,
        num_frames=1,
        num_steps=10,
        cfg=False,
        slo_class="default",
        deadline_s=deadline_s,
        priority=priority,
    )


def alone_s(asked: TraceRequest) -> float:
    return GraphBuilder(TableCostModel(TABLE), 1).service_s(asked.request())


def run(policy: Policy, trace: list[TraceRequest], num_ranks: int = 1) -> SimulationRun:
    options = SimulationOptions(num_ranks=num_ranks, check_every_event=True)
    return Simulator(policy, TABLE, trace, options).run()


def met(done: SimulationRun) -> set[str]:
    return {asked.trace.id for asked in done.requests if asked.met_deadline()}


def ends(done: SimulationRun) -> list[str]:
    return [asked.trace.id for asked in sorted(done.requests, key=lambda asked: asked.end_s or 0.0)]


def test_the_largest_is_given_up_when_not_all_can_be_in_time() -> None:
    small, large = request("s", 0, 512, None), request("l", 0, 1024, None)
    due_s = 3.2 * alone_s(small) / 0.85
    assert alone_s(large) < due_s
    trace = [request("l", 0.0, 1024, due_s), *(request(f"s{i}", 0.0, 512, due_s) for i in range(3))]
    assert met(run(Triage(), trace)) == {"s0", "s1", "s2"}


def test_weight_decides_who_is_given_up() -> None:
    due_s = 1.5 * alone_s(request("m", 0, 1024, None))
    trace = [request("plain", 0.0, 1024, due_s), request("vip", 0.0, 1024, due_s, priority=1)]
    assert met(run(Triage(), trace)) == {"vip"}


def test_what_cannot_be_in_time_does_not_keep_first_place() -> None:
    doomed = request("doomed", 0.0, 1536, 0.1)
    done = run(Triage(), [doomed, request("next", 0.01, 512, 2.0 * alone_s(request("", 0, 512, None)))])
    assert met(done) == {"next"}
    assert ends(done) == ["next", "doomed"]


def test_a_request_is_as_wide_as_its_deadline_needs() -> None:
    asked = request("r", 0.0, 1536, None)
    busy = [request(f"b{i}", 0.0, 1536, 100 * alone_s(asked)) for i in range(8)]
    tight = request("tight", 0.0, 1536, 0.5 * alone_s(asked))
    assert "tight" in met(run(Triage(), [*busy, tight], num_ranks=4))
    assert "tight" not in met(run(Fcfs(group_size=1), [*busy, tight], num_ranks=4))


def test_spare_ranks_shorten_a_request_without_deadline() -> None:
    asked = request("r", 0.0, 1536, None)
    done = run(Triage(), [asked], num_ranks=4)
    latency_s = done.requests[0].latency_s
    assert latency_s is not None and latency_s < 0.5 * alone_s(asked)


@pytest.mark.parametrize("objective", ["latency", "deadlines"])
def test_without_deadlines_the_shortest_goes_first(objective: str) -> None:
    trace = [request("l", 0.0, 1536, None), request("m", 0.0, 1024, None), request("s", 0.0, 512, None)]
    assert ends(run(Triage(objective=objective), trace)) == ["s", "m", "l"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"reserve": -0.1}, "reserve must be at least 0"),
        ({"patience": 0.0}, "patience must be above 0"),
        ({"price": -1.0}, "price must be at least 0"),
        ({"max_waste": -0.1}, "max_waste must be at least 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Triage(**arguments)


def test_a_deadline_at_any_price_is_not_kept_while_others_wait() -> None:
    """In time on four ranks only, which takes a fifth more rank-seconds than on one."""
    plain = request("", 0, 1536, None)
    trace = [
        request("tight", 0.0, 1536, 0.5 * alone_s(plain)),
        *(request(f"w{i}", 0.0, 1536, None) for i in range(8)),
    ]
    assert "tight" in met(run(Triage(max_waste=0.3), trace, num_ranks=4))
    assert "tight" not in met(run(Triage(max_waste=0.1), trace, num_ranks=4))
    assert "tight" in met(run(Triage(max_waste=0.0), trace[:1], num_ranks=4))


def mean_s(done: SimulationRun, weights: dict[str, float] | None = None) -> float:
    total = {asked.trace.id: (weights or {}).get(asked.trace.id, 1.0) for asked in done.requests}
    return sum(total[asked.trace.id] * (asked.latency_s or math.inf) for asked in done.requests) / sum(
        total.values()
    )


def without_deadlines(seed: int, num_requests: int = 40) -> list[TraceRequest]:
    draw, now_s, trace = random.Random(seed), 0.0, []
    for number in range(num_requests):
        now_s += draw.expovariate(1.0)
        trace.append(request(f"r{number}", now_s, draw.choice(SIZES), None, draw.choice((0, 0, 3))))
    return trace


@pytest.mark.parametrize("seed", [0, *thorough((1, 2, 3))])
@pytest.mark.parametrize("num_ranks", [4, *thorough([2])])
def test_each_objective_is_the_best_at_what_it_claims(seed: int, num_ranks: int) -> None:
    trace = without_deadlines(seed)
    weights = {asked.id: 2.0**asked.priority for asked in trace}
    plain, unweighted = [replace(asked, priority=0) for asked in trace], Triage(objective="latency")
    assert mean_s(run(unweighted, plain, num_ranks)) <= mean_s(run(Srtf(), plain, num_ranks))
    assert mean_s(run(Triage(), plain, num_ranks)) <= mean_s(run(Srtf(), plain, num_ranks))
    runs = {name: run(Triage(objective=name), trace, num_ranks) for name in ("latency", "weighted", "throughput")}
    assert mean_s(runs["latency"]) <= mean_s(runs["weighted"]) + 1e-9
    assert mean_s(runs["weighted"], weights) < mean_s(runs["latency"], weights)
    for asked in runs["throughput"].requests:
        assert asked.rank_seconds == pytest.approx(alone_s(asked.trace))


@pytest.mark.parametrize(
    ("deadline_s", "objective", "shares"),
    [(10.0, "deadlines", True), (0.1, "deadlines", False), (10.0, "latency", False), (None, "throughput", True)],
)
def test_a_step_is_shared_where_that_costs_no_deadline(
    deadline_s: float | None, objective: Any, shares: bool
) -> None:
    table = load_cost_table("flux-h100")
    model = table.entries[0].model
    trace = [replace(request(f"r{i}", 0.0, 256, deadline_s), model=model) for i in range(4)]

    def rank_s(batching: bool) -> float:
        done = Simulator(Triage(objective=objective, batching=batching), table, trace, SimulationOptions(1)).run()
        assert len(met(done)) == (0 if deadline_s == 0.1 else 4)
        return sum(asked.rank_seconds for asked in done.requests)

    assert (rank_s(True) < 0.85 * rank_s(False)) == shares


def test_any_priority_is_an_answer() -> None:
    trace = [
        request("least", 0.0, 512, None, -(10**6)),
        request("plain", 0.0, 512, None),
        request("most", 0.0, 1536, None, 10**6),
    ]
    assert ends(run(Triage(patience=100.0), trace)) == ["most", "plain", "least"]


def starving_trace(num_small: int) -> list[TraceRequest]:
    """Small requests arrive as fast as they can be served, so that the shortest always is another one."""
    gap_s = 1.01 * alone_s(request("", 0, 512, None))
    small = [request(f"s{i}", i * gap_s, 512, 3.0 * gap_s) for i in range(num_small)]
    return sorted([request("l", 0.5, 1536, 0.1), *small], key=lambda asked: asked.arrival_s)


def longest_s(done: SimulationRun) -> float:
    return max(asked.latency_s for asked in done.requests if asked.latency_s is not None)


def longest_waits_s(trace: list[TraceRequest], num_ranks: int) -> float:
    """Of first come, first served, the work flowing like a fluid."""
    backlog_rank_s = until_s = longest = 0.0
    for asked in trace:
        backlog_rank_s = max(0.0, backlog_rank_s - num_ranks * (asked.arrival_s - until_s))
        until_s = asked.arrival_s
        longest = max(longest, backlog_rank_s / num_ranks + alone_s(asked))
        backlog_rank_s += alone_s(asked)
    return longest


def test_patience_ends_starvation() -> None:
    trace = starving_trace(60)
    patient, endless = run(Triage(patience=1.0), trace), run(Triage(patience=math.inf), trace)
    assert longest_s(patient) <= 2.0 * longest_waits_s(trace, 1)  # and its own time
    assert longest_s(endless) > 3.0 * longest_waits_s(trace, 1)  # what patience is for


PATTERNS = st.lists(  # gaps in units of the mean work, sizes, deadlines in units of the time alone, priorities
    st.tuples(
        st.sampled_from((0.0, 0.2, 0.5, 1.0, 3.0)),
        st.sampled_from(SIZES),
        st.sampled_from((None, 0.1, 0.6, 1.05, 1.5, 4.0)),
        st.sampled_from((0, 0, 0, 4)),
    ),
    min_size=1,
    max_size=6,
)


def check_waits(pattern: list[Any], num_repeats: int, num_ranks: int, patience: float) -> int:
    """Repeat a pattern: what it does to one request it can go on doing. Returns the number of tasks."""
    now_s, trace = 0.0, []
    for number, (gap, size, factor, priority) in enumerate(pattern * num_repeats):
        plain = request("", 0, size, None)
        now_s += gap * alone_s(plain) / num_ranks
        deadline_s = None if factor is None else factor * alone_s(plain)
        trace.append(request(f"r{number}", now_s, size, deadline_s, priority))
    done = Simulator(Triage(patience=patience), TABLE, trace, SimulationOptions(num_ranks)).run()
    slack_s = 2 * max(alone_s(asked) for asked in trace)
    allowed_s = (patience + 1) * longest_waits_s(trace, num_ranks) + slack_s
    assert not done.faults and longest_s(done) <= allowed_s
    return done.num_tasks


@given(PATTERNS, st.sampled_from((1, 2, 4)), st.sampled_from((0.5, 1.25)))
@settings(max_examples=12)
def test_nobody_waits_longer_than_stated(pattern: list[Any], num_ranks: int, patience: float) -> None:
    check_waits(pattern, 1 + 40 // len(pattern), num_ranks, patience)


@pytest.mark.thorough
def test_nobody_waits_longer_than_stated_in_a_million_events() -> None:
    num_tasks = 0

    @given(PATTERNS, st.sampled_from((1, 2, 4)), st.sampled_from((0.5, 1.25)))
    @settings(max_examples=400, suppress_health_check=list(HealthCheck))
    def search(pattern: list[Any], num_ranks: int, patience: float) -> None:
        nonlocal num_tasks
        num_tasks += check_waits(pattern, 1 + 400 // len(pattern), num_ranks, patience)

    search()
    assert num_tasks > 1_000_000


def test_late_work_is_out_of_the_way_of_wide_requests() -> None:
    """Images that need all ranks: a late step on one of them would keep the others from starting."""
    costs, num_ranks = load_cost_table("flux-h100"), 8
    grid = Grid(
        costs,
        (PolicyChoice("triage"), PolicyChoice("triage", (("withholding", "false"),))),
        ("tetriserve-skewed",),
        (0, 1, 2),
        SimulationOptions(num_ranks),
        loads=(0.9,),
        duration_s=60.0,
    )
    sweep = run_sweep(grid)
    (point,) = sweep.points
    default, without = sweep.policies
    assert sweep.difference(point, default, without, "slo_attainment").mean > 0.02


@pytest.mark.parametrize("withholding", [True, False])
def test_where_many_need_several_ranks_late_steps_wait_for_all_who_can_be_in_time(withholding: bool) -> None:
    """An image of 2048 x 2048 takes 3.9 s on eight ranks: within 5 s only several can do it, within 3 s none."""
    policy, begun = Triage(withholding=withholding), []

    def image(name: str, arrival_s: float, size: int, deadline_s: float) -> TraceRequest:
        return replace(request(name, arrival_s, size, deadline_s), model="flux.1-dev", num_steps=20)

    trace = [image(f"tight{number}", 10.0 * number, 2048, 5.0) for number in range(3)]
    trace += [image("late", 40.0, 2048, 3.0), image("small", 41.0, 256, 1.5)]
    schedule = policy.schedule

    def recording(view: SchedulerView) -> Decision:
        decision = schedule(view)
        if any([name.startswith("late/") for dispatch in decision.dispatches for name in dispatch.tasks]):
            begun.append("small" in view.requests)
        return decision

    policy.schedule = recording  # type: ignore[method-assign]
    done = Simulator(policy, load_cost_table("flux-h100"), trace, SimulationOptions(8)).run()
    assert all([one.met_deadline() for one in done.requests if one.trace.id != "late"])
    assert any(begun) is not withholding, "whether a late step began beside the small one"
    assert not all(begun)


class Watched:
    """Notes the layouts of what ``policy`` starts."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name = policy, policy.name
        self.layouts: list[ExecutionLayout] = []

    def schedule(self, view: SchedulerView) -> Decision:
        decision = self.policy.schedule(view)
        self.layouts += [dispatch.layout for dispatch in decision.dispatches]
        return decision


def test_who_needs_several_ranks_waits_for_them_on_one_node() -> None:
    """On two nodes of four under traffic, where a policy that takes what is free gets ranks of both."""
    draw, trace, now_s = random.Random(5), [], 0.0
    for number in range(60):
        now_s += draw.expovariate(0.8)
        size = draw.choice(SIZES)
        due_s = draw.uniform(0.45, 1.2) * alone_s(request("", 0, size, None)) if size == 1536 else None
        trace.append(request(f"r{number}", now_s, size, due_s))
    crossing, in_time = {}, {}
    nodes = Nodes(4)
    for policy in (Triage(), TetriServe()):
        watched = Watched(policy)
        done = Simulator(watched, TABLE, trace, SimulationOptions(8, nodes=nodes)).run()
        narrow = [layout for layout in watched.layouts if 1 < layout.parallel.sp <= 4]
        crossing[policy.name] = sum(nodes.crossing(layout).together < layout.parallel.sp for layout in narrow)
        in_time[policy.name] = len(met(done)) / sum(asked.deadline_s is not None for asked in trace)
        assert len(narrow) > 50
    assert crossing["triage"] == 0 < crossing["tetriserve"], crossing
    assert in_time["triage"] >= in_time["tetriserve"], in_time
