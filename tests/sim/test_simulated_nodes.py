"""Simulated nodes: crossing them takes longer, and policies that see them stay on one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gfdit.core import Decision, Policy, SchedulerView
from gfdit.core.cost.file import StepExchanges
from gfdit.core.cost.nodes import Nodes
from gfdit.policies.edf import Edf
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.rssp import Rssp
from gfdit.policies.static import Static
from gfdit.policies.tetriserve import TetriServe
from gfdit.policies.triage import Triage
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import SimulationRun, Simulator
from tests.sim.tables import MIGRATION_S, line, table

TABLE = replace(table(), exchanges=(StepExchanges("m", 10, 1e6),))
TRACE = [
    line(f"r{index}", 0.9 * index, num_steps=1 + index % 4, deadline_s=4.0 + index % 5) for index in range(24)
]
RANKS, PER_NODE = 8, 4
POLICIES: dict[str, Callable[[], Policy]] = {
    "static": Static,
    "edf": Edf,
    "equipartition": Equipartition,
    "rssp": Rssp,
    "fcfs": lambda: Fcfs(4),
    "triage": Triage,
}


def simulate(policy: Policy, nodes: Nodes | None, **changes: Any) -> SimulationRun:
    return Simulator(policy, TABLE, TRACE, SimulationOptions(RANKS, nodes=nodes, **changes)).run()


def watch(policy: Policy) -> list[bool]:
    """For every layout across nodes from now on, whether a node had ranks for it."""
    schedule = policy.schedule
    could_stay: list[bool] = []

    def watching(view: SchedulerView) -> Decision:
        decision = schedule(view)
        free = Counter([rank // PER_NODE for rank in view.free_ranks])
        for dispatch in decision.dispatches:
            nodes = Counter([rank // PER_NODE for rank in dispatch.layout.ranks])
            if len(nodes) > 1:
                could_stay.append(max(free.values()) >= len(dispatch.layout.ranks))
            free -= nodes
        return decision

    policy.schedule = watching  # type: ignore[method-assign]
    return could_stay


@pytest.mark.parametrize("name", POLICIES)
def test_policies_stay_on_a_node_that_has_room(name: str) -> None:
    policy = POLICIES[name]()
    could_stay = watch(policy)
    run = simulate(policy, Nodes(PER_NODE))
    assert not any(could_stay) and not run.faults
    assert all(request.end_s is not None for request in run.requests)


def test_tetriserve_stays_on_nodes_within_its_rounds() -> None:
    run = simulate(TetriServe(), Nodes(PER_NODE))
    assert not run.faults and all(request.end_s is not None for request in run.requests)


def test_what_crosses_nodes_takes_longer() -> None:
    """One request on both of two nodes: its steps pay for every exchange, its copies for the slower link."""
    options = SimulationOptions(2, nodes=Nodes(1, between_bytes_per_s=1e8, between_latency_s=0.01))
    ends_s = []
    for nodes in (None, options.nodes):
        costs = replace(TABLE, ranks_per_node=1)  # times on two ranks would be of two nodes
        offered = Simulator(Static(), costs, [line("a")], replace(options, nodes=nodes)).run()
        crossing = Simulator(Static(), TABLE, [line("a")], replace(options, nodes=nodes)).run()
        ends_s.append((offered.requests[0].end_s or 0.0, crossing.requests[0].end_s or 0.0))
    (plain_s, _), (measured_s, bounded_s) = ends_s
    assert measured_s == pytest.approx(plain_s + 2 * 0.01)  # of two copies; what steps take more is in their times
    assert bounded_s == pytest.approx(plain_s - 2 * MIGRATION_S + 2 * (2.0 - 1.25))  # no node has two ranks: alone


def test_policies_that_are_not_told_pay_all_the_same() -> None:
    slow = Nodes(3, between_bytes_per_s=1e7, within_bytes_per_s=1e9)
    told, blind = simulate(Equipartition(), slow), simulate(Equipartition(), slow, hides_nodes=True)
    mean_s = [sum(request.latency_s or 0.0 for request in run.requests) for run in (told, blind)]
    assert mean_s[0] < mean_s[1]


def test_without_exchanges_there_is_no_price() -> None:
    with pytest.raises(ValueError, match="no exchanges of 'm': what layouts cost across nodes is unknown"):
        Simulator(Static(), table(), [line("a")], SimulationOptions(2, nodes=Nodes(1)))
