"""Three times what a server can do, for ten minutes: it turns the rest away at once and stays as useful."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gfdit.core import Policy
from gfdit.core import events as ev
from gfdit.core.policy.admission import with_admission
from gfdit.policies.edf import Edf
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.triage import Triage
from gfdit.sim.simulator import SimulationOptions, SimulationRun, Simulator, Status
from gfdit.sim.trace import TraceRequest
from tests.sim.tables import AROUND_S, STEP_S, line, table
from tests.support.thorough import thorough

NUM_RANKS = 4
SECONDS = 600.0
REQUEST_S = AROUND_S + 2 * STEP_S[1]  # of one rank, which does most work a second alone
CAPACITY_RPS = NUM_RANKS / REQUEST_S
DEADLINE_S = 4 * REQUEST_S
POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": lambda: Fcfs(1), "edf": Edf, "triage": Triage}


class Watched(Simulator):
    """Notes the most requests that were alive at a time."""

    most_alive = 0

    def _tell(self, event: ev.Event) -> None:
        super()._tell(event)
        self.most_alive = max(self.most_alive, len(self._control.state.requests))


def arrivals(load: float) -> list[TraceRequest]:
    draw, at_s = random.Random(1), 0.0
    times = []
    while (at_s := at_s + draw.expovariate(load * CAPACITY_RPS)) < SECONDS:
        times.append(at_s)
    return [line(f"r{index}", at_s, deadline_s=DEADLINE_S) for index, at_s in enumerate(times)]


def serve(policy: Policy, trace: list[TraceRequest]) -> tuple[SimulationRun, int]:
    simulator = Watched(policy, table(), trace, SimulationOptions(NUM_RANKS))
    return simulator.run(), simulator.most_alive


@pytest.mark.parametrize("mode", ["deadline", "promise"])
@pytest.mark.parametrize("name", ["triage", *thorough(["fcfs", "edf"])])
def test_overload(name: str, mode: str) -> None:
    policy = POLICIES[name]
    # Saturated: always something to do, nothing to be late for.
    saturated, _ = serve(policy(), [line(f"s{index}", 0.0) for index in range(int(CAPACITY_RPS * SECONDS))])
    saturated_rps = len(saturated.requests) / saturated.last_end_s

    done, most_alive = serve(with_admission(policy(), mode), arrivals(3.0))
    # Admission estimates ends to about a step.
    in_time = [request for request in done.requests if request.met_deadline(grace_s=STEP_S[1])]
    turned_away = [request for request in done.requests if request.status is Status.REJECTED]
    completed = [request for request in done.requests if request.status is Status.COMPLETED]
    assert len(completed) / done.last_end_s >= 0.95 * saturated_rps
    assert len(in_time) / done.last_end_s >= 0.95 * saturated_rps
    assert len(completed) + len(turned_away) == len(done.requests)
    assert all(request.end_s == request.trace.arrival_s for request in turned_away), "at once"
    # As many as can end before the deadline of one that arrives now.
    assert most_alive <= NUM_RANKS * (DEADLINE_S / REQUEST_S + 1)
