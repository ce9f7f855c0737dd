"""Artifacts that are read while they are made: parts go from rank to rank as soon as they are there.

A task that makes one hands in its parts, one by one, on the compute thread. The migration lane of its rank sends
each to the ranks of the reader, whose lanes hand it on to the task that waits there (LegoDiffusion paper, §4.3.2:
deferred inputs). The artifact as a whole is made besides, for readers that come later.

Was never run on a GPU.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from gfdit.comm import CommError, GroupFreeComm
from gfdit.core.bounded import RecentDict
from gfdit.core.commands import Migrate
from gfdit.runtime.executor import PeerError

MAX_REMEMBERED = 256
_PART, _END, _FAILED = range(3)
_MAX_DIMS = 6
# What follows, its dtype, its number of dimensions and these.
_HEAD = struct.Struct(f"<{3 + _MAX_DIMS}q")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


_GONE = "its control process is gone"

_Key = tuple[str, int]
"""Of a stream: an artifact and the dispatch that makes it."""


@dataclass(slots=True)
class _Stream:
    parts: list[tuple[torch.Tensor, torch.cuda.Event | None]] = field(default_factory=list)
    ended: bool = False
    error: str = ""


class Streams:
    """Of one rank: what is made here, and what comes here. By artifact and the dispatch that makes it."""

    def __init__(
        self,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
    ) -> None:
        """``timeout_s`` bounds every wait for a part. ``changed``: what those who wait are woken by."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._changed = changed or threading.Condition()
        self._streams: dict[_Key, _Stream] = {}
        self._over: RecentDict[_Key, str] = RecentDict(MAX_REMEMBERED)  # why nobody reads them any more
        self._makers: dict[str, int] = {}  # of the artifacts of the task that runs: this dispatch
        self._read: dict[str, int] = {}  # what the task that runs reads on its way, and who makes it
        self._first_id = 0  # dispatches before are of a control process that is gone
        self.stalled_s = 0.0  # how long the task that runs has waited for parts

    # The task that runs, on the compute thread

    def begin(self, dispatch_id: int, outputs: tuple[str, ...], reads: dict[str, int]) -> None:
        """A task begins that makes ``outputs``; ``reads`` names what comes as a stream, and its maker."""
        self._makers = dict.fromkeys(outputs, dispatch_id)
        self._read = reads
        self.stalled_s = 0.0

    def end(self, error: str = "") -> None:
        """It has ended, and with ``error`` nothing more is to come."""
        with self._changed:
            for key in self._makers.items():
                if error or key in self._streams:
                    self._end(key, error)
            for key in self._read.items():
                self._drop(key, "its reader has ended")
            self._changed.notify_all()
        self._makers, self._read = {}, {}

    def emit(self, artifact: str, part: torch.Tensor) -> None:
        """The next part of an output; it must not change any more."""
        ready = None
        if part.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._add((artifact, self._makers[artifact]), part, ready)

    def is_stream(self, artifact: str) -> bool:
        """Whether the task that runs reads ``artifact`` while it is made; else it is here as a whole."""
        return artifact in self._read

    def fetch(self, artifact: str, index: int) -> torch.Tensor:
        """Part number ``index`` of what the task reads; waits for it.

        Raises :class:`PeerError` if it will not come, ``IndexError`` if there are fewer parts.
        """
        start_s = self._clock()
        part, ready = self._wait_for((artifact, self._read[artifact]), index)
        self.stalled_s += self._clock() - start_s
        if ready is not None:
            ready.wait()
        return part

    # The migration lane

    def move(self, comm: GroupFreeComm, command: Migrate) -> int:
        """Take part in ``command``, which is streamed; returns the bytes that have come to this rank.

        Raises :class:`PeerError` if the maker fails, and what a broken collective raises.
        """
        assert command.streamed, "it is moved as a whole"
        key = (command.artifact, command.streamed)
        source, *_ = command.ranks
        if comm.rank == source:
            self._send(comm, command, key)
            return 0
        try:
            return self._receive(comm, command, key)
        except (PeerError, CommError) as error:
            with self._changed:
                self._end(key, str(error) or type(error).__name__)
                self._changed.notify_all()
            raise

    def _send(self, comm: GroupFreeComm, command: Migrate, key: _Key) -> None:
        group = comm.group(command.ranks)

        def tell(what: int, dtype: int = 0, shape: tuple[int, ...] = ()) -> None:
            dims = (*shape, *[0] * (_MAX_DIMS - len(shape)))
            head = torch.frombuffer(bytearray(_HEAD.pack(what, dtype, len(shape), *dims)), dtype=torch.uint8)
            comm.broadcast(head.to(comm.device), comm.rank, group)

        try:
            for part, ready in self._parts(key):
                if ready is not None:
                    ready.wait()
                data = part.contiguous()
                tell(_PART, _DTYPES.index(data.dtype), tuple(data.shape))
                comm.broadcast(data.view(-1).view(torch.uint8).to(comm.device), comm.rank, group)
        except PeerError:
            tell(_FAILED)
            comm.synchronize()
            raise
        tell(_END)
        comm.synchronize()

    def _receive(self, comm: GroupFreeComm, command: Migrate, key: _Key) -> int:
        group, source, num_bytes = comm.group(command.ranks), command.ranks[0], 0
        while True:
            head = torch.empty(_HEAD.size, dtype=torch.uint8, device=comm.device)
            comm.broadcast(head, source, group)
            host = head.cpu()
            comm.check()  # if nothing has arrived, nothing must read junk
            what, dtype, num_dims, *dims = _HEAD.unpack(host.numpy().tobytes())
            if what == _FAILED:
                raise PeerError(f"{command.artifact} is not made: its task has failed")
            if what == _END:
                with self._changed:
                    self._end(key, "")
                    self._changed.notify_all()
                return num_bytes
            part = torch.empty(dims[:num_dims], dtype=_DTYPES[dtype], device=comm.device)
            comm.broadcast(part.view(-1).view(torch.uint8), source, group)
            ready = None
            if part.is_cuda:
                ready = torch.cuda.Event()
                ready.record()
            else:
                comm.synchronize()
                comm.check()
            num_bytes += part.nbytes
            self._add(key, part, ready)

    # Both

    @property
    def any_held(self) -> bool:
        return bool(self._streams)

    def forget(self, artifacts: tuple[str, ...]) -> None:
        """They are freed: nobody reads them any more."""
        gone = set(artifacts)
        with self._changed:
            for key in [key for key in self._streams if key[0] in gone]:
                self._drop(key, "it was freed")
            self._changed.notify_all()

    def abandon(self, before: int) -> None:
        """Nothing more comes of dispatches ``before`` this one: their control process is gone."""
        with self._changed:
            self._first_id = before
            for key in [key for key in self._streams if key[1] < before]:
                self._drop(key, _GONE)
            self._changed.notify_all()

    def _add(self, key: _Key, part: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        with self._changed:
            if self._over.get(key) is None and key[1] >= self._first_id:
                self._of(key).parts.append((part, ready))
                self._changed.notify_all()

    # With the lock held

    def _end(self, key: _Key, error: str) -> None:
        if self._over.get(key) is not None:
            return
        stream = self._of(key)
        stream.ended = True
        if error:
            stream.error = error
            self._drop(key, error)

    def _drop(self, key: _Key, reason: str) -> None:
        """Those who wait for it know it still."""
        if (stream := self._streams.pop(key, None)) is not None and not stream.ended:
            stream.error = reason
        self._over[key] = reason

    def _of(self, key: _Key) -> _Stream:
        return self._streams.setdefault(key, _Stream())

    # Waiting

    def _parts(self, key: _Key) -> Iterator[tuple[torch.Tensor, torch.cuda.Event | None]]:
        index = 0
        while True:
            try:
                yield self._wait_for(key, index)
            except IndexError:
                return
            index += 1

    def _wait_for(self, key: _Key, index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        deadline_s = self._clock() + self._timeout_s
        with self._changed:
            reason = _GONE if key[1] < self._first_id else self._over.get(key)
            if reason is not None:
                raise PeerError(f"{key[0]} does not come: {reason}")
            stream = self._of(key)
            while True:
                if stream.error:
                    raise PeerError(f"{key[0]} does not come: {stream.error}")
                if len(stream.parts) > index:
                    return stream.parts[index]
                if stream.ended:
                    raise IndexError(f"{key[0]} has {len(stream.parts)} parts, not {index + 1}")
                if not self._changed.wait(deadline_s - self._clock()):
                    raise PeerError(f"part {index} of {key[0]} has not come for {self._timeout_s:.0f} s")
