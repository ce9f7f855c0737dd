"""What happens outside the control plane and is told to it. All plain data, so a run can be recorded."""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.core.artifact_views import ArtifactView
from gfdit.core.tasks import Request, TaskGraph


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request
    graph: TaskGraph


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    request_id: str


@dataclass(frozen=True, slots=True)
class TaskDispatched:
    """CPU-side dispatch to one rank is complete; the device may still be busy with it."""

    dispatch_id: int
    rank: int


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """The device of one rank has begun the dispatch."""

    dispatch_id: int
    rank: int


@dataclass(frozen=True, slots=True)
class TaskWithdrawn:
    """A :class:`~commands.WithdrawTask` was in time: no rank has begun the dispatch and none will."""

    dispatch_id: int


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """The device of one rank is done; ``seconds`` is its measured execution time.

    The first rank of the layout tells with ``views`` what the artifacts that were made consist of. One that it
    leaves out is like the task's input of the same kind.
    """

    dispatch_id: int
    rank: int
    seconds: float
    views: tuple[tuple[str, ArtifactView], ...] = ()


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """One rank gave the dispatch up. ``secondary`` marks an error that only echoes a peer's failure.

    Its inputs are on that rank as they were before.
    """

    dispatch_id: int
    rank: int
    error: str
    status_code: int = 500
    secondary: bool = False


@dataclass(frozen=True, slots=True)
class MigrationFinished:
    """One rank is done with its side of a migration; ``seconds`` it took, 0 where not measured.

    ``num_bytes`` have come to this rank. With ``error`` nothing has, and it holds what it held before; with
    ``secondary`` peers are to blame, and edges may be out of step.
    """

    migration_id: int
    rank: int
    seconds: float = 0.0
    num_bytes: int = 0
    error: str = ""
    secondary: bool = False


@dataclass(frozen=True, slots=True)
class EdgesReset:
    """One rank has reset its side of the edges of a :class:`~commands.ResetEdges`."""

    reset_id: int
    rank: int


@dataclass(frozen=True, slots=True)
class RankLost:
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankJoined:
    rank: int


@dataclass(frozen=True, slots=True)
class WakeUp:
    """A time asked for with :class:`~commands.WakeAt` has come."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Nothing else is to be handed in now: time to ask the policy about the step after a running one."""


Event = (
    RequestArrived
    | RequestCancelled
    | TaskDispatched
    | TaskStarted
    | TaskWithdrawn
    | TaskFinished
    | TaskFailed
    | MigrationFinished
    | EdgesReset
    | RankLost
    | RankJoined
    | WakeUp
    | LookAhead
)
