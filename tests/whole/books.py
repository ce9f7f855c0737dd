"""What must hold of the control plane, whatever happens: its events and commands are followed beside it.

One :class:`Books` follows one control process; the next one begins with empty books, as its control plane does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from gfdit.core import Request, TaskGraph
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control import ControlPlane

MAX_RETRIES = 3
ENDS = (cmd.CompleteRequest, cmd.CancelRequest, cmd.RejectRequest, cmd.FailRequest)


class ContractError(AssertionError):
    """Something that must not be done, or not be let happen."""


@dataclass(slots=True, eq=False)
class Life:
    """One request, from arrival to its end.

    ``num_harmed`` counts dispatches that peers were lost from, ``num_lost`` those that had to run again, since the
    control process began.
    """

    request: Request
    graph: TaskGraph
    has_result: bool = False
    blamed: bool = False  # it failed by itself
    disturbed: bool = False  # by a rank that was lost or a copy that broke
    cancelled: bool = False
    num_harmed: int = 0
    num_lost: int = 0


@dataclass(slots=True, eq=False)
class Operation:
    """A task or a copy on all its ranks; ``emitted`` numbers it among all commands.

    ``reported`` is when the control plane had heard of its end from everybody, by the same count.
    """

    command: cmd.RunTask | cmd.Migrate
    epoch: int
    emitted: int
    lives: list[Life]
    unreported: set[int]
    known_finished: set[int] = field(default_factory=set)  # to the control plane
    reported: int | None = None
    bereft: bool = False  # a member was lost before all had reported
    blamed: bool = False  # a member failed by itself
    fault: str = ""  # what is to go wrong, and where
    culprit: int = -1
    is_late: bool = False  # it goes wrong after the last collective, when peers need nothing any more
    seconds: float = -1.0

    @property
    def ranks(self) -> tuple[int, ...]:
        command = self.command
        return command.layout.ranks if isinstance(command, cmd.RunTask) else command.ranks

    def is_known_before(self, other: Operation) -> bool:
        """Whether the control plane knew of its end when it sent ``other``."""
        return self.reported is not None and other.emitted > self.reported


class Books:
    """Follows one control plane. ``lives`` are the requests that the engine waits for."""

    def __init__(
        self, epoch: int, lives: dict[str, Life], archive: dict[int, Operation], allows_policy_faults: bool
    ) -> None:
        """``archive`` is where every operation is found by its number, for good."""
        self.operations: dict[int, Operation] = {}  # until everybody has reported
        self._archive = archive
        self.num_emitted = 0
        self._epoch = epoch
        self._lives = lives
        self._allows_policy_faults = allows_policy_faults
        self._ended: set[str] = set()
        self._harmed: set[int] = set()  # dispatches
        for life in lives.values():
            life.num_harmed = life.num_lost = 0

    def before(self, event: ev.Event) -> None:
        """The control plane is about to hear of ``event``."""
        match event:
            case ev.RequestArrived(request):
                self._ended.discard(request.id)
            case ev.TaskFinished(number, rank):
                if operation := self.operations.get(number):
                    operation.known_finished.add(rank)
                    self._hear(operation, rank)
            case ev.TaskFailed(number, rank) | ev.MigrationFinished(number, rank):
                if operation := self.operations.get(number):
                    self._hear(operation, rank)
            case ev.TaskWithdrawn(number):
                self.operations.pop(number, None)
            case ev.RankLost(rank):
                for life in self._lives.values():
                    life.disturbed = True
                for operation in list(self.operations.values()):
                    if rank in operation.ranks:  # even if it has reported: its part is lost
                        operation.bereft = True
                        self._hear(operation, rank)

    def _hear(self, operation: Operation, rank: int) -> None:
        """The control plane is about to know that ``rank`` is done with an operation."""
        operation.unreported.discard(rank)
        if operation.unreported:
            return
        operation.reported = self.num_emitted
        command = operation.command
        if isinstance(command, cmd.Migrate):
            del self.operations[command.migration_id]
            return
        del self.operations[command.dispatch_id]
        harmed = operation.bereft or len(operation.known_finished) < len(operation.ranks)
        # What is queued behind a task that fails had no chance: it does not count.
        lost = harmed and not (operation.known_finished or operation.blamed or command.after in self._harmed)
        if harmed:
            self._harmed.add(command.dispatch_id)
        for life in {id(life): life for life in operation.lives}.values():
            life.num_harmed += harmed
            life.num_lost += lost

    def after(self, command: cmd.Command, plane: ControlPlane) -> None:
        """The control plane has answered with ``command``, among others."""
        self.num_emitted += 1
        match command:
            case cmd.RunTask(number, tasks, layout):
                lives = [self._lives[task.request_id] for task in tasks if task.request_id in self._lives]
                if any(life.num_lost > MAX_RETRIES for life in lives):
                    raise ContractError(f"dispatch {number} is one retry too many")
                self._give(number, command, layout.ranks, lives, plane)
            case cmd.Migrate(number, name):
                lives = [self._lives[name]] if name in self._lives else []
                self._give(number, command, command.ranks, lives, plane)
            case cmd.FreeArtifacts(ranks):
                self._check_ranks(ranks, plane)
            case cmd.ResetEdges(_, _, ranks):
                self._check_ranks(ranks, plane)
            case cmd.ReportFault(message):
                if not self._allows_policy_faults:
                    raise ContractError(f"the policy is at fault: {message}")
            case cmd.CompleteRequest() | cmd.CancelRequest() | cmd.RejectRequest() | cmd.FailRequest():
                self._end(command)

    def check(self, plane: ControlPlane) -> None:
        """After every event."""
        plane.check_integrity()
        known = {number for number, op in self.operations.items() if isinstance(op.command, cmd.RunTask)}
        if over := known - plane.state.dispatches.keys():
            raise ContractError(f"dispatch {min(over)} is closed although a rank has not reported")

    def _give(
        self,
        number: int,
        command: cmd.RunTask | cmd.Migrate,
        ranks: tuple[int, ...],
        lives: list[Life],
        plane: ControlPlane,
    ) -> None:
        self._check_ranks(ranks, plane)
        operation = Operation(command, self._epoch, self.num_emitted, lives, set(ranks))
        self.operations[number] = self._archive[number] = operation

    def _check_ranks(self, ranks: tuple[int, ...], plane: ControlPlane) -> None:
        """Of processes that have died lately the control plane cannot know."""
        if unknown := set(ranks) - plane.state.ranks.present.keys():
            raise ContractError(f"a command for rank {min(unknown)}, which is lost")

    def _end(self, command: cmd.CompleteRequest | cmd.CancelRequest | cmd.RejectRequest | cmd.FailRequest) -> None:
        life = self._lives.get(command.request_id)
        if life is None or command.request_id in self._ended:
            raise ContractError(f"a second end of one request: {command}")
        self._ended.add(command.request_id)
        if isinstance(command, cmd.CompleteRequest):
            if not life.has_result and any(not task.outputs for task in life.graph.tasks):
                raise ContractError(f"{command.request_id} is complete without a result")
        elif isinstance(command, cmd.CancelRequest):
            if not life.cancelled:
                raise ContractError(f"{command.request_id} was not cancelled")
        elif isinstance(command, cmd.RejectRequest):
            if life.request.deadline_s is None:
                raise ContractError(f"{command} although it may take as long as it likes")
        elif self._allows_policy_faults and command.error.startswith("policy "):
            pass
        elif command.status_code == 503:
            if life.num_harmed <= MAX_RETRIES:
                raise ContractError(f"{command} after {life.num_harmed} dispatches that a peer was lost from")
        elif not life.blamed:
            raise ContractError(f"{command} for no reason")


class FollowedPlane(ControlPlane):
    """A control plane with its books, checked after every event."""

    def follow(self, books: Books, note: Callable[[ev.Event], None], say: Callable[[str], None] | None) -> None:
        """``note`` is called with every event, ``say``, if any, with every event and command in words."""
        self.books = books
        self.digest = 0
        self._offered: tuple[set[str], set[int]] = (set(), set())  # ready tasks and free ranks, at the last decision
        self._note = note
        self._say = say

    def _schedule(self) -> None:
        super()._schedule()
        self._offered = set(self.state.ready.by_id), set(self.state.ranks.free_in_order)

    def _check_asked(self, event: ev.Event) -> None:
        """Where there is work, the policy has been asked about every task that is ready and every rank that is free."""
        tasks, ranks = set(self.state.ready.by_id), set(self.state.ranks.free_in_order)
        if self.state.has_work() and not (tasks <= self._offered[0] and ranks <= self._offered[1]):
            raise ContractError(f"the policy was not asked again after {event}")

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        self._note(event)
        if self._say is not None:
            self._say(f"{event}")
        self.books.before(event)
        commands = super().handle(event, now_s)
        for command in commands:
            if self._say is not None:
                self._say(f"    {command}")
            self.digest = zlib.crc32(repr(command).encode(), self.digest)
            self.books.after(command, self)
        self.books.check(self)
        self._check_asked(event)
        return commands
