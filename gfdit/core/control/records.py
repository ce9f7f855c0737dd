"""Mutable state the control plane keeps per request, artifact, dispatch and rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from gfdit.core.artifacts.views import UNKNOWN, ArtifactView
from gfdit.core.commands import Command, Migrate
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec, not_wider
from gfdit.core.policy import RequestView, TaskView
from gfdit.core.tasks import Request, Task, TaskGraph, TaskKind

# What stands for the request of a rank that runs none and is not free.
RESETTING, SUSPENDED, LOADING = "(edge reset)", "(suspended)", "(loading)"


class ArtifactState(StrEnum):
    PENDING = "pending"
    MATERIALIZED = "materialized"
    FREED = "freed"


class ArtifactRecord(Struct, gc=False):
    """``layout`` is the authoritative one, where it was made. ``holders`` are all ranks with it, each with the
    layout under which it holds its part. ``readers`` counts the tasks that have still to read it.
    """

    id: str
    readers: int
    state: ArtifactState = ArtifactState.PENDING
    layout: ExecutionLayout | None = None
    holders: dict[int, ExecutionLayout] = {}
    view: ArtifactView = UNKNOWN
    kept: dict[int, ExecutionLayout] = {}  # copies to fall back on, even once it is freed
    keeping: dict[int, ExecutionLayout | None] = {}  # where one is on its way; None: it will not last there

    def drop_from(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.holders.pop(rank, None)
            self.kept.pop(rank, None)
            if rank in self.keeping:
                self.keeping[rank] = None

    def replace_on(self, layout: ExecutionLayout) -> None:
        """The ranks of ``layout`` get or make their part under it, in the place of what they have or will have.

        Unless that is the same part, it cannot be counted on any more, nor fallen back on.
        """
        for rank in layout.ranks:
            for parts in (self.holders, self.kept):
                if rank in parts and not self.view.same_part(rank, parts[rank], layout):
                    del parts[rank]
            if (coming := self.keeping.get(rank)) is not None and not self.view.same_part(rank, coming, layout):
                self.keeping[rank] = None


class TaskState(StrEnum):
    """Where a task of a live request stands. What may follow what is in :data:`TASK_TRANSITIONS`."""

    WAITING = "waiting"  # lacks an input
    UNBLOCKED = "unblocked"  # has its inputs, but the policy does not see it yet
    READY = "ready"  # the policy may dispatch it
    QUEUED = "queued"  # dispatched, behind the task that makes what it lacks
    RUNNING = "running"  # dispatched, and its ranks are at it or come to it next
    FINISHED = "finished"


TASK_TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.WAITING: frozenset({TaskState.UNBLOCKED, TaskState.QUEUED}),
    TaskState.UNBLOCKED: frozenset({TaskState.READY, TaskState.WAITING}),
    # Back to waiting where an input was lost; back to unblocked where its request ends.
    TaskState.READY: frozenset({TaskState.RUNNING, TaskState.WAITING, TaskState.UNBLOCKED}),
    TaskState.QUEUED: frozenset({TaskState.RUNNING, TaskState.WAITING}),
    # To unblocked if it was withdrawn in time, to waiting if it failed.
    TaskState.RUNNING: frozenset({TaskState.FINISHED, TaskState.UNBLOCKED, TaskState.WAITING}),
    # What it made was lost: it runs again.
    TaskState.FINISHED: frozenset({TaskState.WAITING}),
}


class DispatchState(StrEnum):
    """Whether ranks have begun a dispatch. What may follow what is in :data:`DISPATCH_TRANSITIONS`."""

    SENT = "sent"  # no rank is known to have begun it
    WITHDRAWING = "withdrawing"  # asked back; the first claim decides, and has not been heard of
    BEGUN = "begun"  # some rank has
    WITHDRAWN = "withdrawn"  # no rank has, and none will
    OVER = "over"  # every rank has reported or was lost


DISPATCH_TRANSITIONS: Mapping[DispatchState, frozenset[DispatchState]] = {
    DispatchState.SENT: frozenset({DispatchState.BEGUN, DispatchState.WITHDRAWING, DispatchState.OVER}),
    DispatchState.WITHDRAWING: frozenset({DispatchState.BEGUN, DispatchState.WITHDRAWN, DispatchState.OVER}),
    DispatchState.BEGUN: frozenset({DispatchState.OVER}),
    DispatchState.WITHDRAWN: frozenset(),
    DispatchState.OVER: frozenset(),
}


@dataclass(slots=True)
class RequestRecord:
    """A live request. ``missing`` counts the inputs that a task still lacks, of those that lack any."""

    request: Request
    graph: TaskGraph
    sequence: int  # arrival order
    artifacts: dict[str, ArtifactRecord] = field(init=False)
    position: dict[str, int] = field(init=False)  # of each task in the graph
    consumers: dict[str, list[Task]] = field(init=False)  # by artifact
    streamed: dict[str, Task] = field(default_factory=dict)  # artifacts read while they are made, and by whom
    states: dict[str, TaskState] = field(init=False)  # by task; changed by ``move``
    missing: dict[str, int] = field(init=False)
    unblocked: list[Task] = field(init=False)  # those in that state
    candidates: tuple[ParallelSpec, ...] = field(init=False)  # of its denoising steps, but for ``dropped``
    decode_candidates: tuple[ParallelSpec, ...] = field(init=False)
    tasks_left: Mapping[TaskKind, int] = field(init=False)  # replaced when it changes: views share it
    parts_left: Mapping[tuple[str, TaskKind], int] | None = field(init=False)  # by component, of a workflow
    num_finished: int = 0
    steps_done: int = 0
    last_layout: ExecutionLayout | None = None
    running: set[int] = field(default_factory=set)  # dispatch ids
    touched: set[int] = field(default_factory=set)  # ranks that have held an artifact
    visible: bool = False  # there is room for its artifacts: the policy sees it
    peak_bytes: int = 0  # the most its artifacts have taken, where that is counted
    num_retries: int = 0
    suspects: list[int] = field(default_factory=list)  # ranks on which it has failed since it last succeeded
    has_strays: bool = False  # after a fault, ranks it has touched may hold copies that are in no book
    started: bool = False
    exhausted: set[tuple[TaskKind, ParallelSpec]] = field(default_factory=set)  # at which it ran out of memory
    # Of each kind of task, the specifications that do not fit into memory; replaced when it changes.
    dropped: Mapping[TaskKind, frozenset[ParallelSpec]] = field(default_factory=dict)
    ending: Command | None = None  # the terminal command, once decided; emitted when nothing runs

    def __post_init__(self) -> None:
        tasks = self.graph.tasks
        self.position = {task.id: index for index, task in enumerate(tasks)}
        self.consumers = {name: [] for task in tasks for name in task.outputs}
        for task in tasks:
            for name in task.reads:
                self.consumers[name].append(task)
            self.streamed |= {name: task for name in task.deferred}
        self.artifacts = {name: ArtifactRecord(name, len(readers)) for name, readers in self.consumers.items()}
        self.missing = {task.id: len(task.reads) for task in tasks if task.inputs or task.deferred}
        self.unblocked = [task for task in tasks if task.id not in self.missing]
        self.states = dict.fromkeys(self.position, TaskState.WAITING)
        for task in self.unblocked:
            self.move(task, TaskState.UNBLOCKED)
        self.drop({})
        self.tasks_left = MappingProxyType(dict(Counter(task.kind for task in tasks)))
        self.parts_left = None
        if tasks[-1].component:
            self.parts_left = MappingProxyType(dict(Counter((task.component, task.kind) for task in tasks)))

    @property
    def of_each_kind(self) -> Mapping[TaskKind, Task]:
        """One task of each kind: others of the kind have the same specifications."""
        return {task.kind: task for task in self.graph.tasks}

    @property
    def of_each_part(self) -> Iterable[Task]:
        """One task of each kind and component that are left to run."""
        left = [task for task in self.graph.tasks if self.states[task.id] is not TaskState.FINISHED]
        return {(task.kind, task.component): task for task in left}.values()

    @property
    def live_artifacts(self) -> list[ArtifactRecord]:
        return [art for art in self.artifacts.values() if art.state is ArtifactState.MATERIALIZED]

    @property
    def ready(self) -> list[Task]:
        return [task for task in self.graph.tasks if self.states[task.id] is TaskState.READY]

    def task(self, task_id: str) -> Task:
        return self.graph.tasks[self.position[task_id]]

    def place(self, task_id: str) -> tuple[int, int]:
        """Where a task stands among all that are ready."""
        return self.sequence, self.position[task_id]

    def move(self, task: Task, to: TaskState) -> None:
        """``task`` is in another state now."""
        states = self.states
        assert to in TASK_TRANSITIONS[states[task.id]], f"{task.id} was {states[task.id]} and cannot be {to}"
        states[task.id] = to

    def drop(self, dropped: Mapping[TaskKind, frozenset[ParallelSpec]]) -> None:
        """From now on ``dropped``, and nothing else, is not offered; views are the caller's to refresh."""
        self.dropped = dropped
        self.candidates = self._candidates_of(TaskKind.DENOISE)
        self.decode_candidates = self._candidates_of(TaskKind.DECODE)

    def offered(self, task: Task) -> tuple[ParallelSpec, ...]:
        """The specifications at which ``task`` may run now."""
        if not (dropped := self.dropped.get(task.kind)):
            return task.candidates
        return tuple([spec for spec in task.candidates if spec not in dropped])

    def untried(self, task: Task) -> tuple[ParallelSpec, ...]:
        """The specifications of ``task`` at which less memory may be needed than where it ran out."""
        tried = [spec for kind, spec in self.exhausted if kind is task.kind]
        return tuple([spec for spec in task.candidates if not any([not_wider(spec, one) for one in tried])])

    def view(self) -> RequestView:
        request = self.request
        return RequestView(
            request.id,
            request.model,
            request.shape,
            request.cfg,
            self.steps_done,
            request.num_steps,
            request.arrival_s,
            request.deadline_s,
            request.priority,
            request.slo_class,
            self.candidates,
            self.tasks_left,
            self.last_layout,
            bool(self.running),
            self.decode_candidates,
            self.parts_left,
        )

    def _candidates_of(self, kind: TaskKind) -> tuple[ParallelSpec, ...]:
        return next((self.offered(task) for task in self.graph.tasks if task.kind is kind), (SINGLE,))

    def task_view(self, task: Task, made: Collection[str] = (), made_on: tuple[int, ...] = ()) -> TaskView:
        """What a policy sees of ``task``; with ``made``, as if these artifacts had been made on ``made_on``."""
        artifacts = self.artifacts
        held = [
            (name, tuple(sorted(made_on if name in made else artifacts[name].holders))) for name in task.inputs
        ]
        return TaskView.of(self.request, task, tuple(held), self.offered(task) if self.dropped else None)

    def unblocked_by(self, made: Collection[str]) -> list[Task]:
        """The tasks that lack nothing but these artifacts."""
        readers = {task.id: task for name in made for task in self.consumers[name]}.values()
        missing = self.missing
        # Who reads something on its way may lack nothing already.
        return [t for t in readers if missing.get(t.id) == sum([name in made for name in t.inputs])]

    def num_lacking(self, task: Task) -> int:
        """Of what ``task`` reads, how much is not there; the maker of what is deferred need only run."""
        artifacts = self.artifacts
        lacking = [name for name in task.inputs if artifacts[name].state is not ArtifactState.MATERIALIZED]
        for name in task.deferred:
            if artifacts[name].state is not ArtifactState.MATERIALIZED and not self._is_made(name):
                lacking.append(name)
        return len(lacking)

    def _is_made(self, name: str) -> bool:
        """Whether a task that makes ``name`` runs."""
        return any(self.states[task.id] is TaskState.RUNNING for task in self.graph.tasks if name in task.outputs)

    def begin_streams(self, task: Task) -> None:
        """``task`` runs from now on: those that read on their way what it makes need not wait for it."""
        for name in task.outputs:
            reader = self.streamed.get(name)
            if reader is not None and self.artifacts[name].state is not ArtifactState.MATERIALIZED:
                self._note_input(reader)

    def _note_input(self, task: Task) -> None:
        """``task`` lacks one thing less."""
        missing = self.missing
        # One that lacks nothing runs: the artifact was lost everywhere else meanwhile.
        if (number := missing.get(task.id, 0)) != 1:
            if number:
                missing[task.id] = number - 1
            return
        del missing[task.id]
        if self.states[task.id] is TaskState.WAITING:  # and not queued
            self.states[task.id] = TaskState.UNBLOCKED
            self.unblocked.append(task)

    def materialize(self, name: str, layout: ExecutionLayout, holders: Iterable[int], view: ArtifactView) -> None:
        """``name``, made under ``layout``, now exists on ``holders``; its readers may become unblocked.

        Where it existed already, because its task ran again for another of its outputs, there are more copies.
        """
        art = self.artifacts[name]
        known = art.state is ArtifactState.MATERIALIZED
        if known or art.kept or art.keeping:
            art.replace_on(layout)
        if known:
            art.holders |= dict.fromkeys(holders, layout)
        else:
            art.holders = dict.fromkeys(holders, layout)
        art.state, art.layout, art.view = ArtifactState.MATERIALIZED, layout, view
        if known or name in self.streamed:  # then its reader has not waited for this
            return
        for task in self.consumers[name]:
            self._note_input(task)


class DispatchRecord(Struct, gc=False):
    id: int
    tasks: tuple[Task, ...]
    views: tuple[TaskView, ...]
    layout: ExecutionLayout
    waiting_for: set[int]  # ranks that have not reported
    consumes: tuple[str, ...]  # artifacts that its ranks drop themselves
    expected_s: float = 0.0  # how long it should take
    ends_s: float = 0.0  # when it should be done, once it runs
    state: DispatchState = DispatchState.SENT  # changed by ``move`` alone
    behind: int | None = None  # the dispatch it is queued behind; None once that has ended
    followed_by: int | None = None  # the dispatch queued behind it
    asked_version: int = -1  # of the books, when the policy was last asked what comes after it
    culprits: tuple[int, ...] = ()  # ranks at fault: not because a peer was, nor for lack of memory
    senders: frozenset[int] = frozenset()  # those of them that could not send what it reads
    doomed: bool = False  # what ran before it has failed: it fails too, and edges are reset afterwards
    migrations: tuple[int, ...] = ()
    delivering: set[int] = set()  # ranks of which only a result is still to come
    has_left: bool = False  # its ranks are free, or run something else: only results are still to come
    finished: set[int] = set()  # ranks that have reported success, even if lost since
    lost: frozenset[int] = frozenset()  # ranks lost since, even if they have joined again
    seconds: float = 0.0
    made: dict[str, ArtifactView] = {}  # what was said of its outputs
    error: str | None = None
    status_code: int = 500
    exhausted: bool = False  # some rank ran out of memory
    caused_by_peer: bool = False  # the error only echoes another rank's failure

    def move(self, to: DispatchState) -> None:
        """It is in another state now."""
        assert to in DISPATCH_TRANSITIONS[self.state], f"dispatch {self.id} was {self.state} and cannot be {to}"
        self.state = to

    @property
    def request_ids(self) -> Iterable[str]:
        tasks = self.tasks
        return (tasks[0].request_id,) if len(tasks) == 1 else dict.fromkeys([task.request_id for task in tasks])

    @property
    def out_of_memory(self) -> bool:
        """Whether that, and nothing else, is why it failed."""
        return self.exhausted and not self.culprits

    @property
    def may_be_withdrawn(self) -> bool:
        return self.state is DispatchState.SENT

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the layout that are still what they were when the dispatch was made."""
        if not self.lost:
            return self.layout.ranks
        return tuple(rank for rank in self.layout.ranks if rank not in self.lost)


class MigrationRecord(Struct):
    """A migration under way.

    ``unconfirmed`` are ranks that count as holders but may never get their part, with what they held before.
    """

    command: Migrate
    members: set[int]  # not lost since
    waiting_for: set[int]
    unconfirmed: dict[int, ExecutionLayout | None]
    broken: bool = False

    @classmethod
    def of(cls, command: Migrate) -> MigrationRecord:
        held = dict(command.held)
        receivers = [rank for rank in command.ranks if rank in command.target.ranks]
        unconfirmed = {rank: held.get(rank) for rank in receivers if rank not in held or command.view.sharded}
        if command.keep or command.streamed:
            unconfirmed = {}  # not counted on before it is there, or not at all
        return cls(command, set(command.ranks), set(command.ranks), unconfirmed)


class RankRecord(Struct):
    id: int
    resident: frozenset[str]
    node: int = 0
    dispatch: int | None = None
    reset: int | None = None  # edges being reset: not free
    suspended: bool = False  # a task has failed on it: not free
    leaving: bool = False  # it is drained: not free, and the policy does not see it
    loading: str | None = None  # a component: not free
    initial: frozenset[str] = frozenset()  # what its process has when it starts
    running_request: str | None = None
    busy_until_s: float | None = None

    @property
    def free(self) -> bool:
        return self.idle and not (self.suspended or self.leaving)

    @property
    def idle(self) -> bool:
        """Nothing goes on there."""
        return self.dispatch is None and self.reset is None and self.loading is None

    def __post_init__(self) -> None:
        self.initial = self.resident

    def clear(self) -> None:
        """Nothing runs on it, and nothing resets its edges."""
        self.dispatch = self.reset = self.running_request = self.busy_until_s = None
        if self.suspended:
            self.running_request = SUSPENDED
