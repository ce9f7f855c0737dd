"""What must hold of the control plane, whatever happens: its events and commands are followed beside it.

One :class:`Books` follows one control process; the next one begins with empty books, as its control plane does.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gfdit.core import ParallelSpec, Request, TaskGraph, TaskKind
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control import ControlPlane
from gfdit.core.layouts import not_wider
from tests.whole.component_books import ComponentBooks
from tests.whole.contract import ContractError

MAX_RETRIES = 3
MAX_FAILURES = 2  # of a rank in a row, until it is replaced
NUM_OWN_FAILURES = 2  # of a request on its own, until it is to blame
End = cmd.CompleteRequest | cmd.CancelRequest | cmd.RejectRequest | cmd.FailRequest


@dataclass(slots=True, eq=False)
class Life:
    """One request, from arrival to its end.

    Since the control process began ``num_own_failures`` counts ranks on which a task raised by itself,
    ``num_harmed`` dispatches that did not succeed on all their ranks, ``num_lost`` those that had to run again.
    """

    request: Request
    graph: TaskGraph
    has_result: bool = False
    blamed: bool = False  # it failed by itself
    disturbed: bool = False  # by a rank that was lost or a copy that broke
    cancelled: bool = False
    started: bool = False  # as far as the engine knows
    num_own_failures: int = 0
    num_harmed: int = 0
    num_lost: int = 0
    # At which kinds and specifications it ran out of memory, for sure and perhaps, as far as this process knows.
    exhausted: set[tuple[TaskKind, ParallelSpec]] = field(default_factory=set)
    streamed: frozenset[str] = field(init=False)  # what some task reads while it is made
    consumed: frozenset[str] = field(init=False)  # or at all
    perhaps_exhausted: set[tuple[TaskKind, ParallelSpec]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.streamed = frozenset(name for task in self.graph.tasks for name in task.deferred)
        self.consumed = frozenset(name for task in self.graph.tasks for name in task.reads)

    def has_tried(self, kind: TaskKind, spec: ParallelSpec, *, surely: bool) -> bool:
        """Whether it ran out of memory on at least as many ranks."""
        known = self.exhausted if surely else self.perhaps_exhausted
        return any(kind is other and not_wider(spec, tried) for other, tried in known)

    @property
    def has_to_tell(self) -> bool:
        """Something comes of it, for the engine."""
        return any(not task.outputs for task in self.graph.tasks)


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
    exhausted: bool = False  # a member ran out of memory
    has_culprit: bool = False  # a member has reported another error of its own
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
        self,
        epoch: int,
        lives: dict[str, Life],
        archive: dict[int, Operation],
        allows_policy_faults: bool,
        max_queue_s: float | None,
        given_up: set[int],
        components: ComponentBooks | None = None,
    ) -> None:
        """``archive`` is where every operation is found by its number, for good; ``given_up`` gets ranks.

        ``components``: the books of these, where there are workflows.
        """
        self._components = components
        self.operations: dict[int, Operation] = {}  # until everybody has reported
        self._archive = archive
        self.num_emitted = 0
        self._epoch = epoch
        self._lives = lives
        self._allows_policy_faults = allows_policy_faults
        self._max_queue_s = max_queue_s
        self._given_up = given_up
        self._begun: set[str] = set()  # requests
        self._num_failures: Counter[int] = Counter()  # of ranks; a failed probe counts more
        self._condemned: set[int] = set()  # ranks that are to be replaced
        self._replaced: set[int] = set()  # that have done nothing since
        self._ended: set[str] = set()
        self._harmed: set[int] = set()  # dispatches
        self._read: set[str] = set()  # artifacts, while they were made
        self._ever_exhausted = False  # some rank ran out of memory
        self._gone: set[int] = set()  # ranks that do not join again
        self._drained: frozenset[int] = frozenset()
        self._ever_drained = False
        for life in lives.values():
            life.num_own_failures = life.num_harmed = life.num_lost = 0
            life.exhausted, life.perhaps_exhausted = set(), set()

    def drain(self, ranks: Iterable[int]) -> frozenset[int]:
        """These, and no others, are to be given nothing; returns those that were before."""
        before, self._drained = self._drained, frozenset(ranks)
        self._ever_drained |= bool(self._drained)
        if self._components is not None:
            self._components.ever_drained |= self._drained
        return before

    def before(self, event: ev.Event, now_s: float) -> None:
        """The control plane is about to hear of ``event``."""
        if self._components is not None:
            self._components.before(event, now_s)
        match event:
            case ev.RequestArrived(request):
                self._ended.discard(request.id)
            case ev.TaskFinished(number, rank):
                if operation := self.operations.get(number):
                    if rank in operation.unreported:
                        self._replaced.discard(rank)
                    operation.known_finished.add(rank)
                    self._hear(operation, rank)
            case ev.TaskFailed(number, rank):
                if operation := self.operations.get(number):
                    if event.out_of_memory:
                        operation.exhausted = True
                    elif not event.caused_by_peer and rank in operation.unreported:
                        operation.has_culprit = True
                        self._num_failures[rank if event.culprit is None else event.culprit] += 1
                        for life in operation.lives:
                            life.num_own_failures += 1
                    self._hear(operation, rank)
            case ev.RankProbed(_, rank, error) if error:
                self._num_failures[rank] += MAX_FAILURES
            case ev.MigrationFinished(number, rank):
                if operation := self.operations.get(number):
                    self._hear(operation, rank)
            case ev.TaskWithdrawn(number):
                self.operations.pop(number, None)
            case ev.RankLost(rank):
                if event.for_good:
                    self._gone.add(rank)
                self._condemned.discard(rank)
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
        was_tried = operation.known_finished or operation.blamed or operation.exhausted
        lost = harmed and not (was_tried or command.after in self._harmed or self._is_read(operation))
        if harmed:
            self._harmed.add(command.dispatch_id)
        if operation.known_finished:
            self._read.update(name for task in command.tasks for name in task.deferred)
        if operation.exhausted:
            self._ever_exhausted = True
            self._note_exhausted(operation, command)
        for life in {id(life): life for life in operation.lives}.values():
            life.num_harmed += harmed
            life.num_lost += lost

    def _is_read(self, operation: Operation) -> bool:
        """All that somebody was to read has been read on its way: who made it need not run again."""
        assert isinstance(operation.command, cmd.RunTask)
        outputs = {name for task in operation.command.tasks for name in task.outputs}
        wanted = {name for life in operation.lives for name in outputs & life.consumed}
        return bool(wanted) and wanted <= self._read

    def _note_exhausted(self, operation: Operation, command: cmd.RunTask) -> None:
        if len(command.tasks) > 1:
            return
        tried = command.tasks[0].kind, command.layout.parallel
        for life in operation.lives:
            life.perhaps_exhausted.add(tried)
            if not (operation.has_culprit or operation.bereft or command.after in self._harmed):
                life.exhausted.add(tried)

    def after(self, command: cmd.Command, plane: ControlPlane, now_s: float) -> None:
        """The control plane has answered with ``command``, among others."""
        self.num_emitted += 1
        if self._components is not None:
            self._components.after(command, self._lives, self.operations, now_s)
        match command:
            case cmd.RunTask(number, tasks, layout):
                lives = [self._lives[task.request_id] for task in tasks if task.request_id in self._lives]
                if drained := self._drained.intersection(layout.ranks):
                    raise ContractError(f"dispatch {number} is for rank {min(drained)}, which is drained")
                if condemned := self._condemned.intersection(layout.ranks):
                    raise ContractError(f"dispatch {number} is for rank {min(condemned)}, which is to be replaced")
                self._begun.update([task.request_id for task in command.tasks])
                if any(life.num_lost > MAX_RETRIES for life in lives):
                    raise ContractError(f"dispatch {number} is one retry too many")
                if any(life.has_tried(tasks[0].kind, layout.parallel, surely=True) for life in lives):
                    raise ContractError(f"dispatch {number} is to try {layout} again, where memory ran out")
                self._give(number, command, layout.ranks, lives, plane)
            case cmd.Migrate(number, name):
                lives = [self._lives[name]] if name in self._lives else []
                self._give(number, command, command.ranks, lives, plane)
            case cmd.FreeArtifacts(ranks):
                self._check_ranks(tuple(rank for rank in ranks if not plane.is_drained(rank)), plane)
            case cmd.ResetEdges(_, _, ranks):
                self._check_ranks(ranks, plane)
            case cmd.ProbeRank(_, rank) | cmd.LoadComponent(_, rank):
                self._check_ranks((rank,), plane)
            case cmd.RestartRank(rank, _, for_good):
                self._condemn(rank, for_good, plane)
            case cmd.ReportFault(message):
                if not self._allows_policy_faults:
                    raise ContractError(f"the policy is at fault: {message}")
            case cmd.CompleteRequest() | cmd.CancelRequest() | cmd.RejectRequest() | cmd.FailRequest():
                self._end(command, plane)

    def _condemn(self, rank: int, for_good: bool, plane: ControlPlane) -> None:
        self._check_ranks((rank,), plane)
        if self._num_failures[rank] < (1 if rank in self._replaced else MAX_FAILURES):
            raise ContractError(f"rank {rank} is to be replaced after {self._num_failures[rank]} failures")
        if for_good and rank not in self._replaced:
            raise ContractError(f"rank {rank} is given up although it was never replaced, or has worked since")
        if for_good and len(plane.state.ranks.present) == 1:
            raise ContractError(f"rank {rank} is given up, the last one")
        self._condemned.add(rank)
        self._replaced.add(rank)
        if for_good:
            self._given_up.add(rank)

    def check(self, plane: ControlPlane, now_s: float) -> None:
        """After every event."""
        plane.check_integrity()
        if self._components is not None:
            self._components.check(plane)
        if self._max_queue_s is not None:
            for name, record in plane.state.requests.items():
                life = self._lives.get(name)
                begun = name in self._begun or (life is not None and life.started)
                if not begun and record.request.arrival_s + self._max_queue_s < now_s:
                    raise ContractError(f"{name} has waited for longer than it has to")
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

    def _end(self, command: End, plane: ControlPlane) -> None:
        life = self._lives.get(command.request_id)
        if life is None or command.request_id in self._ended:
            raise ContractError(f"a second end of one request: {command}")
        self._ended.add(command.request_id)
        if isinstance(command, cmd.CompleteRequest):
            if not life.has_result and life.has_to_tell:
                raise ContractError(f"{command.request_id} is complete without a result")
        elif isinstance(command, cmd.CancelRequest):
            if not life.cancelled:
                raise ContractError(f"{command.request_id} was not cancelled")
        elif isinstance(command, cmd.RejectRequest):
            if life.request.deadline_s is None:
                raise ContractError(f"{command} although it may take as long as it likes")
        elif command.status_code == 503 and command.error.startswith("no rank was free"):
            if life.started or command.request_id in self._begun:
                raise ContractError(f"{command} although it has started")
        elif command.status_code == 503 and command.error.endswith("are drained"):
            if not self._ever_drained:
                raise ContractError(f"{command} although no rank is drained")
        elif command.status_code == 503 and command.error.endswith("are left for good"):
            if not self._gone:
                raise ContractError(f"{command} although every rank is to come")
        elif self._components is not None and command.error.startswith("component "):
            pass  # they have looked at it
        elif "device memory" in command.error:
            self._check_too_large(command, life, plane.state.ranks.num_known)
        elif command.status_code == 503:
            if life.num_harmed <= MAX_RETRIES:
                raise ContractError(f"{command} after {life.num_harmed} dispatches that did not succeed")
        elif not life.blamed or life.num_own_failures < NUM_OWN_FAILURES:
            raise ContractError(f"{command} after {life.num_own_failures} failures of its own")

    def _check_too_large(self, command: cmd.FailRequest, life: Life, num_ranks: int) -> None:
        """At its arrival because others ran out of memory, or because it did so itself, at its widest."""
        if command.status_code == 400:
            if command.request_id in self._begun or not self._ever_exhausted:
                raise ContractError(f"{command}, of which nothing can be known")
            return
        kinds = {kind for kind, _ in life.perhaps_exhausted}
        left = [
            spec
            for task in life.graph.tasks
            if task.kind in kinds
            for spec in task.candidates
            if spec.size <= self._num_places(task.kind, life, num_ranks)
            and not life.has_tried(task.kind, spec, surely=False)
        ]
        if not kinds or (left and not self._gone and not self._ever_drained):
            raise ContractError(f"{command} before it has tried {', '.join(map(str, left)) or 'anything'}")

    def _num_places(self, kind: TaskKind, life: Life, num_ranks: int) -> int:
        """On which any task of a kind may be."""
        if self._components is None:
            return num_ranks
        names = {task.component for task in life.graph.tasks if task.kind is kind}
        return min(self._components.num_places(name) for name in names)


class FollowedPlane(ControlPlane):
    """A control plane with its books, checked after every event."""

    def follow(self, books: Books, note: Callable[[ev.Event], None], say: Callable[[str], None] | None) -> None:
        """``note`` is called with every event, ``say``, if any, with every event and command in words."""
        self.books = books
        self.digest = 0
        self._offered: tuple[set[str], set[int]] = (
            set(),
            set(),
        )  # ready tasks and free ranks, at the last decision
        self._note = note
        self._say = say

    def _schedule(self) -> None:
        super()._schedule()
        self._offered = set(self.state.ready.by_id), set(self.state.ranks.free_in_order)

    def _check_asked(self, event: ev.Event) -> None:
        """Where there is work, the policy has been asked about every ready task and every free rank."""
        tasks, ranks = set(self.state.ready.by_id), set(self.state.ranks.free_in_order)
        if self.state.has_work() and not (tasks <= self._offered[0] and ranks <= self._offered[1]):
            raise ContractError(f"the policy was not asked again after {event}")

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        self._note(event)
        if self._say is not None:
            self._say(f"{event}")
        self.books.before(event, now_s)
        if isinstance(event, ev.SettingsChanged):
            return self._follow_change(event, now_s)
        return self._follow(event, now_s)

    def _follow_change(self, event: ev.SettingsChanged, now_s: float) -> list[cmd.Command]:
        """What is refused changes nothing."""
        before = self.policy, self.state.ranks.views
        drained = self.books.drain(event.drained)
        try:
            return self._follow(event, now_s)
        except ValueError:
            self.books.drain(drained)
            if before != (self.policy, self.state.ranks.views):
                raise ContractError(f"{event} is refused and has changed something") from None
            self.books.check(self, now_s)
            raise

    def _follow(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        fails_probe = False
        if isinstance(event, ev.RankProbed):
            fails_probe = bool(event.error) and self._quarantine.awaits(event.rank, event.probe_id)
        commands = super().handle(event, now_s)
        if fails_probe and not any(isinstance(command, cmd.RestartRank) for command in commands):
            raise ContractError(f"nothing follows from {event}")
        for command in commands:
            if self._say is not None:
                self._say(f"    {command}")
            self.digest = zlib.crc32(repr(command).encode(), self.digest)
            self.books.after(command, self, now_s)
        self.books.check(self, now_s)
        self._check_asked(event)
        return commands
