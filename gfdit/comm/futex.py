"""Sleeping until a 32-bit word of shared memory changes, without burning a core.

``Futex`` uses the Linux system call on words shared between processes; ``SleepWaiter`` is the portable
stand-in that polls with a growing sleep. Both may return early for any reason: callers re-check their
condition and bound every call, which is also what covers a wake-up that came just before the sleep.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import time
from typing import Protocol

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1


class Waiter(Protocol):
    def wait(self, address: int, value: int, timeout_s: float, attempt: int) -> None:
        """Sleep while the word at ``address`` equals the low 32 bits of ``value``, at most ``timeout_s``.

        ``attempt`` counts the sleeps of one logical wait, for implementations that back off.
        """

    def wake(self, address: int) -> None:
        """Wake every sleeper on the word at ``address``; called after the word was written."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Linux futex on process-shared words. ctypes releases the GIL, so other threads run meanwhile."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint32,
        ]

    def wait(self, address: int, value: int, timeout_s: float, attempt: int) -> None:
        seconds = int(timeout_s)
        limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
        self._syscall(self._number, address, _FUTEX_WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)

    def wake(self, address: int) -> None:
        self._syscall(self._number, address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)

    def is_available(self) -> bool:
        """False where the system call is missing or filtered out by a sandbox."""
        word = ctypes.c_uint32(0)
        result = self._syscall(self._number, ctypes.addressof(word), _FUTEX_WAKE, 1, None, None, 0)
        return result >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)


class SleepWaiter:
    """Polls: 50 us at first, doubling up to 2 ms, so that a long wait costs next to nothing."""

    def wait(self, address: int, value: int, timeout_s: float, attempt: int) -> None:
        time.sleep(min(timeout_s, 50e-6 * 2 ** min(attempt, 5), 2e-3))

    def wake(self, address: int) -> None:
        pass


def default_waiter() -> Waiter:
    """The futex where there is one, else polling."""
    number = _SYS_FUTEX.get(platform.machine())
    # Words are 8 bytes and the futex is their low half, which comes first on little-endian machines only.
    if sys.platform.startswith("linux") and sys.byteorder == "little" and number is not None:
        futex = Futex(number)
        if futex.is_available():
            return futex
    return SleepWaiter()
