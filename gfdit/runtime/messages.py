"""Messages between engine, control process and workers (msgspec, tagged by type).

Engine and control process talk over one pair of sockets. Each rank has two first-in-first-out queues, one per
lane: ``compute`` (tasks, RPCs, edge resets) and ``migration`` (copies, frees). Prompts, results and RPC
arguments cross the control process as opaque bytes or not at all.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gfdit.core import commands
from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.tasks import Request, TaskGraph


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of every message."""


# Engine to control process


class Submit(Message, frozen=True):
    """``payload`` is handed, unread, to the ranks that run the request's first task."""

    request: Request
    graph: TaskGraph
    payload: bytes


class Cancel(Message, frozen=True):
    request_id: str


class CallWorkers(Message, frozen=True):
    """Run ``method`` on every rank named, each in its own first-in-first-out order."""

    call_id: int
    ranks: tuple[int, ...]
    method: str
    payload: bytes


EngineMessage = Submit | Cancel | CallWorkers


# Control process to engine


class Ready(Message, frozen=True):
    """Every worker has loaded the model and waits for tasks."""


class Started(Message, frozen=True):
    request_id: str
    queue_wait_s: float


class Ended(Message, frozen=True):
    """A request's one terminal message. ``outcome``: completed, cancelled, rejected or failed."""

    request_id: str
    outcome: str
    error: str = ""
    status_code: int = 500
    retry_after_s: float | None = None


class CallDone(Message, frozen=True):
    """Replies by rank, as (ok, pickled value or error text)."""

    call_id: int
    replies: list[tuple[bool, bytes]]


class ArtifactBytes(Message, frozen=True):
    """What each rank holds of artifacts now, by rank; sent when it has changed, but not all the time."""

    by_rank: list[int]


class Fatal(Message, frozen=True):
    """The runtime is down: every live request is lost."""

    error: str


ControlMessage = Ready | Started | Ended | CallDone | ArtifactBytes | Fatal


# Control process to worker


class Run(Message, frozen=True):
    """``payloads`` by request id, only with tasks that have no inputs."""

    command: commands.RunTask
    payloads: dict[str, bytes]


class Reset(Message, frozen=True):
    command: commands.ResetEdges


class Call(Message, frozen=True):
    call_id: int
    method: str
    payload: bytes


class Move(Message, frozen=True):
    command: commands.Migrate


class Free(Message, frozen=True):
    command: commands.FreeArtifacts


class Stop(Message, frozen=True):
    """End once the commands before this one are done."""


class PeerLost(Message, frozen=True):
    """Leave every collective with ``rank``. The only message that does not wait its turn in a lane."""

    rank: int


ComputeMessage = Run | Reset | Call | Stop
MigrationMessage = Move | Free | Reset | Stop


# Worker to control process. Times are readings of CLOCK_MONOTONIC, the same clock in every process.


class WorkerReady(Message, frozen=True):
    """The model is loaded. ``incarnation`` as in :class:`~gfdit.runtime.config.RuntimeConfig`."""

    rank: int
    incarnation: int


class Heartbeat(Message, frozen=True):
    rank: int
    incarnation: int


class RunStarted(Message, frozen=True):
    """The device has begun a dispatch."""

    dispatch_id: int
    rank: int
    started_s: float


class RunDispatched(Message, frozen=True):
    """The host has launched all of a dispatch; the device may still be busy with it, or not have begun."""

    dispatch_id: int
    rank: int
    dispatched_s: float


class RunSkipped(Message, frozen=True):
    """A queued dispatch was withdrawn before this rank came to it."""

    dispatch_id: int
    rank: int


class RunDone(Message, frozen=True):
    """The device is done with a dispatch. ``views`` as in :class:`~gfdit.core.events.TaskFinished`."""

    dispatch_id: int
    rank: int
    dispatched_s: float
    started_s: float
    finished_s: float
    views: tuple[tuple[str, ArtifactView], ...] = ()


class RunFailed(Message, frozen=True):
    dispatch_id: int
    rank: int
    error: str
    status_code: int
    caused_by_peer: bool


class MoveDone(Message, frozen=True):
    """``num_bytes`` have come to this rank. With ``error`` nothing has, and the task that needs it fails.

    ``caused_by_peer``: because a peer did.
    """

    migration_id: int
    rank: int
    num_bytes: int
    started_s: float
    finished_s: float
    error: str = ""
    caused_by_peer: bool = False


class ResetDone(Message, frozen=True):
    reset_id: int
    rank: int


class CallReply(Message, frozen=True):
    call_id: int
    rank: int
    ok: bool
    value: bytes


class WorkerFailed(Message, frozen=True):
    """The worker cannot go on (start-up failure or a broken lane)."""

    rank: int
    incarnation: int
    error: str


WorkerMessage = (
    WorkerReady
    | Heartbeat
    | RunStarted
    | RunDispatched
    | RunSkipped
    | RunDone
    | RunFailed
    | MoveDone
    | ResetDone
    | CallReply
    | WorkerFailed
)


class Result(Message, frozen=True):
    """What the last task of a request made, sent from its worker straight to the engine."""

    request_id: str
    value: bytes


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decoder(kind: Any) -> msgspec.msgpack.Decoder:
    """Decoder of one union above; raises ``msgspec.ValidationError`` for anything else."""
    return msgspec.msgpack.Decoder(kind)
