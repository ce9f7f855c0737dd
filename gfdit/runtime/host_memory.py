"""How a CPU worker keeps freed memory, as a GPU's allocator does, and how much of it.

Freed blocks lie between others that live on, such as what the kernels of torch keep for every shape they have
met. A tensor needs one gap that is large enough, and where there is none the process grows: with ever new sizes
for as long as it runs, while most of what it holds is free. So what is kept is measured, and given back if it is
too much.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from dataclasses import dataclass
from pathlib import Path

#: What a worker keeps of its freed memory at most.
KEPT_BYTES = 1 << 30
_CHECK_EVERY_S = 0.25
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEEDED = ("mallopt", "mallinfo2", "malloc_trim")


def keep_freed_memory() -> None:
    """From now on the C library of this process keeps freed memory for the next allocation.

    By default it gives large blocks back, and the kernel clears every page of the next one: an artifact of 30 MB
    that arrives would wait longer for its memory than for its bytes. :class:`FreedMemory` bounds what is kept.
    Threads that start from now on share what is freed: what is at the end of an arena of their own would stay
    theirs, up to 64 MB for each. Does nothing where that cannot be measured.
    """
    if (library := _c_library()) is not None:
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            library.mallopt(parameter, KEPT_BYTES)
        library.mallopt(_M_ARENA_MAX, 1)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Of this process: ``resident`` of its own, ``in_use`` by what was allocated, ``kept`` of what was freed."""

    resident_bytes: int
    in_use_bytes: int
    kept_bytes: int
    num_given_back: int


class FreedMemory:
    """Bounds what this process keeps of its freed memory; any thread may ask for it.

    Kept is what is resident beyond what is in use, and beyond what is no business of the allocator's: code,
    Python's small objects. That much is known right after everything kept was given back.
    """

    def __init__(self, limit_bytes: int = KEPT_BYTES, check_every_s: float = _CHECK_EVERY_S) -> None:
        self.limit_bytes = limit_bytes
        self.check_every_s = check_every_s
        self._library = _c_library()
        self._num_given_back = 0
        self._check_s = 0.0
        self._other_bytes = 0
        self._give_back()

    def bound(self) -> None:
        """Give back what is kept if it is more than the limit; looks at most every ``check_every_s``."""
        now_s = time.monotonic()
        if now_s >= self._check_s:
            self._check_s = now_s + self.check_every_s
            if self.measure().kept_bytes > self.limit_bytes:
                self._num_given_back += 1
                self._give_back()

    def measure(self) -> HostMemory:
        """Zeros where the C library cannot tell."""
        if self._library is None:
            return HostMemory(0, 0, 0, 0)
        resident_bytes, in_use_bytes = _resident_bytes(), self._in_use_bytes()
        kept_bytes = max(0, resident_bytes - in_use_bytes - self._other_bytes)
        return HostMemory(resident_bytes, in_use_bytes, kept_bytes, self._num_given_back)

    def _give_back(self) -> None:
        if self._library is not None:
            self._library.malloc_trim(0)
            self._other_bytes = _resident_bytes() - self._in_use_bytes()

    def _in_use_bytes(self) -> int:
        assert self._library is not None
        info = self._library.mallinfo2()
        return info.uordblks + info.hblkhd


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def _c_library() -> ctypes.CDLL | None:
    """The C library if it is one that can be told and asked: glibc from 2.33 on."""
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in _NEEDED):
        return None
    library.mallinfo2.restype = _MallInfo2
    return library


def _resident_bytes() -> int:
    """Of memory that is no file's and not shared."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
