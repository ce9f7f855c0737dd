"""How the processes of the runtime reach each other: ZeroMQ sockets in the run folder, and one pipe for its end.

A rank binds its own queues and everybody else connects to them, so what is sent before it listens waits for it.
The control process binds where events go, and another one in its place binds there again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import zmq

from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig

logger = logging.getLogger("gfdit.runtime")

# Far more than can be in flight to a peer that works: a few for every request that is alive.
MAX_MESSAGES = 100_000

LINGER_MS = 1000
"""How long a socket that is closed keeps what its peer does not take."""

Queue = Literal["compute", "migration", "watch"]
QUEUES: tuple[Queue, ...] = ("compute", "migration", "watch")


def open_socket(context: zmq.Context, kind: int, address: str, *, bind: bool = False) -> zmq.Socket:
    """A socket that holds at most ``MAX_MESSAGES`` for a peer that does not take them."""
    socket = context.socket(kind)
    socket.set_hwm(MAX_MESSAGES)
    socket.reconnect_ivl = 10  # ms
    socket.linger = LINGER_MS
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def push(socket: zmq.Socket, message: msgspec.Struct | bytes) -> None:
    """Send without ever waiting. Only a peer that has died or hung takes nothing.

    That is noticed by whoever watches the process, not here.
    """
    with contextlib.suppress(zmq.Again):
        socket.send(message if isinstance(message, bytes) else msg.encode(message), zmq.NOBLOCK)


def received(socket: zmq.Socket, decoder: msg.Decoder) -> list[Any]:
    """Every message that has arrived, without waiting.

    What cannot be read is left out, and the log says so: one process that is out of its mind must not take the
    reader with it. What it had to say is then missing, which those who wait for it notice by their time limits.
    """
    messages = []
    while True:
        try:
            messages.append(decoder.decode(socket.recv(zmq.NOBLOCK)))
        except msg.DamagedMessageError as error:
            logger.error("a message is left out: %s", error)
        except zmq.Again:
            return messages


# The lease: a named pipe whose write end the engine holds open for as long as the server lives. However that ends,
# every process that has the other end sees the end of the file.


def grant_lease(path: Path) -> int:
    """Make the pipe; returns the write end, to be closed when everything is to end."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    finally:
        os.close(reader)


def join_lease(path: Path) -> int:
    """A file descriptor to poll: it becomes readable when the server ends."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


ORPHAN_GRACE_S = 5.0
"""What a worker whose server has ended has to end by itself."""


def end_with_server(lease_path: Path) -> None:
    """Wait until the server has ended, however it did, then end this process, whatever it is at.

    A process that still loads its model has no lane that would hear of it.
    """
    lease = join_lease(lease_path)
    poller = select.poll()
    poller.register(lease, select.POLLIN)
    poller.poll()
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


# A worker's end


class Inbox(Protocol):
    """Where a lane gets its commands from. Those with numbers below ``first_id`` are to be passed over."""

    first_id: int

    def get(self) -> Any | None:
        """Wait for the next one; None once the server has ended."""


class WorkerInbox:
    """One queue of a rank."""

    def __init__(self, context: zmq.Context, config: RuntimeConfig, queue: Queue, rank: int, kinds: Any) -> None:
        self.first_id = 0
        self._socket = open_socket(context, zmq.PULL, config.rank_address(queue, rank), bind=True)
        self._lease = join_lease(config.lease_path)
        self._decoder = msg.Decoder(kinds)
        self._poller = zmq.Poller()
        for source in (self._socket, self._lease):
            self._poller.register(source, zmq.POLLIN)

    def get(self, timeout_s: float | None = None) -> Any | None:
        """None also when ``timeout_s`` is over; :attr:`ended` tells them apart."""
        ready = dict(self._poller.poll(None if timeout_s is None else round(timeout_s * 1000)))
        if self._socket in ready:
            return self._decoder.decode(self._socket.recv())
        self.ended = self._lease in ready
        return None

    ended = False

    def close(self) -> None:
        self._socket.close(linger=0)
        os.close(self._lease)


class Reports(Protocol):
    """What lanes tell the control process and the engine, from any thread."""

    def tell(self, message: msg.WorkerMessage) -> None: ...

    def deliver(self, results: dict[str, bytes]) -> None:
        """Results of requests, by id, to the engine."""


class WorkerReports:
    def __init__(self, context: zmq.Context, config: RuntimeConfig) -> None:
        self._lock = threading.Lock()
        self._events = open_socket(context, zmq.PUSH, config.address("events"))
        self._results = open_socket(context, zmq.PUSH, config.address("results"))

    def tell(self, message: msg.WorkerMessage) -> None:
        with self._lock:
            push(self._events, message)

    def deliver(self, results: dict[str, bytes]) -> None:
        with self._lock:
            for request_id, value in results.items():
                push(self._results, msg.Result(request_id, value))


# The control process' end


@dataclass(slots=True)
class Arrived:
    """What has come since the last time. ``ended``: the engine has closed, or is gone."""

    from_workers: list[msg.WorkerMessage] = field(default_factory=list)
    from_engine: list[msg.EngineMessage] = field(default_factory=list)
    ended: bool = False


class ControlPort(Protocol):
    """The way of the control process to everybody else; nothing but ``wait`` waits."""

    def wait(self, timeout_s: float | None, sentinels: Iterable[int]) -> Arrived:
        """Until something has come, a process behind one of ``sentinels`` has ended, or the time is over."""

    def send(self, queue: Queue, ranks: Sequence[int], message: msgspec.Struct) -> None: ...

    def tell(self, message: msg.ControlMessage) -> None:
        """The engine."""

    def renew(self, rank: int, config: RuntimeConfig) -> None:
        """Drop what ``rank`` has not taken; from now on it is the process that has ``config``."""

    def close(self) -> None: ...


class ControlSockets:
    """A :class:`ControlPort` of ZeroMQ sockets. End of file on standard input means that the engine is gone."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._context = zmq.Context()
        self._engine = open_socket(self._context, zmq.PAIR, config.engine_address)
        self._events = open_socket(self._context, zmq.PULL, config.address("events"), bind=True)
        self._queues: dict[tuple[Queue, int], zmq.Socket] = {}
        self._decode_engine = msg.Decoder(msg.EngineMessage)
        self._decode_worker = msg.Decoder(msg.WorkerMessage)
        self._poller = zmq.Poller()
        for source in (self._engine, self._events, sys.stdin.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._sentinels: set[int] = set()

    def wait(self, timeout_s: float | None, sentinels: Iterable[int]) -> Arrived:
        self._watch(set(sentinels))
        # Rounded up: waking a moment early would only mean another round.
        timeout_ms = None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))
        ready = dict(self._poller.poll(timeout_ms))
        return Arrived(
            received(self._events, self._decode_worker),
            received(self._engine, self._decode_engine),
            sys.stdin.fileno() in ready,
        )

    def _watch(self, sentinels: set[int]) -> None:
        if sentinels != self._sentinels:
            for gone in self._sentinels - sentinels:
                self._poller.unregister(gone)
            for new in sentinels - self._sentinels:
                self._poller.register(new, zmq.POLLIN)
            self._sentinels = sentinels

    def send(self, queue: Queue, ranks: Sequence[int], message: msgspec.Struct) -> None:
        data = msg.encode(message)
        for rank in ranks:
            push(self._queues[queue, rank], data)

    def tell(self, message: msg.ControlMessage) -> None:
        push(self._engine, message)

    def renew(self, rank: int, config: RuntimeConfig) -> None:
        for queue in QUEUES:
            if (old := self._queues.pop((queue, rank), None)) is not None:
                old.close(linger=0)
            self._queues[queue, rank] = open_socket(self._context, zmq.PUSH, config.rank_address(queue, rank))

    def close(self) -> None:
        self._context.destroy(linger=500)
