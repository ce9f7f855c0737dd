"""A whole cluster in one thread, from one seed: a control plane and a small model of its workers.

The model follows the contract of :mod:`gfdit.core.commands` and nothing else. Each rank has a store of artifacts
and two FIFOs, one for tasks and one for copies; what the heads allow happens in random order. A task that
runs where its part of an input is missing, a collective on which two ranks disagree or an artifact left behind
fails the test.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from gfdit.core import ControlPlane, ExecutionLayout, Policy, RankRecord, Request, Task, TaskGraph
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.artifacts.views import UNKNOWN, ArtifactView, FieldView
from gfdit.core.cost import CostModel
from gfdit.core.cost.table import NominalCostModel
from gfdit.core.tasks import artifact_kind
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout

ECHO = "a peer failed"
BEGUN, WITHDRAWN = "begun", "withdrawn"
COPIED = FieldView("copied", "float32", 4, (2, 3))
VIEWS = (
    UNKNOWN,
    ArtifactView((COPIED,)),
    ArtifactView((COPIED, FieldView("tokens", "float32", 4, (1, 7), sp_dim=1))),
    ArtifactView((FieldView("branches", "float32", 4, (2, 6), sp_dim=1, cfg_dim=0),)),
)
TERMINAL = (cmd.CompleteRequest, cmd.CancelRequest, cmd.RejectRequest, cmd.FailRequest)


@dataclass
class Worker:
    """One rank. ``log`` is the order in which it was given the collectives it takes part in."""

    tasks: deque[cmd.RunTask | cmd.ResetEdges] = field(default_factory=deque)
    copies: deque[cmd.Migrate | cmd.FreeArtifacts | cmd.ResetEdges] = field(default_factory=deque)
    store: dict[str, ExecutionLayout] = field(default_factory=dict)  # artifact -> layout it holds its part of
    made_by: dict[str, int] = field(default_factory=dict)  # artifact -> number of the task or copy
    finished_copies: dict[int, bool] = field(default_factory=dict)  # migration id -> arrived whole
    out_of_step: set[int] = field(default_factory=set)  # peers, since a shared task failed
    begun: set[int] = field(default_factory=set)  # queued dispatches that this rank is on
    failed: set[int] = field(default_factory=set)  # dispatches that failed here
    passed_over: set[int] = field(default_factory=set)  # queued dispatches that were withdrawn
    log: list[cmd.Command] = field(default_factory=list)

    def drop(self, artifacts: Iterable[str]) -> None:
        for name in artifacts:
            self.store.pop(name, None)
            self.made_by.pop(name, None)

    def put(self, artifacts: Iterable[str], layout: ExecutionLayout, number: int) -> None:
        for name in artifacts:
            self.store[name], self.made_by[name] = layout, number


@dataclass
class Faults:
    """Probabilities: per task that runs, and per turn for the rest."""

    task: float = 0.0
    cancel: float = 0.0
    rank_lost: float = 0.0
    probe: float = 0.1
    late_report: float = 0.0
    change: float = 0.0  # of what an operator may change


CHANGES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "equipartition": Equipartition, "random": RandomLayout}


class Cluster:
    """Feeds a control plane legal events in random order and plays its workers."""

    def __init__(
        self,
        policy: Policy,
        num_ranks: int,
        seed: int,
        *,
        cost: CostModel | None = None,
        faults: Faults | None = None,
        resident: Callable[[int], Iterable[str]] = lambda rank: ("m",),
        run_ahead: int = 0,
        plane: type[ControlPlane] = ControlPlane,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        ranks = [RankRecord(rank, frozenset(resident(rank))) for rank in range(num_ranks)]
        self.control = plane(policy, ranks, cost or NominalCostModel(), run_ahead=run_ahead)
        self.control.load_policy = lambda choice: CHANGES[choice.policy]()
        self.workers = {rank: Worker() for rank in range(num_ranks)}
        self.drained: set[int] = set()
        self.handed_on: set[str] = set()  # artifacts, which a task may take along all the same
        self.lost: set[int] = set()
        self.now_s = 0.0
        self.endings: dict[str, list[cmd.Command]] = {}
        self.reports: list[str] = []  # faults
        self.ran: list[cmd.RunTask] = []
        self.wake_at_s: float | None = None
        self.harmed: set[str] = set()  # requests that something went wrong for
        self.claims: dict[int, str] = {}  # what became of queued dispatches: the first claim decides
        self._to_arrive: list[tuple[Request, TaskGraph]] = []
        self._reports_due: list[ev.Event] = []  # of workers, not handed in yet
        self._handed_in: list[ev.Event] = []
        self._to_restart: list[int] = []

    def run(self, requests: Iterable[tuple[Request, TaskGraph]], max_turns: int = 20_000) -> None:
        """Until all requests have ended; then everything must be accounted for."""
        self._to_arrive = list(requests)
        expected = Counter(request.id for request, _ in self._to_arrive)
        for _ in range(max_turns):
            if not self._turn():
                break
        else:
            raise AssertionError("the cluster does not come to rest")
        self.faults = replace(self.faults, change=0.0)
        for rank in sorted(self.lost):
            self._join(rank)
        for rank in self.control.state.ranks.lost:
            assert self.control.is_drained(rank) and not self.workers[rank].store, f"rank {rank} is not put aside"
        self._change_to(set(), None)
        while self._turn():
            pass
        starved = sorted(self.control.state.requests)
        assert not starved, f"nothing happens any more, and {starved} are alive"
        self._check_end(expected)

    def _turn(self) -> bool:
        """Do one random thing that may happen now; False when nothing can."""
        draw = self.random.random
        if self.control.state.requests and draw() < self.faults.cancel:
            ids = [*self.control.state.requests, *self.endings, "nobody"]
            self._send(ev.RequestCancelled(self.random.choice(ids)))
        if self.control.state.requests and draw() < self.faults.rank_lost:
            self._lose_or_join(self.random.randrange(len(self.workers)))
        if self.control.state.requests and draw() < self.faults.change:
            self._change()
        if self._handed_in and draw() < self.faults.late_report:
            self._send(self.random.choice(self._handed_in))
        moves: list[Callable[[], None]] = []
        if self._to_arrive:
            moves.append(self._arrive)
        if self._reports_due:
            moves.append(self._hand_in)
        if self.control.wants_to_look_ahead:
            moves.append(lambda: self._send(ev.LookAhead()))
        if self._to_restart:
            moves.append(self._restart)
        for rank in self.workers.keys() - self.lost:
            moves.extend(self._moves_of(rank))
        if not moves and self.wake_at_s is not None:
            moves.append(self._wake)
        if not moves:
            stuck = [rank for rank, worker in self.workers.items() if worker.tasks or worker.copies]
            assert not stuck, f"ranks {stuck} wait for each other"
            return False
        self.random.choice(moves)()
        return True

    def _send(self, event: ev.Event) -> None:
        self.now_s += self.random.random()
        commands = self.control.handle(event, self.now_s)
        self.control.check_integrity()
        for command in commands:
            self._emit(command)

    def _emit(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.RunTask):
            assert self.drained.isdisjoint(command.layout.ranks), f"{command} is for a rank that is drained"
        if isinstance(command, (cmd.Migrate, cmd.FreeArtifacts)):
            if isinstance(command, cmd.Migrate) and command.keep:
                self.handed_on.add(command.artifact)
            for rank in command.ranks:
                self._worker(rank).copies.append(command)
                self._worker(rank).log.append(command)
        elif isinstance(command, cmd.RunTask):
            self.ran.append(command)
            for rank in command.layout.ranks:
                self._worker(rank).tasks.append(command)
                self._worker(rank).log.append(command)
        elif isinstance(command, cmd.WithdrawTask):
            self._withdraw(command)
        elif isinstance(command, cmd.ResetEdges):
            for rank in command.ranks:
                worker = self._worker(rank)
                lane: deque = worker.tasks if command.lane == "compute" else worker.copies
                lane.append(command)
                worker.log.append(command)
        elif isinstance(command, cmd.ReportFault):
            self.reports.append(command.message)
        elif isinstance(command, cmd.WakeAt):
            self.wake_at_s = command.at_s
        elif isinstance(command, cmd.ProbeRank):
            error = "cannot add" if self.random.random() < self.faults.probe else ""
            self._reports_due.append(ev.RankProbed(command.probe_id, command.rank, error))
        elif isinstance(command, cmd.RestartRank):
            self._to_restart.append(command.rank)
        elif isinstance(command, TERMINAL):
            forgiven = isinstance(command, cmd.FailRequest) and command.error.startswith("policy ")
            if isinstance(command, cmd.FailRequest) and not forgiven:
                assert command.request_id in self.harmed, f"{command} for no reason"
                assert command.error != ECHO, f"{command.request_id} failed with an echo for an error"
            self.endings.setdefault(command.request_id, []).append(command)

    def _worker(self, rank: int) -> Worker:
        assert rank not in self.lost, f"a command for rank {rank}, which is lost"
        return self.workers[rank]

    # What may happen next

    def _arrive(self) -> None:
        request, graph = self._to_arrive.pop(0)
        self._send(ev.RequestArrived(request, graph))

    def _wake(self) -> None:
        assert self.wake_at_s is not None
        self.now_s, self.wake_at_s = max(self.now_s, self.wake_at_s), None
        self._send(ev.WakeUp())

    def _hand_in(self) -> None:
        event = self._reports_due.pop(self.random.randrange(len(self._reports_due)))
        self._handed_in.append(event)
        self._send(event)

    def _moves_of(self, rank: int) -> list[Callable[[], None]]:
        worker = self.workers[rank]
        moves: list[Callable[[], None]] = []
        if worker.copies:
            copy = worker.copies[0]
            if isinstance(copy, cmd.FreeArtifacts):
                moves.append(lambda: self._free(rank, copy))
            elif isinstance(copy, cmd.ResetEdges):
                moves.append(lambda: self._reset_copies(rank, copy))
            elif all(self._is_gone(peer, copy) or self.workers[peer].copies[0] is copy for peer in copy.ranks):
                moves.append(lambda: self._copy(copy))
        if worker.tasks:
            head = worker.tasks[0]
            if isinstance(head, cmd.ResetEdges):
                moves.append(lambda: self._reset(rank, head))
            elif head.after is not None and head.dispatch_id not in worker.begun:
                moves.append(lambda: self._come_to(rank, head))
            elif self._task_may_run(head):
                moves.append(lambda: self._run_task(head))
        return moves

    def _free(self, rank: int, command: cmd.FreeArtifacts) -> None:
        self.workers[rank].copies.popleft()
        worker = self.workers[rank]
        worker.drop([name for name in command.artifacts if worker.made_by.get(name, 0) <= command.before])

    def _copy(self, command: cmd.Migrate) -> None:
        """All its ranks are at it. A copy breaks when a member is gone, and is then finished as well.

        So does one whose holder never got its part of the artifact, because an earlier copy broke.
        """
        whole = not any(self._is_gone(rank, command) for rank in command.ranks)
        if whole:
            held = command.held
            lacking = [rank for rank, layout in held if not self._has_part(rank, command.artifact, layout)]
            doomed = command.request_id in self.harmed or command.keep
            assert not lacking or doomed, f"ranks {lacking} do not hold their part of {command.artifact}"
            whole = not lacking
        if whole:
            self._check_transfers(command)
        for rank in command.ranks:
            if not self._is_gone(rank, command):
                worker = self.workers[rank]
                worker.copies.popleft()
                worker.finished_copies[command.migration_id] = whole
                newest = command.migration_id > worker.made_by.get(command.artifact, 0)
                if whole and newest and rank in command.target.ranks:
                    worker.put((command.artifact,), command.target, command.migration_id)
                error = "" if whole else ECHO
                self._reports_due.append(
                    ev.MigrationFinished(command.migration_id, rank, error=error, caused_by_peer=not whole)
                )

    def _check_transfers(self, command: cmd.Migrate) -> None:
        """What comes is what the target lacks."""
        name, view = command.artifact, self._view_of(command.artifact)
        assert command.view == view, f"the control plane does not know what {name} consists of"
        stores = {rank: worker.store for rank, worker in self.workers.items()}
        held = {rank: store[name] for rank, store in stores.items() if name in store}
        if command.request_id not in self.harmed and command.artifact not in self.handed_on:
            plans = plan_transfers(view, held, command.target).transfers, command.transfers
            needed, planned = (sum(t.num_bytes * len(t.destinations) for t in plan) for plan in plans)
            assert planned == needed, f"{planned} bytes of {name} move, {needed} are needed"

    def _is_gone(self, rank: int, command: cmd.Migrate) -> bool:
        """Lost since, perhaps joined again: it will never get to this copy."""
        return command not in self.workers[rank].copies

    def _task_may_run(self, command: cmd.RunTask) -> bool:
        for rank in command.layout.ranks:
            worker = self.workers[rank]
            if command.dispatch_id in worker.passed_over:
                return False  # its peers wait for it for ever
            if command not in worker.tasks:
                continue  # lost since, perhaps joined again
            needed = [move.migration_id for move in command.migrations if rank in move.ranks]
            if worker.tasks[0] is not command or any(move not in worker.finished_copies for move in needed):
                return False
            if command.after is not None and command.dispatch_id not in worker.begun:
                return False
        return True

    def _claim(self, rank: int | None, command: cmd.RunTask | cmd.WithdrawTask, wish: str) -> str:
        """Settle for all whether a queued task runs; ``rank`` is None for the control plane's wish."""
        return self.claims.setdefault(command.dispatch_id, wish)

    def _withdraw(self, command: cmd.WithdrawTask) -> None:
        if self._claim(None, command, WITHDRAWN) == WITHDRAWN:
            self._reports_due.append(ev.TaskWithdrawn(command.dispatch_id))

    def _come_to(self, rank: int, command: cmd.RunTask) -> None:
        """A rank has come to a queued task: it is on it, passes it over, or cannot be on it while others are."""
        worker = self.workers[rank]
        failed = command.after in worker.failed
        outcome = self._claim(rank, command, WITHDRAWN if failed else BEGUN)
        if outcome == BEGUN and not failed:
            worker.begun.add(command.dispatch_id)
            self._reports_due.append(ev.TaskStarted(command.dispatch_id, rank))
            return
        worker.tasks.popleft()
        if outcome == WITHDRAWN:
            worker.passed_over.add(command.dispatch_id)
        else:
            worker.failed.add(command.dispatch_id)
            self._reports_due.append(ev.TaskFailed(command.dispatch_id, rank, ECHO, caused_by_peer=True))

    def _reset_copies(self, rank: int, command: cmd.ResetEdges) -> None:
        self.workers[rank].copies.popleft()
        self._reports_due.append(ev.EdgesReset(command.reset_id, rank))

    def _reset(self, rank: int, command: cmd.ResetEdges) -> None:
        self.workers[rank].tasks.popleft()
        self.workers[rank].out_of_step.difference_update(command.ranks)
        self._reports_due.append(ev.EdgesReset(command.reset_id, rank))

    def _run_task(self, command: cmd.RunTask) -> None:
        members = [rank for rank in command.layout.ranks if command in self.workers[rank].tasks]
        culprits: set[int] = set()
        broken = any(self._lacks(rank, move) for rank in members for move in command.migrations)
        fails = len(members) < len(command.layout.ranks) or broken
        if not fails:
            self._check_inputs(command)
        if not fails and self.random.random() < self.faults.task:
            fails, culprits = True, {self.random.choice(members)}
        if fails:
            self.harmed.update(task.request_id for task in command.tasks)
        for rank in members:
            worker = self.workers[rank]
            worker.tasks.popleft()
            if fails:
                worker.out_of_step.update(set(members) - {rank})
            through = not fails or (rank not in culprits and len(culprits) and self.random.random() < 0.2)
            if through or self.random.random() < 0.5:  # how far a rank got that then failed is open
                outputs = [name for task in command.tasks for name in task.outputs]
                worker.put(outputs, command.layout, command.dispatch_id)
            if through:
                worker.drop(command.consumes)
            else:
                worker.failed.add(command.dispatch_id)
                error = f"rank {rank} failed" if rank in culprits else ECHO
                failed = ev.TaskFailed(command.dispatch_id, rank, error, caused_by_peer=rank not in culprits)
                self._reports_due.append(failed)
            if through:
                leads = rank == command.layout.ranks[0]
                views = [made for task in command.tasks for made in self._views_to_report(task)] if leads else ()
                seconds = self.random.random() + 0.01
                self._reports_due.append(ev.TaskFinished(command.dispatch_id, rank, seconds, tuple(views)))

    def _lacks(self, rank: int, move: cmd.Migrate) -> bool:
        return rank in move.ranks and not self.workers[rank].finished_copies[move.migration_id]

    def _check_inputs(self, command: cmd.RunTask) -> None:
        for rank in command.layout.ranks:
            inputs = {name for task in command.tasks for name in task.inputs}
            missing = {name for name in inputs if not self._has_part(rank, name, command.layout)}
            assert not self.workers[rank].out_of_step & set(command.layout.ranks), f"rank {rank} was not reset"
            assert not missing, f"rank {rank} runs {command.tasks[0].id} without {sorted(missing)}"

    def _has_part(self, rank: int, artifact: str, layout: ExecutionLayout) -> bool:
        held = self.workers[rank].store.get(artifact)
        fields = self._view_of(artifact).fields
        return held is not None and all(spec.box(held, rank) == spec.box(layout, rank) for spec in fields)

    def _view_of(self, artifact: str) -> ArtifactView:
        """Alike for artifacts of one kind of a request."""
        request_id = artifact.partition("/")[0]
        return VIEWS[zlib.crc32(f"{request_id}/{artifact_kind(request_id, artifact)}".encode()) % len(VIEWS)]

    def _views_to_report(self, task: Task) -> list[tuple[str, ArtifactView]]:
        kinds = {artifact_kind(task.request_id, name) for name in task.inputs}
        new = [name for name in task.outputs if artifact_kind(task.request_id, name) not in kinds]
        return [(name, self._view_of(name)) for name in new]

    # Ranks that go and come

    def _lose_or_join(self, rank: int) -> None:
        if rank in self.lost:
            self._join(rank)
        elif len(self.lost | self.drained | {rank}) < len(self.workers):
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        self.lost.add(rank)
        gone = self.workers[rank]
        copied = [copy.artifact for copy in gone.copies if isinstance(copy, cmd.Migrate)]
        self.harmed.update(name.partition("/")[0] for name in (*gone.store, *copied))
        for dispatch in self.control.state.dispatches.values():
            if rank in dispatch.waiting_for:  # run perhaps, but its report counts no more
                self.harmed.update(task.request_id for task in dispatch.tasks)
        self.workers[rank] = Worker(log=gone.log)
        for worker in self.workers.values():
            worker.out_of_step.discard(rank)
        self._send(ev.RankLost(rank, "test"))

    def _restart(self) -> None:
        rank = self._to_restart.pop(0)
        if rank not in self.lost:
            self._lose(rank)
        self._join(rank)

    def _join(self, rank: int) -> None:
        self.lost.discard(rank)
        self._send(ev.RankJoined(rank))

    # What an operator changes

    def _change(self) -> None:
        """Drain a rank, or have one back; sometimes another policy decides from now on."""
        name = self.random.choice(list(CHANGES)) if self.random.random() < 0.3 else None
        wanted = self.drained ^ {self.random.randrange(len(self.workers))}
        if len(self.lost | wanted) < len(self.workers):
            self._change_to(wanted, name)

    def _change_to(self, drained: set[int], policy: str | None) -> None:
        choice = None if policy is None else ev.PolicyChoice(policy)
        before, self.drained = self.drained, drained
        try:
            self._send(ev.SettingsChanged(choice, drained=tuple(sorted(drained))))
        except ValueError as error:
            assert "could not go on" in str(error)
            self.control.check_integrity()
            self.drained = before

    # The books

    def _check_end(self, expected: Counter[str]) -> None:
        assert self.control.idle
        ended = {request_id: len(commands) for request_id, commands in self.endings.items()}
        assert ended == dict(expected), "not every request ended exactly once"
        for rank, worker in self.workers.items():
            assert not worker.store, f"rank {rank} still holds {sorted(worker.store)}"
        logs = {rank: worker.log for rank, worker in self.workers.items()}
        assert_pairwise_order(logs)


def assert_pairwise_order(logs: dict[int, list[cmd.Command]]) -> None:
    """Any two ranks got the collectives they share in the same order."""
    shared = {rank: [c for c in log if isinstance(c, (cmd.RunTask, cmd.Migrate))] for rank, log in logs.items()}
    for one in shared:
        for other in shared:
            if one < other:
                ours = [command for command in shared[one] if other in _ranks(command)]
                theirs = [command for command in shared[other] if one in _ranks(command)]
                assert ours == theirs, f"ranks {one} and {other} disagree on the order of their collectives"


def _ranks(command: cmd.Command) -> tuple[int, ...]:
    assert isinstance(command, (cmd.RunTask, cmd.Migrate))
    return command.layout.ranks if isinstance(command, cmd.RunTask) else command.ranks
