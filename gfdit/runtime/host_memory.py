"""How a CPU worker keeps memory, as a GPU's allocator does."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """From now on the C library of this process keeps freed memory up to 1 GiB for the next allocation.

    By default it gives large blocks back, and the kernel clears every page of the next one: an artifact of 30 MB
    that arrives would wait longer for its memory than for its bytes. Does nothing where that cannot be set.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, _KEEP_BYTES)
