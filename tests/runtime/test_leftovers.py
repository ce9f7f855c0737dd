"""Negative controls of the check that nothing is left behind, and what it does not blame."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from gfdit.comm import SharedMemoryHeap
from gfdit.runtime.config import make_run_dir
from tests.support.leftovers import MEMORY, Leftovers, command_line, nothing_left
from tests.support.waiting import wait_until

RESULTS = "psm_mine"  # what the names of results begin with

# A process that does what its argument says, tells what it has made, and waits for its end.
CODE = """
import socket, subprocess, sys
match sys.argv[1]:
    case "child":
        subprocess.Popen([sys.executable, "-c", "input()"])
        print(flush=True)
    case "run folder":
        from gfdit.runtime.config import make_run_dir
        folder = make_run_dir()
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(f"{folder}/engine")
        print(folder, flush=True)
    case "heap":
        from gfdit.comm import SharedMemoryHeap
        print(SharedMemoryHeap.create(1).path, flush=True)
input()
"""


@contextmanager
def process(work: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """And what it has made, which is removed in the end."""
    argv = [sys.executable, "-c", CODE, work]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        made = Path(running.stdout.readline().strip())
        try:
            yield running, made
        finally:
            running.kill()
            if work == "run folder":
                shutil.rmtree(made)
            elif work == "heap":
                made.unlink()


@contextmanager
def a_child(left: Leftovers) -> Iterator[str]:
    with process("child") as (parent, _):
        left.watch(parent.pid)
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        yield f"process {child.pid}"


@contextmanager
def of_a_killed_process(left: Leftovers, work: str) -> Iterator[str]:
    with process(work) as (maker, made):
        left.watch(maker.pid)
        maker.kill()
        maker.wait()
        yield f"{made}"


def a_run_folder(left: Leftovers) -> AbstractContextManager[str]:
    return of_a_killed_process(left, "run folder")


def a_heap(left: Leftovers) -> AbstractContextManager[str]:
    return of_a_killed_process(left, "heap")


@contextmanager
def a_run_folder_of_this_process(left: Leftovers) -> Iterator[str]:
    folder = make_run_dir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "engine"))
        left.watch(0)  # there is no such process, but the socket is seen
    yield f"{folder}"
    (folder / "engine").unlink()
    folder.rmdir()


@contextmanager
def a_heap_of_this_process(left: Leftovers) -> Iterator[str]:
    heap = SharedMemoryHeap.create(1)
    yield heap.path
    heap.unlink()


@contextmanager
def shared_memory_of_a_result(left: Leftovers) -> Iterator[str]:
    """That its maker has closed, and nobody has taken."""
    made = MEMORY / f"{RESULTS}{os.getpid()}"
    made.touch()
    yield f"{made}"
    made.unlink()


@contextmanager
def a_port(left: Leftovers) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        left.watch(0, port)
        yield f"port {port}"


@contextmanager
def an_open_file(left: Leftovers) -> Iterator[str]:
    with tempfile.TemporaryFile():
        yield "1 open files"


@pytest.mark.parametrize(
    "leave",
    [
        a_child,
        a_run_folder,
        a_heap,
        a_run_folder_of_this_process,
        a_heap_of_this_process,
        shared_memory_of_a_result,
        a_port,
        an_open_file,
    ],
)
def test_what_is_left_is_found(leave: Callable[[Leftovers], AbstractContextManager[str]]) -> None:
    left = Leftovers(RESULTS, own_files=leave is an_open_file)
    with leave(left) as made:
        assert left.found() == [made]
        with pytest.raises(AssertionError, match=f"left behind: {re.escape(made)}"):
            left.assert_none(timeout_s=0.2)
    left.assert_none()


def test_what_others_make_and_leave_is_not_blamed_on_who_did_not() -> None:
    """As tests in other processes do, which run at the same time."""
    with nothing_left(RESULTS) as left, ExitStack() as stack:
        mine, folder = stack.enter_context(process("run folder"))
        left.watch(mine.pid)
        others = [stack.enter_context(process(work)) for work in ("child", "run folder", "heap")]
        result = MEMORY / f"psm_{os.getpid()}"
        result.touch()
        stack.callback(result.unlink)
        assert left.found() == [f"process {mine.pid}", f"{folder}"]
        for other, _ in others:
            other.kill()
            other.wait()
        assert left.found() == [f"process {mine.pid}", f"{folder}"]
        assert all(made.exists() for _, made in others), "there is something to blame"


def test_who_has_ended_and_was_not_waited_for_has_no_command_line() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        wait_until(lambda: "input()" in command_line(process), "it has started")
        child.kill()
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, "it has ended")
        with pytest.raises(psutil.ZombieProcess):
            process.cmdline()
        assert command_line(process) == []
