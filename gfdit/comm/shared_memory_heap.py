"""The CPU heap: one file in /dev/shm holding a segment per rank, mapped by one process per rank.

Plain files instead of ``multiprocessing.shared_memory``: the latter's resource tracker (Python < 3.13)
unlinks a block when any process that merely attached to it exits.

Nothing leaks when a rank is killed, since only the owner unlinks, and it may do so as soon as every rank has
attached: mappings outlive the name. Should the owner itself be killed before that, a later ``create`` removes
the file once it is old and nobody uses it: every user holds a shared lock, which the kernel drops with the
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from gfdit.comm.described_heap import DescribedHeap
from gfdit.comm.futex import default_waiter
from gfdit.comm.heap_descriptor import DEFAULT_LANES, HeapDescriptor
from gfdit.comm.host_transport import HostTransport
from gfdit.comm.memory_order import memory_fence

_PREFIX = "gfdit-heap-"
# Longer than anyone takes between create and attach, when a heap has no user that holds its lock yet.
_ABANDONED_AFTER_S = 3600.0


class SharedMemoryHeap(DescribedHeap):
    """A ``SymmetricHeap`` over POSIX shared memory. Make one with ``create`` + ``attach``.

    Close it only when no thread is inside a collective: operations on a closed heap raise ValueError.
    """

    _transport_class: type[HostTransport] = HostTransport
    device = torch.device("cpu")

    @classmethod
    def create(
        cls,
        world_size: int,
        *,
        lanes: Sequence[str] = DEFAULT_LANES,
        **sizes: int,
    ) -> HeapDescriptor:
        """Reserve the memory for ``world_size`` ranks; the caller owns it and must ``unlink`` the descriptor.

        ``sizes``: those of ``HeapDescriptor``. The host transport needs no ``low_latency_bytes``,
        ``export_bytes``, ``multicast_bytes`` and ``place_bytes``; kernels do.
        Raises OSError with one clear line when the memory is not there, ValueError on bad arguments.
        """
        descriptor = HeapDescriptor.make("shared_memory", world_size, lanes, **sizes)
        directory = _directory()
        _remove_abandoned(directory)
        path = os.path.join(directory, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}")
        _reserve(path, descriptor.layout.segment_bytes * world_size)
        return replace(descriptor, path=path)

    @classmethod
    def attach(cls, descriptor: HeapDescriptor, rank: int) -> SharedMemoryHeap:
        """Map the heap as ``rank``. Raises ValueError for a rank out of range, FileNotFoundError if gone."""
        return cls(descriptor, rank)

    def __init__(self, descriptor: HeapDescriptor, rank: int) -> None:
        super().__init__(descriptor, rank)
        self._fence = memory_fence()
        self._waiter = default_waiter()
        self._fd = os.open(descriptor.path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self._map = mmap.mmap(self._fd, self.layout.segment_bytes * descriptor.world_size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._words = memoryview(self._map).cast("B").cast("Q")

    def base_pointer(self, rank: int) -> int:
        return self._address + rank * self.layout.segment_bytes

    def segment(self, rank: int) -> torch.Tensor:
        """All of ``rank``'s segment, uint8; drop every view before ``close``."""
        size = self.layout.segment_bytes
        # Unlike a tensor over the map itself, this one keeps the map from being closed.
        return torch.frombuffer((ctypes.c_uint8 * size).from_buffer(self._map, rank * size), dtype=torch.uint8)

    def open_lane(self, lane: str, *, timeout_s: float) -> HostTransport:
        lane_index = self._lanes.open(lane)
        return self._transport_class(
            rank=self.rank,
            lane=lane,
            lane_index=lane_index,
            layout=self.layout,
            words=self._words,
            address=self._address,
            timeout_s=timeout_s,
            waiter=self._waiter,
            fence=self._fence,
        )

    def close(self) -> None:
        """Unmap and drop the lock. Memory still viewed by a tensor is unmapped when the tensor goes."""
        if self._lanes.closed:
            return
        super().close()
        self._words.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)

    def unlink(self) -> None:
        self.descriptor.unlink()


def _directory() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _reserve(path: str, num_bytes: int) -> None:
    """Create ``path`` with real pages behind it: a sparse file would fail later, with SIGBUS in a copy."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            os.ftruncate(fd, num_bytes)
    except OSError as error:
        os.unlink(path)
        if error.errno != errno.ENOSPC:
            raise
        directory = os.path.dirname(path)
        free_bytes = shutil.disk_usage(directory).free
        raise OSError(
            errno.ENOSPC,
            f"the shared-memory heap needs {num_bytes / 2**20:.1f} MiB in {directory}, "
            f"{free_bytes / 2**20:.1f} MiB are free: lower slot_bytes or enlarge it (docker: --shm-size)",
        ) from None
    finally:
        os.close(fd)


def _remove_abandoned(directory: str) -> None:
    for name in os.listdir(directory):
        if not name.startswith(_PREFIX):
            continue
        path = os.path.join(directory, name)
        # Not ours to remove, or removed by someone else meanwhile: both are fine.
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_mtime > _ABANDONED_AFTER_S and not _in_use(path):
                os.unlink(path)


def _in_use(path: str) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
