"""Triage: what it keeps, who goes first, how wide, and how long anybody can be made to wait."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfdit.core import Policy
from gfdit.core.cost_table import TableCostModel
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.triage import Triage
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import SimulationRun, Simulator
from gfdit.sim.trace import TraceRequest

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
    [({"share": 0.0}, "share must be above 0"), ({"patience": 0.5}, "patience must be at least 1")],
)
def test_arguments_are_checked(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Triage(**arguments)


def starving_trace(num_small: int) -> list[TraceRequest]:
    """Small requests arrive as fast as they can be served, so that the shortest always is another one."""
    gap_s = 1.01 * alone_s(request("", 0, 512, None))
    small = [request(f"s{i}", i * gap_s, 512, 3.0 * gap_s) for i in range(num_small)]
    return sorted([request("l", 0.5, 1536, 0.1), *small], key=lambda asked: asked.arrival_s)


def longest_s(done: SimulationRun) -> float:
    return max(asked.latency_s for asked in done.requests if asked.latency_s is not None)


def test_patience_ends_starvation() -> None:
    trace = starving_trace(60)
    worst_fcfs_s = longest_s(run(Fcfs(group_size=1), trace))
    patient, endless = run(Triage(), trace), run(Triage(patience=float("inf")), trace)
    allowed_s = 2.0 * worst_fcfs_s + alone_s(request("", 0, 1536, None))
    assert longest_s(patient) <= allowed_s
    assert longest_s(endless) > 2.0 * allowed_s  # what patience is for


ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.sampled_from(SIZES), st.sampled_from((None, 0.5, 1.5, 4.0))),
    min_size=1,
    max_size=25,
)


@given(ARRIVALS, st.sampled_from((1, 2, 4)))
@settings(max_examples=40, deadline=None)
def test_nobody_waits_longer_than_stated(arrivals: list, num_ranks: int) -> None:
    now_s, trace = 0.0, []
    for number, (gap_s, size, factor) in enumerate(arrivals):
        now_s += gap_s
        plain = request("", 0, size, None)
        trace.append(request(f"r{number}", now_s, size, None if factor is None else factor * alone_s(plain)))
    worst_fcfs_s = longest_s(run(Fcfs(group_size=1), trace, num_ranks))
    slack_s = 2.0 * max(alone_s(asked) for asked in trace)
    assert longest_s(run(Triage(), trace, num_ranks)) <= 2.0 * worst_fcfs_s + slack_s


def test_mean_latency_without_deadlines_is_not_above_first_come_first_served() -> None:
    trace = [request(f"r{i}", 0.4 * i, SIZES[i % 3], None) for i in range(30)]

    def mean_s(policy: Policy) -> float:
        return statistics.mean(asked.latency_s or 0.0 for asked in run(policy, trace, 4).requests)

    assert mean_s(Triage(objective="latency")) < 0.9 * mean_s(Fcfs(group_size=1))
