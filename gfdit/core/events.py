"""What happens outside the control plane and is told to it. All plain data, so a run can be recorded.

Workers send these as they are: one vocabulary from the ranks to the policy and back (:mod:`gfdit.core.commands`).
"""

from __future__ import annotations

from msgspec import Struct

from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.cost.file import CostTable
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.tasks import Request, Shape, TaskGraph, TaskKind


class _Event(Struct, frozen=True, gc=False, tag=True):
    """Tagged with its name, by which it is told apart on the wire and in a recording."""


class MemoryUse(Struct, frozen=True, gc=False):
    """Of a rank's device, as its allocator counts.

    ``capacity_bytes`` is what this process may have of it, ``weights_bytes`` what the loaded model takes;
    ``working_bytes`` is the most that a task took beside what was there when it began.
    """

    capacity_bytes: int
    weights_bytes: int
    working_bytes: int


class MemoryPoint(Struct, frozen=True, gc=False):
    """What ``batch`` tasks took together that no request asked for: they warmed the rank up."""

    kind: TaskKind
    shape: Shape
    cfg: bool
    parallel: ParallelSpec
    batch: int
    use: MemoryUse


class RequestArrived(_Event, frozen=True, gc=False):
    request: Request
    graph: TaskGraph


class RequestCancelled(_Event, frozen=True, gc=False):
    request_id: str


class TaskDispatched(_Event, frozen=True, gc=False):
    """CPU-side dispatch to one rank is complete; the device may still be busy with it."""

    dispatch_id: int
    rank: int


class TaskStarted(_Event, frozen=True, gc=False):
    """The device of one rank has begun the dispatch."""

    dispatch_id: int
    rank: int


class TaskWithdrawn(_Event, frozen=True, gc=False):
    """A :class:`~commands.WithdrawTask` was in time: no rank has begun the dispatch and none will."""

    dispatch_id: int


class TaskDelivering(_Event, frozen=True, gc=False):
    """The device is done with a dispatch whose result is on its way to the engine.

    The rank may be given something else. ``TaskFinished`` follows when the result is there, or ``TaskFailed``.
    """

    dispatch_id: int
    rank: int


class TaskFinished(_Event, frozen=True, gc=False):
    """The device of one rank is done; ``seconds`` is its measured execution time.

    The first rank of the layout tells with ``views`` what the artifacts that were made consist of. One that it
    leaves out is like the task's input of the same kind. ``dispatched_s`` and ``finished_s`` are when its host had
    launched all of it and when its device was done, on the clock that all processes of a machine share. ``memory``
    is what it took, where that is measured.
    """

    dispatch_id: int
    rank: int
    seconds: float
    views: tuple[tuple[str, ArtifactView], ...] = ()
    dispatched_s: float = 0.0
    finished_s: float = 0.0
    memory: MemoryUse | None = None


class TaskFailed(_Event, frozen=True, gc=False):
    """One rank gave the dispatch up. ``caused_by_peer`` marks an error that only echoes a peer's failure.

    Its inputs are on that rank as they were before. ``out_of_memory``: the device had too little for it.
    ``culprit``: another rank, which has an input and could not send it.
    """

    dispatch_id: int
    rank: int
    error: str
    status_code: int = 500
    caused_by_peer: bool = False
    out_of_memory: bool = False
    culprit: int | None = None


class MemoryMeasured(_Event, frozen=True, gc=False):
    """What one rank has measured beside its tasks; telling it again changes nothing."""

    rank: int
    points: tuple[MemoryPoint, ...]


class MigrationFinished(_Event, frozen=True, gc=False):
    """One rank is done with its side of a migration; ``seconds`` it took, 0 where not measured.

    ``num_bytes`` have come to this rank. With ``error`` nothing has, and it holds what it held before; with
    ``caused_by_peer`` peers are to blame, and edges may be out of step. ``finished_s`` as in
    :class:`TaskFinished`.
    """

    migration_id: int
    rank: int
    seconds: float = 0.0
    num_bytes: int = 0
    error: str = ""
    caused_by_peer: bool = False
    finished_s: float = 0.0


class EdgesReset(_Event, frozen=True, gc=False):
    """One rank has reset its side of the edges of a :class:`~commands.ResetEdges`."""

    reset_id: int
    rank: int


class RankProbed(_Event, frozen=True, gc=False):
    """The answer to a :class:`~commands.ProbeRank`; with ``error`` the rank cannot do its work."""

    probe_id: int
    rank: int
    error: str = ""


class ComponentLoaded(_Event, frozen=True, gc=False):
    """The answer to a :class:`~commands.LoadComponent`; with ``error`` what was evicted is gone all the same.

    ``seconds`` it took and ``num_bytes`` it has; 0 where not measured.
    """

    load_id: int
    rank: int
    seconds: float = 0.0
    num_bytes: int = 0
    error: str = ""


class RankLost(_Event, frozen=True, gc=False):
    """``for_good``: it will not join again. That may be told of a rank that is lost already."""

    rank: int
    reason: str
    for_good: bool = False


class RankJoined(_Event, frozen=True, gc=False):
    """``resident`` are the components that it has loaded; None: what a new process has."""

    rank: int
    resident: tuple[str, ...] | None = None


class Reconnected(_Event, frozen=True, gc=False):
    """The first event of a control plane that replaces another one, which was lost with its books.

    ``requests`` are alive. ``holdings`` are, by rank that is there, what it holds of artifacts: name, layout under
    which it has its part, and what the artifact consists of. No edge has been in ``generation`` yet. Requests in
    ``started`` have left the queue already. ``resident`` are the components that ranks have loaded.
    """

    requests: tuple[tuple[Request, TaskGraph], ...]
    holdings: tuple[tuple[int, tuple[tuple[str, ExecutionLayout, ArtifactView], ...]], ...]
    generation: int
    started: tuple[str, ...] = ()
    resident: tuple[tuple[int, tuple[str, ...]], ...] = ()


class PolicyChoice(Struct, frozen=True, gc=False):
    """As :func:`gfdit.core.policy.loading.load_policy` takes it."""

    policy: str
    args: dict[str, str] = {}
    admission: str = "none"


class SettingsChanged(_Event, frozen=True, gc=False):
    """An operator has changed how the server works: all of this is so from now on.

    Only policy and costs stay as they are where they are None. ``costs`` without entries are nominal times. They
    come with a ``choice``, since a policy may remember times. ``drained`` are the ranks that are to be
    given nothing; a rank in it that holds something hands it on first.
    """

    choice: PolicyChoice | None = None
    costs: CostTable | None = None
    max_queue_s: float | None = None
    max_retries: int = 3
    checkpoint_every_steps: int = 0
    drained: tuple[int, ...] = ()


class WakeUp(_Event, frozen=True, gc=False):
    """A time asked for with :class:`~commands.WakeAt` has come."""


class LookAhead(_Event, frozen=True, gc=False):
    """Nothing else is to be handed in now: time to ask the policy about the step after a running one."""


Event = (
    RequestArrived
    | RequestCancelled
    | TaskDispatched
    | TaskStarted
    | TaskWithdrawn
    | TaskDelivering
    | TaskFinished
    | TaskFailed
    | MemoryMeasured
    | MigrationFinished
    | EdgesReset
    | RankProbed
    | ComponentLoaded
    | RankLost
    | RankJoined
    | Reconnected
    | SettingsChanged
    | WakeUp
    | LookAhead
)
