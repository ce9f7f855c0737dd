"""Locks that free themselves when their holder dies, between all processes of a host: ``flock`` on a file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.001


class FileLock:
    """Held until :meth:`close`; also by the threads of one process against each other."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, path: Path, *, shared: bool = False, create: bool = True) -> FileLock | None:
        """At once or not at all: None if another holds it, or if there is no file and none is to be made.

        A lock on a file that was removed meanwhile locks nothing, so the name must still lead to the file.
        """
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            except FileNotFoundError:
                if create:
                    raise
                return None
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return cls(fd)
                os.close(fd)
            except BlockingIOError:
                os.close(fd)
                return None
            except FileNotFoundError:
                os.close(fd)
            except BaseException:
                os.close(fd)
                raise

    @staticmethod
    def keep(fd: int) -> None:
        """Lock a file that nobody else has, until ``fd`` is closed."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Wait for ``path``'s lock. Raises ``TimeoutError`` if another process keeps it: one that was stopped, say."""
    give_up_s = time.monotonic() + timeout_s
    while (lock := FileLock.take(path)) is None:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"another process has held {path} for {timeout_s:g} s")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.close()
