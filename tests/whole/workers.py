"""A model of worker processes: what a real one would need, and what would happen to it.

It follows the contract of :mod:`gfdit.core.commands` and of :mod:`gfdit.comm` and nothing else. A process has two
first-in-first-out lanes, a store of artifacts and its end of each edge. A collective blocks until all its members
are at it. What must never be asked of a worker raises :class:`ContractError`.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from gfdit.core import ExecutionLayout, Request, Task, TaskGraph
from gfdit.core import commands as cmd
from gfdit.core.artifacts.views import ArtifactView, FieldView
from gfdit.core.commands import Lane
from gfdit.core.tasks import artifact_kind

SPLIT_VIEWS = (
    ArtifactView((FieldView("rows", "float32", 4, (1, 12), sp_dim=1),)),  # in parts of the same shape
    ArtifactView((FieldView("branches", "float32", 4, (2, 12), sp_dim=1, cfg_dim=0),)),
)
ECHO = "a peer failed"
Claim = Literal["begun", "withdrawn"]
"""What is to become of a queued task: the first claim decides for all its ranks."""


class ContractError(AssertionError):
    """Something that a control plane must not do, or not let happen."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What artifacts consist of in one run: alike for those of one kind of a request."""

    seed: int
    views: tuple[ArtifactView, ...]

    def view(self, artifact: str) -> ArtifactView:
        request_id = artifact.partition("/")[0]
        name = f"{self.seed}/{request_id}/{artifact_kind(request_id, artifact)}"
        return self.views[zlib.crc32(name.encode()) % len(self.views)]

    def to_report(self, task: Task) -> tuple[tuple[str, ArtifactView], ...]:
        """Of outputs that are not like an input."""
        kinds = {artifact_kind(task.request_id, name) for name in task.inputs}
        new = [name for name in task.outputs if artifact_kind(task.request_id, name) not in kinds]
        return tuple((name, self.view(name)) for name in new)


@dataclass(frozen=True, slots=True)
class Part:
    """Of an artifact, under ``layout``; ``number`` is that of the task or copy that made it.

    ``junk``: put together from parts that were not what they were sent for.
    """

    number: int
    layout: ExecutionLayout
    junk: bool = False


@dataclass(slots=True)
class Life:
    """One request, from arrival to its end.

    ``num_harmed`` counts dispatches that peers were lost from, ``num_lost`` those that had to run again.
    """

    request: Request
    graph: TaskGraph
    has_result: bool = False
    blamed: bool = False  # it failed by itself
    disturbed: bool = False  # by a rank that was lost or a copy that broke
    cancelled: bool = False
    num_harmed: int = 0
    num_lost: int = 0


@dataclass(slots=True)
class Edge:
    """One rank's end of the two edges it shares with a peer. ``broken_by`` is the operation that failed on it."""

    generation: int | None = 0
    instance: int = 0
    broken_by: Operation | None = None


@dataclass(slots=True, eq=False)
class Operation:
    """A task or a copy on all its ranks; ``emitted`` numbers it among all commands.

    ``reported`` is when the control plane had heard of its end from everybody, by the same count.
    """

    command: cmd.RunTask | cmd.Migrate
    lane: Lane
    emitted: int
    members: dict[int, Process]
    lives: list[Life]
    arrived: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    unreported: set[int] = field(default_factory=set)
    known_finished: set[int] = field(default_factory=set)  # to the control plane
    reported: int | None = None
    begun: bool = False
    aborted: bool = False
    bereft: bool = False  # a member was lost before all had reported
    blamed: bool = False  # a member failed by itself
    refused: bool = False  # by a source, which says so to all it sends to
    brings_junk: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        command = self.command
        return command.layout.ranks if isinstance(command, cmd.RunTask) else command.ranks


@dataclass(slots=True)
class Reset:
    command: cmd.ResetEdges
    emitted: int


@dataclass(slots=True, eq=False)
class Process:
    """One incarnation of a rank. A process that has joined knows no edge until it is told its generation."""

    rank: int
    incarnation: int
    num_ranks: int
    contents: Contents
    slowness: float = 1.0
    alive: bool = True
    stuck: bool = False  # its compute lane, in a task or before one; the rest of it goes on
    silenced: bool = False  # what it sent last never left
    lanes: dict[Lane, deque[Operation | Reset | cmd.FreeArtifacts]] = field(init=False)
    busy: set[Lane] = field(default_factory=set)
    store: dict[str, Part] = field(default_factory=dict)  # by artifact
    copies: dict[int, str | None] = field(default_factory=dict)  # migration id -> error
    failed: set[int] = field(default_factory=set)  # dispatches
    known_dead: set[Process] = field(default_factory=set)
    edges: dict[tuple[Lane, int], Edge] = field(init=False)

    def __post_init__(self) -> None:
        self.lanes = {"compute": deque(), "migration": deque()}
        generation = None if self.incarnation else 0
        self.edges = {
            (lane, peer): Edge(generation)
            for lane in self.lanes
            for peer in range(self.num_ranks)
            if peer != self.rank
        }

    def goes_on(self, lane: Lane) -> bool:
        return self.alive and not (self.stuck and lane == "compute")

    def reset(self, reset: Reset) -> None:
        """Its side of the edges that are named."""
        lane = reset.command.lane
        for one, other, generation in reset.command.edges:
            if self.rank in (one, other):
                edge = self.edges[lane, other if self.rank == one else one]
                if edge.generation is not None and generation <= edge.generation:
                    raise ContractError(
                        f"rank {self.rank}: generation {generation} is not ahead of {edge.generation}"
                    )
                edge.generation, edge.instance, edge.broken_by = generation, 0, None


def has_part(process: Process, artifact: str, layout: ExecutionLayout) -> bool:
    """Whether what ``process`` holds is its part under ``layout``, element by element."""
    part = process.store.get(artifact)
    return part is not None and not part.junk and _is_part(process, part, artifact, layout)


def would_send(process: Process, artifact: str, layout: ExecutionLayout) -> bool:
    """Whether ``process`` takes what it holds for its part under ``layout``: it knows under which it got that."""
    part = process.store.get(artifact)
    return part is not None and _is_part(process, part, artifact, layout)


def _is_part(process: Process, part: Part, artifact: str, layout: ExecutionLayout) -> bool:
    rank, fields = process.rank, process.contents.view(artifact).fields
    return all(spec.box(part.layout, rank) == spec.box(layout, rank) for spec in fields)


def check_inputs(process: Process, task: Task, layout: ExecutionLayout) -> None:
    """Names of artifacts say whose they are and before which step."""
    if missing := [name for name in task.inputs if not has_part(process, name, layout)]:
        raise ContractError(f"rank {process.rank} runs {task.id} without {missing[0]}")


def finds_broken_edge(operation: Operation, rank: int) -> bool:
    """Whether ``rank`` cannot take part since an edge failed before.

    That is to be expected of what was given out before the control plane knew of the failure.
    """
    process = operation.members[rank]
    for peer in operation.ranks:
        if peer != rank and (culprit := process.edges[operation.lane, peer].broken_by) is not None:
            if culprit.reported is not None and operation.emitted > culprit.reported:
                raise ContractError(
                    f"ranks {rank} and {peer} use an edge on lane {operation.lane} that was not reset"
                )
            return True
    return False


def use_edges(operation: Operation) -> None:
    """Count one instance on every edge of an operation that all members are at."""
    members = operation.members
    for one, other in combinations(sorted(members), 2):
        ours, theirs = members[one].edges[operation.lane, other], members[other].edges[operation.lane, one]
        if ours.generation is None or (ours.generation, ours.instance) != (theirs.generation, theirs.instance):
            raise ContractError(f"ranks {one} and {other} disagree about their edge on lane {operation.lane}")
        ours.instance += 1
        theirs.instance += 1


def break_edges(operation: Operation, rank: int) -> None:
    """``rank`` leaves a collective in the middle; its abort reaches peers that have not reset the edge since."""
    for peer in operation.ranks:
        if peer != rank:
            ours = operation.members[rank].edges[operation.lane, peer]
            theirs = operation.members[peer].edges[operation.lane, rank]
            ours.broken_by = ours.broken_by or operation
            if theirs.generation == ours.generation:
                theirs.broken_by = theirs.broken_by or operation
