"""Early rejection of what cannot meet its deadline behind the queue, with any policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gfdit.core import Admission, Policy, RequestView, SchedulerView
from gfdit.core.policy.admission import DeadlineAdmission, with_admission
from gfdit.core.policy.loading import load_policy
from gfdit.policies.edf import Edf
from gfdit.policies.fcfs import Fcfs
from gfdit.sim.simulator import SimulatedRequest, SimulationOptions, Simulator, Status
from gfdit.sim.trace import TraceRequest
from tests.sim.tables import AROUND_S, STEP_S, line, table

ALONE_S = AROUND_S + 2 * STEP_S[1]  # on one rank


def run(policy: Policy, *trace: TraceRequest) -> dict[str, SimulatedRequest]:
    done = Simulator(policy, table(), trace, SimulationOptions(1)).run()
    assert done.faults == []
    return {request.trace.id: request for request in done.requests}


def test_what_cannot_be_in_time_alone_is_rejected_without_a_retry_time() -> None:
    requests = run(load_policy("fcfs", {}, "deadline"), line("a", deadline_s=ALONE_S - 0.1))
    assert requests["a"].status is Status.REJECTED
    assert requests["a"].detail == f"needs {ALONE_S:.1f} s on an idle machine, the deadline allows 5.7 s"
    assert run(load_policy("fcfs", {}, "deadline"), line("a", deadline_s=ALONE_S))["a"].met_deadline()


def test_the_queue_counts_and_a_rejection_spares_the_others() -> None:
    trace = (line("a", deadline_s=ALONE_S), line("b", 0.1, deadline_s=ALONE_S), line("c", 0.2))
    admitted = run(load_policy("fcfs", {}, "deadline"), *trace)
    assert [admitted[name].status.value for name in "abc"] == ["completed", "rejected", "completed"]
    assert "behind 1 requests" in admitted["b"].detail
    # Without admission the late one makes the next wait.
    waiting, spared = run(Fcfs(), *trace)["c"].latency_s, admitted["c"].latency_s
    assert waiting is not None and spared is not None and spared < waiting


def test_only_what_the_policy_serves_before_it_counts() -> None:
    trace = (line("loose", deadline_s=100.0), line("tight", 0.1, deadline_s=2 * ALONE_S - 1.0))
    assert run(with_admission(Fcfs(), "deadline"), *trace)["tight"].status is Status.REJECTED
    assert run(with_admission(Edf(), "deadline"), *trace)["tight"].met_deadline()


def test_a_promise_is_kept() -> None:
    """A tighter request would go before one that was admitted, and make it late."""
    trace = (line("large", num_steps=8, deadline_s=20.0), line("tight", 0.1, deadline_s=ALONE_S + 1.0))
    broken = run(with_admission(Edf(), "deadline"), *trace)
    assert broken["tight"].met_deadline() and not broken["large"].met_deadline()
    kept = run(with_admission(Edf(), "promise"), *trace)
    assert kept["tight"].status is Status.REJECTED and "would make another one" in kept["tight"].detail
    assert kept["large"].met_deadline()
    # Where there is room for both, both are in time.
    easy = run(with_admission(Edf(), "promise"), replace(trace[0], deadline_s=30.0), trace[1])
    assert easy["tight"].met_deadline() and easy["large"].met_deadline()


def test_what_a_policy_would_give_up_is_not_admitted() -> None:
    class Half(Fcfs):
        deadline_share = 0.5

    trace = (line("a", deadline_s=100.0), line("b", deadline_s=2.5 * ALONE_S))
    assert run(with_admission(Fcfs(), "deadline"), *trace)["b"].met_deadline()
    assert run(with_admission(Half(), "deadline"), *trace)["b"].status is Status.REJECTED


def test_waiting_as_long_as_told_helps() -> None:
    answers: list[Admission] = []

    class Noting(DeadlineAdmission):
        def admit(self, request: RequestView, view: SchedulerView) -> Admission:
            answers.append(super().admit(request, view))
            return answers[-1]

    first, second = line("a"), line("b", 0.5, deadline_s=ALONE_S)
    run(Noting(Fcfs()), first, second)
    retry_after_s = answers[-1].retry_after_s
    assert retry_after_s is not None and retry_after_s > 0
    later = replace(second, arrival_s=0.5 + retry_after_s + 0.01)
    assert run(Noting(Fcfs()), first, later)["b"].met_deadline()


def test_a_policy_keeps_its_own_admission_and_other_modes_are_refused() -> None:
    class Picky(Fcfs):
        def admit(self, request: RequestView, view: SchedulerView) -> Admission:
            return Admission.reject("no")

    policy = Picky()
    assert with_admission(policy, "deadline") is policy
    assert with_admission(Fcfs(), "none") == Fcfs()
    with pytest.raises(ValueError, match="admission must be none, deadline, promise, got 'x'"):
        load_policy("fcfs", {}, "x")
