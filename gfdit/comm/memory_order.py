"""Release and acquire order for plain loads and stores of memory shared between processes.

Python offers no atomics. On a total-store-order machine (x86_64) none are needed: a store is never seen
before an earlier store, nor a load satisfied before an earlier load, and each interpreter instruction is an
opaque barrier to the compiler. Elsewhere one call gives a full fence, which is stronger than both:

- Linux: ``membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)``, which fences the caller as well as every running
  thread of the registered processes (Linux 4.16 or newer);
- macOS: ``OSMemoryBarrier``.

``memory_fence()`` returns None where no fence is needed, so callers pay nothing there.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

_TOTAL_STORE_ORDER = frozenset({"x86_64", "amd64", "i686", "i386"})
_SYS_MEMBARRIER = {"aarch64": 283, "arm64": 283, "riscv64": 283, "ppc64le": 365}
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2


def memory_fence(machine: str | None = None, system: str | None = None) -> Callable[[], object] | None:
    """A full fence for this machine, or None where ordinary accesses are ordered enough.

    Raises RuntimeError when the machine needs a fence and offers none we know.
    """
    machine = (machine or platform.machine()).lower()
    system = system or sys.platform
    if machine in _TOTAL_STORE_ORDER:
        return None
    if system == "darwin":
        barrier = ctypes.CDLL(None).OSMemoryBarrier
        barrier.argtypes, barrier.restype = [], None
        return barrier
    if system.startswith("linux") and machine in _SYS_MEMBARRIER:
        return _membarrier(_SYS_MEMBARRIER[machine])
    raise RuntimeError(f"no memory fence known for {system} on {machine}: the shared-memory heap needs one")


def _membarrier(number: int) -> Callable[[], object]:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes, syscall.restype = [ctypes.c_long, ctypes.c_long, ctypes.c_long], ctypes.c_long
    if syscall(number, _REGISTER_GLOBAL_EXPEDITED, 0) != 0:
        raise RuntimeError("membarrier is not available (Linux 4.16 or newer is needed on this machine)")
    return lambda: syscall(number, _GLOBAL_EXPEDITED, 0)
