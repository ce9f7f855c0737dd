"""The engine's end of the runtime: starts the control process, and another one if that ends or hangs."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from gfdit.core.commands import StartRequest
from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.policy_guard import HANGING_POLICY_EXIT, was_thinking
from gfdit.runtime.sockets import grant_lease, open_socket, push, received

logger = logging.getLogger("gfdit.client")

ALIVE_INTERVAL_S = 1.0
STEADY_S = 60.0
"""A control process that has lived for as long has come to something, whatever ends it.

One that was killed has, too, if any request has ended by then; not one that has ended by itself: the next one may
go the same way at the same event.
"""
REPLACED = "the control process was replaced meanwhile"
LOADING_S = 60.0
"""How long a control process may take to say its first word: it has to be loaded."""


class RuntimeDownError(RuntimeError):
    """The runtime is down for good; the message says why."""


@dataclass(slots=True)
class FromRuntime:
    """What has come since the last time. ``ended``: the control process has."""

    results: list[msg.Result] = field(default_factory=list)
    from_control: list[msg.ControlMessage] = field(default_factory=list)
    ended: bool = False


class EngineLink(Protocol):
    """The control process, as its parent has it, and the way to it; nothing but ``wait`` and the ends wait."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative if a signal has ended it."""

    def start(self, config: RuntimeConfig) -> None:
        """Start the control process of ``config``, the next one after :meth:`drop`."""

    def wait(self, timeout_s: float) -> FromRuntime:
        """Until something has come, the process has ended, :meth:`wake` was called or the time is over."""

    def tell(self, message: msg.EngineMessage) -> None: ...

    def wake(self) -> None:
        """From any thread."""

    def kill(self) -> None:
        """Returns once it has ended."""

    def drop(self) -> None:
        """Leave a process that has ended, and what it had still to say or to hear."""

    def close(self, grace_s: float) -> None:
        """Have control process and workers end by themselves, or else killed after ``grace_s``; idempotent."""


class ControlClient:
    """Owned by one thread at a time; only :meth:`wake` may be called from any thread.

    Requests that are alive are kept: a control process that takes the place of another is given them again.
    """

    def __init__(
        self, config: RuntimeConfig, link: EngineLink | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._link = link or EngineSockets(config)
        self._clock = clock
        self._alive: dict[str, msg.Submit] = {}
        self._started: set[str] = set()  # those of them that have left the queue
        self._unsent: list[msg.EngineMessage] = []  # while there is nobody to take them
        self._calls: dict[int, int] = {}  # unanswered: to how many ranks
        self._changes: dict[int, msg.Reconfigure] = {}  # unanswered
        self._lost: list[msg.CallDone | msg.Reconfigured] = []  # answers to what went with a control process
        self._ready = False
        self._num_failures = 0  # control processes in a row that came to nothing
        self._start()

    def _start(self) -> None:
        """Start the control process of ``self.config``."""
        self._link.start(self.config)
        self._started_s = self._heard_s = self._checked_s = self._clock()
        self._heard = self._has_served = False
        self._told_s = 0.0

    @property
    def alive(self) -> bool:
        return self._link.returncode is None

    @property
    def pid(self) -> int:
        """Of the control process."""
        return self._link.pid

    def wait_ready(self) -> None:
        """Block until every worker has loaded the model. Raises :class:`RuntimeDownError` if one cannot."""
        deadline_s = self._clock() + self.config.start_timeout_s + 30
        while self._clock() < deadline_s:
            self.receive(1.0)
            if self._ready:
                return
        raise RuntimeDownError("the control process did not become ready in time")

    def send(self, message: msg.EngineMessage) -> None:
        if isinstance(message, msg.Submit):
            self._alive.setdefault(message.request.id, message)
        elif isinstance(message, msg.CallWorkers):
            self._calls[message.call_id] = len(message.ranks)
        if self._heard or not self.config.epoch:
            self._link.tell(message)
        elif not isinstance(message, msg.Submit):
            self._unsent.append(message)

    def change(self, change_id: int, changes: Mapping[str, Any]) -> None:
        """Have the control process, and those that may replace it, go on with other values of its configuration.

        :class:`~messages.Reconfigured` with that id says whether they do. Changes are made one after the other.
        """
        assert not self._changes, "a change is under way"
        message = msg.Reconfigure(change_id, msgspec.structs.replace(self.config, **changes))
        self._changes[change_id] = message
        self.send(message)

    def wake(self) -> None:
        """Make a blocked :meth:`receive` return."""
        self._link.wake()

    def receive(self, timeout_s: float | None) -> list[msg.ControlMessage | msg.Result]:
        """Messages that have arrived, results first; waits for one, for :meth:`wake` or for the timeout.

        A control process that has ended or hangs is replaced meanwhile. Raises :class:`RuntimeDownError` if that
        does not help, and on a fatal message.
        """
        if self._clock() - self._told_s > ALIVE_INTERVAL_S:
            self._told_s = self._clock()
            self._link.tell(msg.Alive())
        longest_s = min(ALIVE_INTERVAL_S, self._silence_s / 4)
        arrived = self._link.wait(longest_s if timeout_s is None else min(timeout_s, longest_s))
        messages: list[msg.ControlMessage | msg.Result] = [*arrived.results, *self._hear(arrived.from_control)]
        if messages or not arrived.ended:
            self._end_if_hanging()
        else:
            self._replace(self._how_it_ended(), self._link.returncode == HANGING_POLICY_EXIT)
        messages += self._lost
        self._lost = []
        return messages

    def _hear(self, messages: list[msg.ControlMessage]) -> list[msg.ControlMessage]:
        for message in messages:
            self._heard_s = self._clock()
            if not self._heard:
                self._heard = True
                self._resubmit()
            match message:
                case msg.Fatal(error):
                    raise RuntimeDownError(error)
                case msg.Ready():
                    self._ready = True
                case msg.CallDone(call_id):
                    self._calls.pop(call_id, None)
                case msg.Reconfigured(change_id, error):
                    change = self._changes.pop(change_id)
                    if not error:
                        self.config = msgspec.structs.replace(change.config, epoch=self.config.epoch)
                case StartRequest(request_id):
                    self._started.add(request_id)
                case _ if isinstance(message, msg.RequestEnd):
                    self._has_served = True
                    self._alive.pop(message.request_id, None)
                    self._started.discard(message.request_id)
        return [message for message in messages if not isinstance(message, (msg.Alive, msg.Ready))]

    # A control process that ends, or hangs

    def _end_if_hanging(self) -> None:
        """It says that it is alive even if nothing happens; before it has said anything it has to be loaded.

        Who was stopped himself has heard nobody, and begins to listen anew.
        """
        now_s, limit_s = self._clock(), self._silence_s
        if now_s - self._checked_s > limit_s / 2:
            self._heard_s = now_s
        self._checked_s = now_s
        if not self._heard:
            limit_s = max(limit_s, LOADING_S)
        if now_s - self._heard_s > limit_s:
            self._link.kill()
            self._replace(f"was silent for {limit_s:g} s", was_thinking(self.config.policy_mark_path))

    @property
    def _silence_s(self) -> float:
        """How long the control process may be silent: as long as its policy may think, and longer."""
        return self.config.control_timeout_s + self.config.policy_timeout_s

    def _how_it_ended(self) -> str:
        code = self._link.returncode
        assert code is not None, "it has ended"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"

    def _replace(self, how: str, hung_in_policy: bool) -> None:
        """Have another control process go on with the workers that are there, and the requests that are alive."""
        config = self.config
        was_steady = self._clock() - self._started_s > STEADY_S
        code = self._link.returncode
        was_killed = code is not None and code < 0 and self._has_served
        self._num_failures = 1 if was_steady or was_killed else self._num_failures + 1
        if not self._ready and not config.epoch:
            raise RuntimeDownError(f"the control process {how} while it started")
        if self._num_failures > config.max_control_restarts:
            raise RuntimeDownError(f"the control process {how}, and so did those before it")
        if hung_in_policy:
            logger.error("policy %r does not come back: first come, first served from now on", config.policy)
            config = msgspec.structs.replace(config, without_policy=True)
        logger.error("the control process %s: another one goes on with %d requests", how, len(self._alive))
        self._link.drop()
        answer = (False, f"{REPLACED}; the call may be made again".encode())
        self._lost += [msg.CallDone(call_id, [answer] * number) for call_id, number in self._calls.items()]
        # What it may have been doing so for a moment is not what the next one begins with.
        self._lost += [
            msg.Reconfigured(change_id, f"{REPLACED}: nothing has changed") for change_id in self._changes
        ]
        self._unsent = [message for message in self._unsent if not isinstance(message, msg.Reconfigure)]
        self._calls.clear()
        self._changes.clear()
        self.config = msgspec.structs.replace(config, epoch=config.epoch + 1)
        self._start()

    def _resubmit(self) -> None:
        """The control process has said its first word: from now on it can be told something.

        If it is the first one there is nothing that it does not know.
        """
        if not self.config.epoch:
            return
        for message in (*self._alive.values(), msg.Resubmitted(tuple(sorted(self._started))), *self._unsent):
            self._link.tell(message)
        self._unsent.clear()

    def close(self, grace_s: float = 20.0) -> None:
        """Stop control process and workers; idempotent."""
        self._link.close(grace_s)


class EngineSockets:
    """An :class:`EngineLink` of ZeroMQ sockets and a child process."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._run_dir = Path(config.run_dir)
        self._context = zmq.Context()
        self._lease = grant_lease(config.lease_path)
        self._results = open_socket(self._context, zmq.PULL, config.address("results"), bind=True)
        self._decode_control = msg.Decoder(msg.ControlMessage)
        self._decode_result = msg.Decoder(msg.Result)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        for source in (self._results, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def start(self, config: RuntimeConfig) -> None:
        self._control = open_socket(self._context, zmq.PAIR, config.engine_address, bind=True)
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
        for source in (self._control, self._process_fd):
            self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_s: float) -> FromRuntime:
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if ended := self._process_fd in ready:
            self._process.wait()
        return FromRuntime(
            received(self._results, self._decode_result), received(self._control, self._decode_control), ended
        )

    def tell(self, message: msg.EngineMessage) -> None:
        push(self._control, message)

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def drop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        for source in (self._control, self._process_fd):
            self._poller.unregister(source)
        self._control.close(linger=0)
        os.close(self._process_fd)

    def close(self, grace_s: float) -> None:
        if self._lease < 0:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        # Workers that no control process has ended end by themselves.
        os.close(self._lease)
        self._lease = -1
        self._context.destroy(linger=0)
        os.close(self._process_fd)
        os.close(self._wake_fd)
        shutil.rmtree(self._run_dir, ignore_errors=True)
