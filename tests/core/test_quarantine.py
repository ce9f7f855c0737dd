"""Ranks that fail: who is to blame, who runs again where, and what becomes of the rank."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable

import pytest

from gfdit.core import ControlPlane, ParallelSpec, Policy, RankRecord, TaskKind
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control.quarantine import PATIENCE_S
from gfdit.core.cost.table import NominalCostModel
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.static import Static
from gfdit.policies.triage import Triage
from tests.support.thorough import thorough
from tests.support.workload import make_request

TASK_S, FAILS_AFTER_S, RESTART_S = 0.1, 0.01, 1.0
Fails = Callable[[cmd.RunTask, int], bool]


class Server:
    """A control plane and ranks that do what they are told, in virtual time, but for those of which ``fails`` says
    so.

    A rank that fails a task does so by itself, and its peers echo that. ``probe`` is what its probe says.
    """

    def __init__(
        self, policy: Policy, num_ranks: int, fails: Fails, probe: str = "", *, restarts: bool = True
    ) -> None:
        ranks = [RankRecord(rank, frozenset("m")) for rank in range(num_ranks)]
        self.plane = ControlPlane(policy, ranks, NominalCostModel())
        self.fails, self.probe, self.restarts = fails, probe, restarts
        self.out_of_memory = False  # is what they say that fail
        self.cannot_send: frozenset[int] = frozenset()  # ranks whose parts do not come
        self.measure: Callable[[cmd.RunTask], ev.MemoryUse] | None = None
        self.specs: dict[str, list[ParallelSpec]] = {}  # of its steps, by request
        self.now_s = 0.0
        self.ends: dict[str, cmd.Command] = {}
        self.faults: list[str] = []  # of the policy
        self.restarted: list[cmd.RestartRank] = []
        self.failed_on: Counter[str] = Counter()  # tasks that failed, by request
        self.ran_on: dict[str, set[int]] = {}
        self._queue: list[tuple[float, int, ev.Event]] = []
        self._num_queued = 0

    def at(self, at_s: float, event: ev.Event) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (at_s, self._num_queued, event))

    def run(self) -> None:
        while self._queue:
            self.now_s, _, event = heapq.heappop(self._queue)
            for command in self.plane.handle(event, self.now_s):
                self._obey(command)
            self.plane.check_integrity()
            if (at_s := self.plane.next_expiry_s) is not None and not self._queue:
                self.at(at_s, ev.WakeUp())

    def _obey(self, command: cmd.Command) -> None:
        now_s = self.now_s
        match command:
            case cmd.RunTask(dispatch_id, tasks, layout):
                for task in tasks:
                    if task.kind is TaskKind.DENOISE:
                        self.specs.setdefault(task.request_id, []).append(layout.parallel)
                    self.ran_on.setdefault(task.request_id, set()).update(layout.ranks)
                sources = {transfer.source for move in command.migrations for transfer in move.transfers}
                if unable := sorted(sources & self.cannot_send):
                    self.failed_on.update(task.request_id for task in tasks)
                    for rank in layout.ranks:
                        self.at(now_s, ev.TaskFailed(dispatch_id, rank, "cannot be sent", culprit=unable[0]))
                    return
                culprits = [rank for rank in layout.ranks if self.fails(command, rank)]
                self.failed_on.update(task.request_id for task in tasks if culprits)
                for rank in layout.ranks:
                    if rank in culprits:
                        failed = ev.TaskFailed(
                            dispatch_id, rank, f"rank {rank} raised", out_of_memory=self.out_of_memory
                        )
                        self.at(now_s + FAILS_AFTER_S, failed)
                    elif culprits:
                        failed = ev.TaskFailed(dispatch_id, rank, "echo", caused_by_peer=True)
                        self.at(now_s + FAILS_AFTER_S, failed)
                    else:
                        memory = None if self.measure is None else self.measure(command)
                        self.at(now_s + TASK_S, ev.TaskFinished(dispatch_id, rank, TASK_S, memory=memory))
            case cmd.Migrate(number, _, _, ranks, transfers):
                sent = self.cannot_send.isdisjoint([transfer.source for transfer in transfers])
                for rank in ranks:
                    self.at(now_s, ev.MigrationFinished(number, rank, error="" if sent else "cannot be sent"))
            case cmd.ResetEdges(number, _, ranks):
                for rank in ranks:
                    self.at(now_s, ev.EdgesReset(number, rank))
            case cmd.ProbeRank(probe_id, rank):
                self.at(now_s + FAILS_AFTER_S, ev.RankProbed(probe_id, rank, self.probe))
            case cmd.RestartRank(rank):
                self.restarted.append(command)
                self.at(now_s, ev.RankLost(rank, command.reason))
                if self.restarts and not command.for_good:
                    self.at(now_s + RESTART_S, ev.RankJoined(rank))
            case cmd.ReportFault(message):
                self.faults.append(message)
            case cmd.CompleteRequest(name) | cmd.FailRequest(name) | cmd.CancelRequest(name):
                self.ends[name] = command


def rank_0(command: cmd.RunTask, rank: int) -> bool:
    return rank == 0


@pytest.mark.parametrize("policy", [Triage, *thorough([Fcfs, Equipartition])])
@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("probe", ["", "out of order"])
def test_a_rank_that_fails_fast_eats_no_requests(policy: type[Policy], faulty: int, probe: str) -> None:
    """Of the review: two ranks at half load, one fails every task at once. 200 of 200 requests failed, or 90."""
    server = Server(policy(), 2, lambda command, rank: rank == faulty, probe)
    num_tasks, num_requests = 7, 200
    draw, at_s = random.Random(1), 0.0
    for index in range(num_requests):
        at_s += draw.expovariate(0.5 * 2 / (num_tasks * TASK_S))
        server.at(at_s, ev.RequestArrived(*make_request(f"r{index}")))
    server.run()
    assert len(server.ends) == num_requests
    assert {type(end) for end in server.ends.values()} == {cmd.CompleteRequest}
    assert len(server.failed_on) <= 3, "requests that were tried again"
    assert server.restarted[-1].for_good and server.restarted[-1].rank == faulty


def test_a_request_that_fails_everywhere_is_to_blame_and_no_rank_is() -> None:
    server = Server(Fcfs(), 3, lambda command, rank: command.tasks[0].request_id.startswith("bad"))
    for index in range(60):
        server.at(index * 0.5, ev.RequestArrived(*make_request(f"bad{index}" if index % 3 == 0 else f"r{index}")))
    server.run()
    for name, end in server.ends.items():
        if name.startswith("bad"):
            assert isinstance(end, cmd.FailRequest) and end.status_code == 500 and "raised" in end.error
            assert server.failed_on[name] == 2 and len(server.ran_on[name]) == 2, "once more, elsewhere"
        else:
            assert isinstance(end, cmd.CompleteRequest)
    assert not server.restarted and server.plane.state.ranks.free_in_order == (0, 1, 2)


def test_the_rank_that_cannot_send_is_to_blame_not_those_that_wait_for_it() -> None:
    server = Server(Equipartition(), 4, lambda command, rank: False)
    server.cannot_send = frozenset({0})
    for index in range(30):
        server.at(index * 0.4, ev.RequestArrived(*make_request(f"r{index}")))
    server.run()
    assert len(server.ends) == 30 and {type(end) for end in server.ends.values()} == {cmd.CompleteRequest}
    assert server.failed_on and {command.rank for command in server.restarted} == {0}


def test_an_error_of_the_client_ends_its_request_at_once() -> None:
    server = Server(Fcfs(), 2, lambda command, rank: False)
    (run, *_) = [
        command
        for command in server.plane.handle(ev.RequestArrived(*make_request("a")), 0.0)
        if isinstance(command, cmd.RunTask)
    ]
    commands = server.plane.handle(ev.TaskFailed(run.dispatch_id, 0, "no such LoRA", status_code=422), 1.0)
    assert cmd.FailRequest("a", "no such LoRA", 422) in commands
    assert not any(isinstance(command, cmd.ProbeRank) for command in commands)


def test_two_ranks_that_fail_at_a_time_say_that_it_is_the_request() -> None:
    server = Server(Static(), 2, lambda command, rank: command.tasks[0].step_index == 1)
    server.at(0.0, ev.RequestArrived(*make_request("a")))
    server.run()
    assert isinstance(server.ends["a"], cmd.FailRequest) and server.failed_on["a"] == 1
    assert not server.restarted


def test_the_only_rank_is_tried_once_more_and_never_given_up() -> None:
    failing = deque([True])
    server = Server(Fcfs(), 1, lambda command, rank: bool(failing) and failing.popleft())
    server.at(0.0, ev.RequestArrived(*make_request("a")))
    server.run()
    assert isinstance(server.ends["a"], cmd.CompleteRequest), "its second try went well"
    server.fails, server.probe = rank_0, "out of order"
    for name in "bc":
        server.at(server.now_s, ev.RequestArrived(*make_request(name)))
    server.run()
    assert {type(server.ends[name]) for name in "bc"} == {cmd.FailRequest}
    assert len(server.restarted) > 2 and not any(command.for_good for command in server.restarted)


def test_a_policy_that_needs_all_ranks_gets_them_back() -> None:
    """It can run nothing while one is suspended; no event would ever come."""
    once = deque([True])
    server = Server(Static(), 4, lambda command, rank: rank == 2 and bool(once) and once.popleft())
    server.at(0.0, ev.RequestArrived(*make_request("a")))
    server.run()
    assert isinstance(server.ends["a"], cmd.CompleteRequest) and server.now_s < PATIENCE_S


def test_a_rank_whose_probe_fails_is_replaced_at_once_and_on_probation() -> None:
    server = Server(Fcfs(), 2, rank_0, "out of order")
    for index in range(3):
        server.at(index * 10.0, ev.RequestArrived(*make_request(f"r{index}")))
    server.run()
    assert [command.for_good for command in server.restarted] == [False, True]
    assert "it fails its probe: out of order" in server.restarted[0].reason


def test_a_rank_that_does_well_in_between_is_forgiven() -> None:
    """One task in ten fails on rank 0: that is no reason to replace it."""
    counts: Counter[int] = Counter()

    def fails(command: cmd.RunTask, rank: int) -> bool:
        counts[rank] += 1
        return rank == 0 and counts[rank] % 10 == 0

    server = Server(Fcfs(), 2, fails)
    for index in range(40):
        server.at(index * 1.0, ev.RequestArrived(*make_request(f"r{index}")))
    server.run()
    assert {type(end) for end in server.ends.values()} == {cmd.CompleteRequest}
    assert not server.restarted and server.failed_on
