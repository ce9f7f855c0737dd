"""Commands of the control plane on their way out: to the ranks' queues and to the engine."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from gfdit.core import ControlPlane
from gfdit.core import commands as cmd
from gfdit.runtime import messages as msg
from gfdit.runtime.claims import Claims
from gfdit.runtime.rank_queues import RankQueues
from gfdit.runtime.sockets import push
from gfdit.runtime.task_timeline import TaskTimeline
from gfdit.runtime.time_limits import TimeLimits

logger = logging.getLogger("gfdit.control")


class CommandSender:
    """Sends each command where it belongs, in the order given; nothing here waits.

    ``wake_at_s`` is when the policy wants to be asked. ``withdrawn`` are dispatches that were taken back in time,
    of which the control plane has still to hear. ``payloads`` of requests go with their first tasks.
    """

    def __init__(
        self,
        plane: ControlPlane,
        engine: zmq.Socket,
        queues: RankQueues,
        claims: Claims,
        limits: TimeLimits,
        timeline: TaskTimeline | None,
    ) -> None:
        self.payloads: dict[str, bytes] = {}
        self.withdrawn: deque[int] = deque()
        self.wake_at_s: float | None = None
        self._plane = plane
        self._engine = engine
        self._queues = queues
        self._claims = claims
        self._limits = limits
        self._timeline = timeline
        self._to_come: dict[int, set[int]] = {}  # of queued dispatches: ranks that have not come to them
        self._senders: dict[type, Callable[[Any], None]] = {
            cmd.RunTask: self._run,
            cmd.WithdrawTask: self._withdraw,
            cmd.Migrate: self._migrate,
            cmd.FreeArtifacts: self._free,
            cmd.ResetEdges: self._reset,
            cmd.StartRequest: lambda c: self.tell(msg.Started(c.request_id, c.queue_wait_s)),
            cmd.CompleteRequest: lambda c: self.end(msg.Ended(c.request_id, "completed")),
            cmd.CancelRequest: lambda c: self.end(msg.Ended(c.request_id, "cancelled")),
            cmd.FailRequest: lambda c: self.end(msg.Ended(c.request_id, "failed", c.error, c.status_code)),
            cmd.RejectRequest: lambda c: self.end(
                msg.Ended(c.request_id, "rejected", c.reason, 429, c.retry_after_s)
            ),
            cmd.ReportFault: lambda c: logger.error("%s", c.message),
            cmd.WakeAt: self._set_wake,
        }

    def send(self, command: cmd.Command) -> None:
        self._senders[type(command)](command)

    def tell(self, message: msg.ControlMessage) -> None:
        push(self._engine, message)

    def end(self, message: msg.Ended) -> None:
        self.payloads.pop(message.request_id, None)
        self.tell(message)

    def passed(self, dispatch_id: int, rank: int) -> None:
        """A rank has a dispatch behind it; after the last one, nobody asks any more whether it runs."""
        if (to_come := self._to_come.get(dispatch_id)) is not None:
            to_come.discard(rank)
            if not to_come:
                del self._to_come[dispatch_id]
                self._claims.forget(dispatch_id)

    def lose(self, rank: int) -> None:
        """``rank`` will not come to anything any more."""
        for dispatch_id in list(self._to_come):
            self.passed(dispatch_id, rank)

    def _run(self, command: cmd.RunTask) -> None:
        now_s = time.monotonic()
        if self._timeline is not None:
            self._timeline.sent(command, now_s)
        record = self._plane.state.dispatches[command.dispatch_id]
        self._limits.emitted(record, record.expected_s or record.ends_s - now_s)
        if command.after is not None:
            self._to_come[command.dispatch_id] = set(command.layout.ranks)
        roots = [task.request_id for task in command.tasks if not task.inputs]
        payloads = {request_id: self.payloads[request_id] for request_id in roots}
        data = msg.encode(msg.Run(command, payloads))
        for rank in command.layout.ranks:
            self._queues.send("compute", rank, data)

    def _withdraw(self, command: cmd.WithdrawTask) -> None:
        if self._claims.withdraw(command.dispatch_id):
            self.withdrawn.append(command.dispatch_id)

    def _migrate(self, command: cmd.Migrate) -> None:
        if self._timeline is not None:
            self._timeline.sent_copy(command)
        data = msg.encode(msg.Move(command))
        for rank in command.ranks:
            self._queues.send("migration", rank, data)

    def _free(self, command: cmd.FreeArtifacts) -> None:
        data = msg.encode(msg.Free(command))
        for rank in command.ranks:
            self._queues.send("migration", rank, data)

    def _reset(self, command: cmd.ResetEdges) -> None:
        data = msg.encode(msg.Reset(command))
        for rank in command.ranks:
            self._queues.send(command.lane, rank, data)

    def _set_wake(self, command: cmd.WakeAt) -> None:
        self.wake_at_s = command.at_s
