"""Processes forked from one that has imported vLLM-Omni already, and calls to what lives in them.

Importing vLLM-Omni takes several seconds, forking a process that has done so almost nothing. The fork server of
``multiprocessing`` is one for a whole process and cannot change what it has imported; this one belongs to who
starts it.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

PRELOAD = "gfdit.omni.preload"
_START = """
import sys
sys.path[:] = {path!r}
from gfdit.adapters.testing.processes import serve_forks
serve_forks({fd}, {preload!r})
"""
_MAKE = ""  # the method name of a child's first call: make the service
_EXIT_S = 5.0
_LOG_TAIL_BYTES = 4000


class ChildError(RuntimeError):
    """A call failed in another process, or the process ended; the text says where, with its traceback."""


class ForkServer:
    """A process that has imported ``preload`` and forks children on demand. Close it after its children."""

    def __init__(self, preload: str = PRELOAD) -> None:
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the server
        self._socket, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=path, fd=theirs.fileno(), preload=preload)],
                pass_fds=[theirs.fileno()],
                # Several ranks share a core; what torch computes must not depend on how many there are.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def start(self, name: str, service: Callable[..., Any], *args: Any) -> Child:
        """A child that makes ``service(*args)`` and answers calls of its methods; returns at once.

        Both are pickled: by reference what is importable there, as here.
        """
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            try:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
            except OSError as error:
                raise ChildError(f"the fork server has ended:\n{self.log_tail()}") from error
        child = Child(name, ours, self)
        child.post(_MAKE, service, *args)
        return child

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The value of ``fn(*args)`` in a child of its own."""
        child = self.start(getattr(fn, "__name__", str(fn)), _Nothing)
        try:
            return child.call("run", fn, *args)
        finally:
            child.close()

    def log_tail(self) -> str:
        """The end of what server and children have printed."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Child:
    """The parent's side of one forked process. Calls are answered in order."""

    def __init__(self, name: str, pipe: Connection, server: ForkServer) -> None:
        self.name = name
        self._pipe = pipe
        self._server = server
        self._num_pending = 0

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Raises :class:`ChildError` with what an unanswered call raised, its constructor among them."""
        while self._num_pending:
            self.collect(timeout_s)

    def call(self, method: str, *args: Any, timeout_s: float = 300.0) -> Any:
        self.wait_ready()
        self.post(method, *args)
        return self.collect(timeout_s)

    def post(self, method: str, *args: Any) -> None:
        """Begin a call; :meth:`collect` has its answer."""
        try:
            self._pipe.send_bytes(pickle.dumps((method, args)))
        except OSError:
            raise self._ended() from None
        self._num_pending += 1

    def collect(self, timeout_s: float = 300.0) -> Any:
        """The answer to the oldest call. Raises :class:`ChildError` for what it raised, or for no answer."""
        try:
            if not self._pipe.poll(timeout_s):
                raise ChildError(f"{self.name}: no answer in {timeout_s:g} s")
            ok, value = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        self._num_pending -= 1
        if not ok:
            raise ChildError(f"{self.name}: {value}")
        return value

    def close(self) -> None:
        """Let it end: once it is idle, and a few seconds later in any case."""
        self._pipe.close()

    def _ended(self) -> ChildError:
        return ChildError(f"{self.name} has ended; the last it said:\n{self._server.log_tail()}")


class _Nothing:
    """A service for single calls."""

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)


def serve_forks(fd: int, preload: str) -> NoReturn:
    """Main function of the fork server's process; ends when its parent closes the socket ``fd``, or dies."""
    importlib.import_module(preload)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child: its pipe says when it has ended
    with socket.socket(fileno=fd) as requests:
        while True:
            data, fds, *_ = socket.recv_fds(requests, 1, 1)
            if not data:
                os._exit(0)  # what was imported may want to wait for something at exit
            if os.fork() == 0:
                requests.close()
                _serve_calls(Connection(fds[0]))
            os.close(fds[0])


def _serve_calls(pipe: Connection) -> NoReturn:
    """Main function of a child."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, args=(pipe.fileno(),), daemon=True).start()
    service: Any = None

    def answer(data: bytes) -> Any:
        nonlocal service
        method, args = pickle.loads(data)
        if method != _MAKE:
            return getattr(service, method)(*args)
        make, *rest = args
        service = make(*rest)

    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                data = pipe.recv_bytes()
                try:
                    reply = pickle.dumps((True, answer(data)))
                except Exception as error:
                    reply = pickle.dumps((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
                pipe.send_bytes(reply)
        if hasattr(service, "close"):
            service.close()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _exit_with_parent(fd: int) -> None:
    """Whoever is stuck in a call when the parent leaves has a few seconds to end by himself."""
    gone = select.poll()
    gone.register(fd, 0)  # only that the other end is closed
    gone.poll()
    time.sleep(_EXIT_S)
    os._exit(1)
