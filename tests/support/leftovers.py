"""What a server or runtime could leave behind when it has ended, and that it has not.

with nothing_left() as left:
    server = start()
    left.watch(server.pid)  # it and all it has started so far; again once it has started more
    stop(server)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
OWN_NAMES = ("gfdit", "psm_")  # of run folders and heaps; of Python's shared memory, in which results travel


class Leftovers:
    """Everything is compared with how it was when this was made.

    Shared memory and run folders count only if no living process uses them: other servers may run on this machine.
    """

    def __init__(self, *, own_files: bool = False) -> None:
        """``own_files``: those that this process has open count too, sockets among them."""
        self._paths = _own_paths()
        self._num_fds = psutil.Process().num_fds() if own_files else None
        self._processes: set[psutil.Process] = set()
        self._ports: set[int] = set()

    def watch(self, pid: int, port: int | None = None) -> None:
        """``pid`` and what it has started are to end, and nobody is to listen at ``port``."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            self._processes |= {process, *process.children(recursive=True)}
        if port is not None:
            self._ports.add(port)

    def found(self) -> list[str]:
        """What is left now, in words."""
        found = [f"process {process.pid}" for process in self._processes if _runs(process)]
        found += [f"{path}" for path in sorted(_own_paths() - self._paths) if not _is_used(path)]
        listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        found += [f"port {port}" for port in sorted(self._ports & listening)]
        if self._num_fds is not None and (more := psutil.Process().num_fds() - self._num_fds) > 0:
            found.append(f"{more} open files")
        return found

    def assert_none(self, timeout_s: float = 15.0) -> None:
        """What is about to end is given the time."""
        deadline_s = time.monotonic() + timeout_s
        while found := self.found():
            assert time.monotonic() < deadline_s, f"left behind: {', '.join(found)}"
            time.sleep(0.1)


@contextmanager
def nothing_left(*, own_files: bool = False) -> Iterator[Leftovers]:
    """Raise ``AssertionError`` if the body leaves anything behind."""
    left = Leftovers(own_files=own_files)
    yield left
    left.assert_none()


def _own_paths() -> set[Path]:
    folders = {MEMORY, Path(tempfile.gettempdir())}
    return {path for folder in folders if folder.is_dir() for path in folder.iterdir() if _is_own(path)}


def _is_own(path: Path) -> bool:
    return path.name.startswith(OWN_NAMES)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_used(path: Path) -> bool:
    """Whether some process has it open or mapped, or a socket bound in it."""
    name = str(path)
    if name in Path("/proc/net/unix").read_text():
        return True
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name in (process / "maps").read_text():
                return True
            if any(os.readlink(fd).startswith(name) for fd in (process / "fd").iterdir()):
                return True
    return False
