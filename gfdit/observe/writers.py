"""How diagnostic files are written. Those of a server never block serving and never end it."""

from __future__ import annotations

import logging
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Generic, Protocol, TypeVar

MAX_FILE_BYTES = 1 << 30
NUM_OLDER = 2
MAX_BATCH = 1024
# A disk that does not answer holds up the start and the end of a server for so long, and nothing between them.
OPEN_TIMEOUT_S, CLOSE_TIMEOUT_S = 1.0, 8.0

logger = logging.getLogger("gfdit.observe")

Item = TypeVar("Item")
ItemIn = TypeVar("ItemIn", contravariant=True)


class Sink(Protocol[ItemIn]):
    """A file that is open. An error leaves what was written before; nothing is written after it."""

    def write(self, items: Sequence[ItemIn]) -> None: ...

    def close(self) -> None: ...


class Writer(Protocol[ItemIn]):
    def put(self, item: ItemIn) -> None: ...

    def close(self) -> None: ...


class AppendFile:
    """A new file that is only appended to. What has been appended outlives a killed process."""

    def __init__(self, path: Path, *, keeps_older: bool) -> None:
        """``keeps_older``: a file that is there becomes ``<name>.1``, that one ``<name>.2``, which is the last."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if keeps_older:
            _keep_older(path)
        self._file = path.open("wb", buffering=0)
        self.num_bytes = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def append(self, data: bytes) -> None:
        """An error closes the file."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self.close()
            raise
        self.num_bytes += len(data)

    def close(self) -> None:
        self._file.close()


def _keep_older(path: Path) -> None:
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, NUM_OLDER + 1))]
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    # A link or a device, such as /dev/stdout, stays what it is.
    if stat.S_ISREG(status.st_mode) and status.st_size:
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                newer.replace(older)


class DirectWriter(Generic[Item]):
    """For tools: errors are raised by ``put`` and ``close``, and nothing is left out."""

    def __init__(self, sink: Sink[Item]) -> None:
        self._sink = sink
        self._waiting: list[Item] = []

    def put(self, item: Item) -> None:
        self._waiting.append(item)
        if len(self._waiting) >= MAX_BATCH:
            self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()
        self._sink.close()

    def _write(self) -> None:
        items, self._waiting = self._waiting, []
        self._sink.write(items)


class BackgroundWriter(Generic[Item]):
    """For servers: a thread opens the file and writes it, in the order of ``put``, which never waits or raises.

    An error, whatever it is, ends the file: a line in the log says so, and what is put from then on is dropped. So
    is what is put while ``max_waiting`` wait for a slow disk. The file then has a gap; one that has ``no_gaps``,
    since they would make it useless, ends there instead. What is written may be something else than a file on a
    disk: ``medium`` is what the log calls it.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink[Item]],
        *,
        max_waiting: int,
        interval_s: float,
        no_gaps: bool = False,
        medium: str = "the disk",
    ) -> None:
        """``name`` is for the log. What is put is written ``interval_s`` later, with what has come meanwhile."""
        self.num_dropped = 0
        self._name = name
        self._open_sink = open_sink
        self._max_waiting = max_waiting
        self._interval_s = interval_s
        self._no_gaps = no_gaps
        self._medium = medium
        self._ended = False
        self._queue: deque[tuple[Item, int]] = deque()
        # Each is changed by one thread alone, so neither needs a lock.
        self._size_put = self._size_written = 0
        self._opened, self._wake, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"gfdit {name}", daemon=True)
        self._thread.start()
        self._opened.wait(OPEN_TIMEOUT_S)

    @property
    def ended(self) -> bool:
        """What is put is dropped from now on."""
        return self._ended

    @property
    def waiting(self) -> int:
        """The size of what has been put and is not written."""
        return self._size_put - self._size_written

    def put(self, item: Item, size: int = 1) -> None:
        """``size`` is what ``item`` counts against ``max_waiting``. To be called by one thread."""
        if self._ended:
            return
        if self.waiting >= self._max_waiting:
            self._drop()
            return
        self._size_put += size
        self._queue.append((item, size))
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Write what is left, unless the disk does not answer. Once more does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("%s: %s does not answer, the end of it is lost", self._name, self._medium)
        if self.num_dropped and not self._no_gaps:
            logger.error("%s: %d entries were left out", self._name, self.num_dropped)

    def _drop(self) -> None:
        self.num_dropped += 1
        if self._no_gaps:
            self._end(f"{self._medium} is too slow")
        elif self.num_dropped == 1:
            logger.error("%s: %s is too slow, entries are left out; serving goes on", self._name, self._medium)

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            logger.error("%s ends here: %s; serving goes on", self._name, reason)

    # The thread

    def _run(self) -> None:
        try:
            sink = self._open_sink()
            self._opened.set()
            closing = False
            while not closing:
                self._wake.wait()
                self._closing.wait(self._interval_s)
                self._wake.clear()
                closing = self._closing.is_set()  # after ``clear``, which may undo the call of ``close``
                self._write_queue(sink)
            sink.close()
        except Exception as error:
            reason = isinstance(error, OSError) and error.strerror
            self._end(reason or f"{type(error).__name__}: {error}")
            self._queue.clear()
        finally:
            self._opened.set()

    def _write_queue(self, sink: Sink[Item]) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            sink.write([item for item, _ in batch])
            self._size_written += sum(size for _, size in batch)
