"""What processes tell each other besides the events and commands of the control plane (msgspec, tagged by type).

A worker sends :mod:`gfdit.core.events` and is sent :mod:`gfdit.core.commands` as they are; the engine is sent the
commands that concern requests, and for operators a :class:`~gfdit.observe.snapshot.Snapshot` and
:class:`~gfdit.observe.traces.Traces`. Each rank has two first-in-first-out queues, one per lane: ``compute``
(tasks, calls, edge resets) and ``migration`` (copies, frees), and one for what cannot wait for a lane, ``watch``.
Prompts, results and arguments of calls cross the control process as opaque bytes or not at all.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.commands import (
    CancelRequest,
    CompleteRequest,
    FailRequest,
    FreeArtifacts,
    Lane,
    LoadComponent,
    Migrate,
    ProbeRank,
    RejectRequest,
    ResetEdges,
    RunTask,
    StartRequest,
)
from gfdit.core.events import (
    ComponentLoaded,
    EdgesReset,
    MemoryMeasured,
    MigrationFinished,
    RankProbed,
    RequestCancelled,
    TaskDelivering,
    TaskDispatched,
    TaskFailed,
    TaskFinished,
    TaskStarted,
)
from gfdit.core.json_fields import one_line
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Request, TaskGraph
from gfdit.observe.snapshot import Snapshot
from gfdit.observe.traces import Traces
from gfdit.runtime.config import RuntimeConfig


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every message."""


class Alive(Message, frozen=True):
    """Of engine and control process to each other: nothing else was to be said for a while."""


# Engine to control process


class Submit(Message, frozen=True):
    """``payload`` is handed, unread, to the ranks that run the request's first task."""

    request: Request
    graph: TaskGraph
    payload: bytes


class Resubmitted(Message, frozen=True):
    """To a control process that replaces another: every request that is alive was submitted again before this.

    Those in ``started`` have left the queue already.
    """

    started: tuple[str, ...] = ()


class CallWorkers(Message, frozen=True):
    """Run ``method`` on every rank named, each in its own first-in-first-out order."""

    call_id: int
    ranks: tuple[int, ...]
    method: str
    payload: bytes


class Reconfigure(Message, frozen=True):
    """Go on with another configuration, as a control process that is started with it would.

    The answer is :class:`Reconfigured`. Only what is in :data:`~gfdit.runtime.config.CHANGEABLE` may differ.
    """

    change_id: int
    config: RuntimeConfig


EngineMessage = Submit | Resubmitted | RequestCancelled | CallWorkers | Reconfigure | Alive


# Control process to engine


class Ready(Message, frozen=True):
    """Every worker has loaded the model and waits for tasks."""


GONE = b""
"""The answer, as if all were well, for a rank that was lost and is not started again: it is not asked any more."""


class CallDone(Message, frozen=True):
    """Replies by rank, as (ok, pickled value or error text)."""

    call_id: int
    replies: list[tuple[bool, bytes]]


class Reconfigured(Message, frozen=True):
    """With an ``error`` nothing has changed."""

    change_id: int
    error: str = ""


class Fatal(Message, frozen=True):
    """The runtime is down: every live request is lost."""

    error: str


RequestEnd = CompleteRequest | CancelRequest | RejectRequest | FailRequest
ControlMessage = Ready | StartRequest | RequestEnd | CallDone | Reconfigured | Snapshot | Traces | Fatal | Alive


# Control process to worker


class Payloads(Message, frozen=True):
    """What first tasks of requests are given, by request id; in the queue right before their dispatch."""

    dispatch_id: int
    by_request: dict[str, bytes]


class Call(Message, frozen=True):
    call_id: int
    method: str
    payload: bytes


class Reconnect(Message, frozen=True):
    """From a new control process, in every queue: leave all collectives, and say what you hold.

    Commands with numbers below ``first_id`` are of the one before, and are not carried out any more.
    """

    first_id: int


class Stop(Message, frozen=True):
    """End once the commands before this one are done."""


class PeerLost(Message, frozen=True):
    """Leave every collective with ``rank``, of edges up to these generations, by lane.

    Another process may have taken its place, and the edges with it may have been reset, before this is read.
    """

    rank: int
    generations: dict[Lane, int]


ComputeMessage = Payloads | RunTask | LoadComponent | ResetEdges | ProbeRank | Call | Reconnect | Stop
MigrationMessage = Migrate | FreeArtifacts | ResetEdges | Reconnect | Stop
WatchMessage = PeerLost | Reconnect


# Worker to control process. Times are readings of CLOCK_MONOTONIC, the same clock in every process.


class Holding(Message, frozen=True, tag=False):
    """A rank has its part of ``artifact`` under ``layout``."""

    artifact: str
    layout: ExecutionLayout
    view: ArtifactView


class WorkerReady(Message, frozen=True):
    """The model is loaded. ``incarnation`` as in :class:`~gfdit.runtime.config.RuntimeConfig`.

    In answer to :class:`Reconnect`, whose ``first_id`` it repeats, also what it holds, the highest ``generation``
    of its edges, and the components that are loaded.
    """

    rank: int
    incarnation: int
    first_id: int = 0
    holdings: tuple[Holding, ...] = ()
    generation: int = 0
    resident: tuple[str, ...] = ()


class Heartbeat(Message, frozen=True):
    rank: int
    incarnation: int


class TaskSkipped(Message, frozen=True):
    """A queued dispatch was withdrawn before this rank came to it."""

    dispatch_id: int
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


TaskEvent = TaskStarted | TaskDispatched | TaskDelivering | TaskFinished | TaskFailed
WorkerEvent = TaskEvent | MemoryMeasured | MigrationFinished | EdgesReset | RankProbed | ComponentLoaded
WorkerMessage = WorkerEvent | WorkerReady | Heartbeat | TaskSkipped | CallReply | WorkerFailed


class Result(Message, frozen=True):
    """What the last task of a request made, sent from its worker straight to the engine."""

    request_id: str
    value: bytes


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


class DamagedMessageError(ValueError):
    """Of bytes that are no message: the text says what was expected and what is wrong."""


class Decoder:
    """Of one union above."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def decode(self, data: bytes) -> Any:
        """Raises :class:`DamagedMessageError` for anything else, and nothing but that."""
        try:
            return self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedMessageError(f"{len(data)} bytes are no message: {one_line(error)}") from error
