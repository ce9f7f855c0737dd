"""What a server or runtime could leave behind when it has ended, and that it has not.

with nothing_left() as left:
    server = start()
    left.watch(server.pid)  # it and all it has started so far; again once it has started more
    stop(server)
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.waiting import HANG_S, wait_until

MEMORY = Path("/dev/shm")
RUNTIME_FILES = "gfdit"  # run folders and heaps begin with it
HEAP = re.compile(r"gfdit-heap-(\d+)-")  # and the process that made it


class Leftovers:
    """Other servers may run on this machine: only what belongs to this process or to one that is watched counts,
    and of shared memory and run folders only what has been made since this was made.

    A file or folder belongs to a process if it is open, mapped or has a bound socket in it when the process is
    watched; a heap is named after who made it. Results travel in shared memory that nobody has open: they count if
    their names begin with one of ``names``.
    """

    def __init__(self, *names: str, own_files: bool = False) -> None:
        """``own_files``: those that this process has open count too, sockets among them."""
        self._names = names
        self._before = _paths()
        self._num_fds = psutil.Process().num_fds() if own_files else None
        self._processes: set[psutil.Process] = set()
        self._pids = {os.getpid()}
        self._used: set[Path] = set()
        self._ports: set[int] = set()

    def watch(self, pid: int, port: int | None = None) -> None:
        """``pid`` and what it has started are to end, and nobody is to listen at ``port``."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            self._processes |= {process, *process.children(recursive=True)}
        if port is not None:
            self._ports.add(port)
        self._pids |= {pid, *(process.pid for process in self._processes)}
        self._used |= {path for own in self._pids for path in _used_by(own)}

    def found(self) -> list[str]:
        """What is left now, in words."""
        found = [f"process {process.pid}" for process in self._processes if _runs(process)]
        found += [f"{path}" for path in sorted(_paths() - self._before) if self._is_own(path)]
        listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        found += [f"port {port}" for port in sorted(self._ports & listening)]
        if self._num_fds is not None and (more := psutil.Process().num_fds() - self._num_fds) > 0:
            found.append(f"{more} open files")
        return found

    def assert_none(self, timeout_s: float = HANG_S) -> None:
        """What is about to end is given the time."""
        try:
            wait_until(lambda: not self.found(), "", timeout_s)
        except AssertionError:
            raise AssertionError(f"left behind: {', '.join(self.found())}") from None

    def _is_own(self, path: Path) -> bool:
        heap = HEAP.match(path.name)
        made_here = int(heap[1]) in self._pids if heap else path in self._used
        return made_here or path.name.startswith(self._names)


@contextmanager
def nothing_left(*names: str, own_files: bool = False) -> Iterator[Leftovers]:
    """Raise ``AssertionError`` if the body leaves anything behind."""
    left = Leftovers(*names, own_files=own_files)
    yield left
    left.assert_none()


def _folders() -> list[Path]:
    return [folder for folder in (MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]


def _paths() -> set[Path]:
    return {path for folder in _folders() for path in folder.iterdir()}


def _used_by(pid: int) -> set[Path]:
    """Run folders and heaps in which a process has something open, mapped or bound; none once it has ended."""
    files, maps = "", ""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                files += f"{os.readlink(file)}\n"
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    bound = [fields[7] for fields in sockets if len(fields) == 8 and f"socket:[{fields[6]}]\n" in files]
    text = "\n".join([maps, files, *bound])
    return {
        folder / name for folder in _folders() for name in re.findall(rf"{folder}/({RUNTIME_FILES}[^/\s]*)", text)
    }


def command_line(process: psutil.Process) -> list[str]:
    """Nothing if it has ended, also if nobody has waited for it yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
