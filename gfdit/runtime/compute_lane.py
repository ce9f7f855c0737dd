"""The compute lane of a worker: tasks, calls and edge resets, strictly in the order received."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import zmq

from gfdit.comm import CommError, GroupFreeComm
from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.commands import RunTask
from gfdit.runtime import messages as msg
from gfdit.runtime.claims import Claims
from gfdit.runtime.completion import make_monitor
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.executor import PeerError, TaskError, TaskExecutor
from gfdit.runtime.lanes import MigrationLane, reset_edges
from gfdit.runtime.sockets import open_socket, push, wait_for_command

logger = logging.getLogger("gfdit.worker")


class FailedAlongError(Exception):
    """A task was on the device together with one that failed."""


class Reports:
    """What a lane tells the control process and the engine, from the lane's thread and its monitor's."""

    def __init__(self, events: zmq.Socket, results: zmq.Socket) -> None:
        self._lock = threading.Lock()
        self._events = events
        self._results = results

    def tell(self, message: msg.WorkerMessage) -> None:
        with self._lock:
            push(self._events, message)

    def deliver(self, results: dict[str, bytes]) -> None:
        with self._lock:
            for request_id, value in results.items():
                push(self._results, msg.Result(request_id, value))


class ComputeLane:
    """Runs tasks on the worker's main thread, which never waits for the device.

    On a device that works by itself, the next task is launched while it is still busy with one before. A task is
    over when the device is done with it: only then is it reported, and its inputs dropped.
    """

    def __init__(
        self,
        rank: int,
        config: RuntimeConfig,
        context: zmq.Context,
        events: zmq.Socket,
        executor: TaskExecutor,
        comm: GroupFreeComm,
        migration: MigrationLane,
    ) -> None:
        self.rank = rank
        self.executor = executor
        self.comm = comm
        self.reports = Reports(events, open_socket(context, zmq.PUSH, config.address("results")))
        self.made_by = migration.made_by
        self._migration = migration
        self._commands = open_socket(context, zmq.PULL, config.rank_address("compute", rank))
        self._decode = msg.decoder(msg.ComputeMessage)
        self._claims = Claims(config.claims_dir)
        self._monitor = make_monitor(executor.device)
        # Only the last ones are asked about: what is queued behind a task comes right after it.
        self._failed: deque[int] = deque(maxlen=4)

    def run(self) -> None:
        try:
            while (data := wait_for_command(self._commands)) is not None:
                match self._decode.decode(data):
                    case msg.Run() as run:
                        if self._is_to_run(run.command):
                            self._run(run)
                    case msg.Reset(command):
                        self._monitor.drain()
                        reset_edges(self.comm, command)
                        self.reports.tell(msg.ResetDone(command.reset_id, self.rank))
                    case msg.Call() as call:
                        # It may change what tasks work with: weights, for example.
                        self._monitor.drain()
                        self.reports.tell(self._call(call))
                    case msg.Stop():
                        return
        finally:
            self._monitor.close()

    def has_failed(self, dispatch_id: int | None) -> bool:
        return dispatch_id in self._failed

    def note_failure(self, command: RunTask, error: Exception) -> None:
        """Wake the peers that wait for this rank in a collective, and remember."""
        self._failed.append(command.dispatch_id)
        self.comm.abort(command.layout.ranks)
        logger.error(
            "rank %d: %s failed at %s",
            self.rank,
            _names(command),
            command.layout,
            exc_info=None if isinstance(error, _CAUSED_BY_PEER) else error,
        )

    def _is_to_run(self, command: RunTask) -> bool:
        """Whether to run a task; one that was queued may have been withdrawn, or not be possible any more."""
        if command.after is None:
            return True
        if not self.has_failed(command.after):
            if self._claims.begin(command.dispatch_id):
                return True
        elif not self._claims.withdraw(command.dispatch_id):
            # A peer that was through with the task before has begun this one, and waits for this rank.
            self._failed.append(command.dispatch_id)
            self.comm.abort(command.layout.ranks)
            error = f"{_names(command)} cannot run on rank {self.rank}: the task before it failed there"
            self.reports.tell(msg.RunFailed(command.dispatch_id, self.rank, error, 500, caused_by_peer=True))
            return False
        self.reports.tell(msg.RunSkipped(command.dispatch_id, self.rank))
        return False

    def _run(self, run: msg.Run) -> None:
        command = run.command
        work = TaskWork(self, command)
        try:
            own = [move.migration_id for move in command.migrations if self.rank in move.ranks]
            self._migration.wait_for(own)
        except Exception as error:
            work.fail(error)
        self._monitor.begin(work)
        if work.error is None:
            outputs = [name for task in command.tasks for name in task.outputs]
            self.made_by.note(outputs, command.dispatch_id)
            try:
                work.results = self.executor.execute(command.tasks, command.layout, run.payloads)
                if self.rank == command.layout.ranks[0]:
                    work.views = self.executor.output_views(command.tasks)
            except Exception as error:
                work.fail(error)
        self._monitor.end(work)

    def _call(self, call: msg.Call) -> msg.CallReply:
        try:
            return msg.CallReply(call.call_id, self.rank, True, self.executor.call(call.method, call.payload))
        except Exception as error:
            logger.exception("rank %d: call of %s failed", self.rank, call.method)
            return msg.CallReply(call.call_id, self.rank, False, f"{type(error).__name__}: {error}".encode())


class TaskWork:
    """One dispatch on this rank, from its launch to its report."""

    def __init__(self, lane: ComputeLane, command: RunTask) -> None:
        self.error: Exception | None = None
        self.results: Callable[[], dict[str, bytes]] = dict
        self.views: tuple[tuple[str, ArtifactView], ...] = ()
        self._lane = lane
        self._command = command
        self._num_failures = lane.comm.num_failures
        self._started_s = self._dispatched_s = 0.0

    def fail(self, error: Exception) -> None:
        self.error = error
        self._lane.note_failure(self._command, error)

    def started(self, at_s: float) -> None:
        self._started_s = at_s
        self._lane.reports.tell(msg.RunStarted(self._command.dispatch_id, self._lane.rank, at_s))

    def dispatched(self, at_s: float) -> None:
        self._dispatched_s = at_s
        self._lane.reports.tell(msg.RunDispatched(self._command.dispatch_id, self._lane.rank, at_s))

    def finished(self, at_s: float) -> None:
        lane, command = self._lane, self._command
        if self.error is None:
            try:
                self._check()
                lane.reports.deliver(self.results())
                lane.executor.free(lane.made_by.forget(command.consumes))
            except Exception as error:
                self.fail(error)
        if self.error is None:
            lane.reports.tell(
                msg.RunDone(command.dispatch_id, lane.rank, self._dispatched_s, self._started_s, at_s, self.views)
            )
        else:
            lane.reports.tell(self._failure(self.error))

    def broke(self, error: Exception) -> None:
        self.fail(self.error or error)
        self._lane.reports.tell(self._failure(self.error or error))

    def _check(self) -> None:
        """Raise what the device has run into since the launch, even if that was raised elsewhere already.

        The launch of the next task raises it too, if it comes first; then which of the two tasks it was is open,
        and neither may pass for done.
        """
        self._lane.comm.check()
        if self._lane.comm.num_failures != self._num_failures or self._lane.has_failed(self._command.after):
            raise FailedAlongError(
                f"{_names(self._command)} ran while a collective of rank {self._lane.rank} failed"
            )

    def _failure(self, error: Exception) -> msg.RunFailed:
        command, rank = self._command, self._lane.rank
        known = isinstance(error, TaskError)
        text = str(error) if known else f"{_names(command)} failed on rank {rank}: {type(error).__name__}: {error}"
        status_code = error.status_code if isinstance(error, TaskError) else 500
        return msg.RunFailed(command.dispatch_id, rank, text, status_code, isinstance(error, _CAUSED_BY_PEER))


# What says nothing about the task itself: it may run again.
_CAUSED_BY_PEER = (CommError, FailedAlongError, PeerError)


def _names(command: RunTask) -> str:
    return ", ".join(task.id for task in command.tasks)
