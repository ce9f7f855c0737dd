"""Negative controls of the check that nothing is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from gfdit.runtime.config import make_run_dir
from tests.support.leftovers import MEMORY, Leftovers, nothing_left


@contextmanager
def a_process(left: Leftovers) -> Iterator[None]:
    """Of a process that has ended, whose child has not."""
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdout.readline()
        left.watch(parent.pid)
        parent.kill()
        yield


@contextmanager
def a_run_folder(left: Leftovers) -> Iterator[None]:
    folder = make_run_dir()
    yield
    folder.rmdir()


@contextmanager
def shared_memory_of_a_result(left: Leftovers) -> Iterator[None]:
    """That its maker has closed, and nobody has taken."""
    made = MEMORY / f"psm_{os.getpid()}"
    made.touch()
    yield
    made.unlink()


@contextmanager
def a_port(left: Leftovers) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left.watch(0, server.getsockname()[1])
        yield


@contextmanager
def an_open_file(left: Leftovers) -> Iterator[None]:
    with tempfile.TemporaryFile():
        yield


@pytest.mark.parametrize("leave", [a_process, a_run_folder, shared_memory_of_a_result, a_port, an_open_file])
def test_what_is_left_is_found(leave: Callable[[Leftovers], AbstractContextManager[None]]) -> None:
    left = Leftovers(own_files=True)
    with leave(left):
        assert left.found()
        with pytest.raises(AssertionError, match="left behind"):
            left.assert_none(timeout_s=0.2)
    left.assert_none()


def test_what_another_server_uses_is_its_own() -> None:
    with nothing_left() as left:
        folder = make_run_dir()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / "engine"))
            assert not left.found()
        (folder / "engine").unlink()
        folder.rmdir()
