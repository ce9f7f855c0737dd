"""The engine's end of the runtime: starts the control process and exchanges messages with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq

from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.sockets import open_socket, push, received


class RuntimeDownError(RuntimeError):
    """The control process or a worker is gone; the message says why."""


class ControlClient:
    """Owned by one thread at a time; only :meth:`wake` may be called from any thread."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._context = zmq.Context()
        self._control = open_socket(self._context, zmq.PAIR, config.address("engine"), bind=True)
        self._results = open_socket(self._context, zmq.PULL, config.address("results"), bind=True)
        self._decode_control = msg.decoder(msg.ControlMessage)
        self._decode_result = msg.decoder(msg.Result)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        # The write end of this pipe stays open for as long as this process lives: its end of file is how
        # the control process learns that the engine is gone, however it went.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gfdit.runtime.control_process"],
            stdin=subprocess.PIPE,
            start_new_session=False,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config) + b"\n")
        self._process.stdin.flush()
        self._process_fd = os.pidfd_open(self._process.pid)
        self._poller = zmq.Poller()
        for source in (self._control, self._results, self._wake_fd, self._process_fd):
            self._poller.register(source, zmq.POLLIN)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Block until every worker has loaded the model. Raises :class:`RuntimeDownError` if one cannot."""
        deadline_s = time.monotonic() + self.config.start_timeout_s + 30
        while time.monotonic() < deadline_s:
            for message in self.receive(1.0):
                if isinstance(message, msg.Ready):
                    return
        raise RuntimeDownError("the control process did not become ready in time")

    def send(self, message: msg.EngineMessage) -> None:
        push(self._control, message)

    def wake(self) -> None:
        """Make a blocked :meth:`receive` return."""
        os.eventfd_write(self._wake_fd, 1)

    def receive(self, timeout_s: float | None) -> list[msg.ControlMessage | msg.Result]:
        """Messages that have arrived, results first; waits for one, for :meth:`wake` or for the timeout.

        Raises :class:`RuntimeDownError` on a fatal message or when the control process has ended.
        """
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        messages: list[msg.ControlMessage | msg.Result] = received(self._results, self._decode_result)
        messages += received(self._control, self._decode_control)
        for message in messages:
            if isinstance(message, msg.Fatal):
                raise RuntimeDownError(message.error)
        if self._process_fd in ready and not messages:
            raise RuntimeDownError(f"the control process ended with exit code {self._process.wait()}")
        return messages

    def close(self, grace_s: float = 20.0) -> None:
        """Stop control process and workers; idempotent."""
        if self._process_fd < 0:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._context.destroy(linger=0)
        os.close(self._process_fd)
        os.close(self._wake_fd)
        self._process_fd = -1
        shutil.rmtree(Path(self.config.run_dir), ignore_errors=True)
