"""The compute lane of a worker: tasks, calls and edge resets, strictly in the order received."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from gfdit.comm import CommError, GroupFreeComm
from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.commands import LoadComponent, ProbeRank, ResetEdges, RunTask
from gfdit.core.events import (
    ComponentLoaded,
    EdgesReset,
    MemoryMeasured,
    MemoryUse,
    RankProbed,
    TaskDelivering,
    TaskDispatched,
    TaskFailed,
    TaskFinished,
    TaskStarted,
)
from gfdit.runtime import messages as msg
from gfdit.runtime.claims import Claims
from gfdit.runtime.completion import CompletionMonitor
from gfdit.runtime.deliveries import Deliveries
from gfdit.runtime.executor import PeerError, TaskError, TaskExecutor, forget_frames, ran_out_of_memory
from gfdit.runtime.migration_lane import MigrationLane, reset_edges
from gfdit.runtime.sockets import Inbox, Reports

logger = logging.getLogger("gfdit.worker")


class FailedAlongError(Exception):
    """A task was on the device together with one that failed."""


class ComputeLane:
    """Runs tasks on the worker's main thread, which never waits for the device.

    On a device that works by itself, the next task is launched while it is still busy with one before. A task is
    over when the device is done with it and its result, if it has one, is delivered: only then is it reported, and
    its inputs dropped. With ``deliveries`` the rank is reported as free while a result is on its way.
    """

    def __init__(
        self,
        rank: int,
        incarnation: int,
        inbox: Inbox,
        reports: Reports,
        executor: TaskExecutor,
        comm: GroupFreeComm,
        migration: MigrationLane,
        claims: Claims,
        monitor: CompletionMonitor,
        deliveries: Deliveries | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.executor = executor
        self.comm = comm
        self.reports = reports
        self.deliveries = deliveries
        self.made_by = migration.made_by
        self._incarnation = incarnation
        self._inbox = inbox
        self._migration = migration
        self.streams = executor.streams = migration.streams
        self._claims = claims
        self._monitor = monitor
        self._clock = clock
        self._payloads: dict[str, bytes] = {}
        self._generation = 0  # the highest of an edge of this lane
        self._num_points = 0  # of memory, that were told
        # Only the last ones are asked about: what is queued behind a task comes right after it.
        self._failed: deque[int] = deque(maxlen=4)

    def run(self) -> None:
        try:
            while (message := self._inbox.get()) is not None:
                match message:
                    case RunTask():
                        if self._is_to_run(message):
                            self._run(message)
                    case msg.Payloads(dispatch_id, by_request):
                        if dispatch_id >= self._inbox.first_id:
                            self._payloads = by_request
                    case ResetEdges():
                        if message.reset_id >= self._inbox.first_id:
                            self._reset_edges(message)
                    case LoadComponent():
                        if message.load_id >= self._inbox.first_id:
                            self._load(message)
                    case ProbeRank(probe_id):
                        self._monitor.drain()
                        self.reports.tell(RankProbed(probe_id, self.rank, self._probe()))
                    case msg.Call():
                        # It may change what tasks work with: weights, for example.
                        self._monitor.drain()
                        reply = self._call(message)
                        self._tell_memory()
                        self.reports.tell(reply)
                    case msg.Reconnect(first_id):
                        self._reconnect(first_id)
                    case msg.Stop():
                        return
        finally:
            self._monitor.close()
            if self.deliveries is not None:
                self.deliveries.close()

    def has_failed(self, dispatch_id: int | None) -> bool:
        return dispatch_id in self._failed

    def note_failure(self, command: RunTask, error: Exception) -> None:
        """Wake the peers that wait for this rank in a collective, and remember."""
        self._failed.append(command.dispatch_id)
        self.comm.abort(command.layout.ranks)
        self.log_failure(command, error)

    def log_failure(self, command: RunTask, error: Exception) -> None:
        logger.error(
            "rank %d: %s failed at %s",
            self.rank,
            _names(command),
            command.layout,
            exc_info=None if isinstance(error, _CAUSED_BY_PEER) else error,
        )

    def _is_to_run(self, command: RunTask) -> bool:
        """Whether to run a task; one that was queued may have been withdrawn, or not be possible any more."""
        if command.dispatch_id < self._inbox.first_id:
            return False
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
            self.reports.tell(TaskFailed(command.dispatch_id, self.rank, error, caused_by_peer=True))
            return False
        self.reports.tell(msg.TaskSkipped(command.dispatch_id, self.rank))
        return False

    def _run(self, command: RunTask) -> None:
        work = TaskWork(self, command)
        payloads, self._payloads = self._payloads, {}
        moves = [move for move in command.migrations if self.rank in move.ranks]
        reads = {move.artifact: move.streamed for move in moves if move.streamed}
        self.streams.begin(command.dispatch_id, tuple(work.outputs), reads)
        try:
            self._migration.wait_for([move.migration_id for move in moves if not move.streamed])
        except Exception as error:
            work.fail(error)
        self._monitor.begin(work)
        if work.error is None:
            self.made_by.note(work.outputs, command.dispatch_id)
            try:
                work.results = self.executor.execute(command.tasks, command.layout, payloads)
                work.memory = self.executor.memory_use()
                if self.rank == command.layout.ranks[0]:
                    work.views = self.executor.output_views(command.tasks)
            except Exception as error:
                work.fail(error)
        work.stalled_s = self.streams.stalled_s
        self.streams.end("" if work.error is None else "its task has failed")
        self._monitor.end(work)

    def _load(self, command: LoadComponent) -> None:
        """Nothing uses what is dropped: no task of this rank is under way."""
        self._monitor.drain()
        start_s, num_bytes, error = self._clock(), 0, ""
        try:
            num_bytes = self.executor.load_component(command.component, command.evict)
        except Exception as failure:
            logger.exception("rank %d cannot load %s", self.rank, command.component)
            error = f"{type(failure).__name__}: {failure}"
            forget_frames(failure)
        seconds = self._clock() - start_s
        self.reports.tell(ComponentLoaded(command.load_id, self.rank, seconds, num_bytes, error))

    def _reset_edges(self, command: ResetEdges) -> None:
        self._monitor.drain()
        self._generation = max(self._generation, reset_edges(self.comm, command))
        self.reports.tell(EdgesReset(command.reset_id, self.rank))

    def _call(self, call: msg.Call) -> msg.CallReply:
        try:
            return msg.CallReply(call.call_id, self.rank, True, self.executor.call(call.method, call.payload))
        except Exception as error:
            logger.exception("rank %d: call of %s failed", self.rank, call.method)
            return msg.CallReply(call.call_id, self.rank, False, f"{type(error).__name__}: {error}".encode())

    def _probe(self) -> str:
        """What is wrong with this rank, if anything is."""
        try:
            self.executor.probe()
        except Exception as error:
            logger.exception("rank %d fails its probe", self.rank)
            return f"{type(error).__name__}: {error}"
        return ""

    def _reconnect(self, first_id: int) -> None:
        """Both lanes are through with what the last control process wanted: say what has come of it."""
        self._inbox.first_id = max(self._inbox.first_id, first_id)  # the watch may hear of it later
        self._monitor.drain()
        if self.deliveries is not None:
            self.deliveries.drain()
        generation = max(self._generation, self._migration.await_reconnected(first_id))
        held = self.executor.holdings()
        unsound = [one.artifact for one in held if not self.made_by.is_sound(one.artifact)]
        self.executor.free(gone := self.made_by.forget(unsound))  # nobody would, of what is not told
        self.streams.forget(gone)
        sound = tuple(one for one in held if one.artifact not in unsound)
        resident = self.executor.resident()
        self.reports.tell(msg.WorkerReady(self.rank, self._incarnation, first_id, sound, generation, resident))
        self._num_points = 0
        self._tell_memory()

    def _tell_memory(self) -> None:
        """What was measured without being told."""
        if new := self.executor.memory_points()[self._num_points :]:
            self._num_points += len(new)
            self.reports.tell(MemoryMeasured(self.rank, new))


class TaskWork:
    """One dispatch on this rank, from its launch to what is told of it. Either way it is told exactly once."""

    def __init__(self, lane: ComputeLane, command: RunTask) -> None:
        self.error: Exception | None = None
        self.results: Callable[[], dict[str, bytes]] = dict
        self.views: tuple[tuple[str, ArtifactView], ...] = ()
        self.memory: MemoryUse | None = None
        self.outputs = [name for task in command.tasks for name in task.outputs]
        self._lane = lane
        self._command = command
        self.stalled_s = 0.0  # it waited for what is streamed: that is none of its own time
        self._num_failures = lane.comm.num_failures
        self._started_s = self._dispatched_s = 0.0

    def fail(self, error: Exception) -> None:
        self.error = error
        self._lane.made_by.distrust(self.outputs)
        self._lane.note_failure(self._command, error)
        self._reclaim_after(error)

    def _reclaim_after(self, error: Exception) -> None:
        forget_frames(error)
        if ran_out_of_memory(error):
            self._lane.executor.reclaim()

    def started(self, at_s: float) -> None:
        self._started_s = at_s
        self._lane.reports.tell(TaskStarted(self._command.dispatch_id, self._lane.rank))

    def dispatched(self, at_s: float) -> None:
        self._dispatched_s = at_s
        self._lane.reports.tell(TaskDispatched(self._command.dispatch_id, self._lane.rank))

    def finished(self, at_s: float) -> None:
        lane = self._lane
        if self.error is None:
            try:
                self._check()
                if lane.deliveries is None or not self._has_result:
                    self._deliver()
            except Exception as error:
                self.fail(error)
        if self.error is None and lane.deliveries is not None and self._has_result:
            lane.reports.tell(TaskDelivering(self._command.dispatch_id, lane.rank))
            lane.deliveries.put(partial(self._finish_beside, at_s))
        else:
            self._tell(at_s)

    @property
    def _has_result(self) -> bool:
        first = self._lane.rank == self._command.layout.ranks[0]
        return first and any(not task.outputs for task in self._command.tasks)

    def _deliver(self) -> None:
        lane, results = self._lane, self.results
        self.results = dict  # what is delivered need not be kept
        lane.reports.deliver(results())
        consumed = lane.made_by.forget(self._command.consumes)
        lane.executor.free(consumed)
        if lane.streams.any_held:  # it may have been made here, and read as a whole
            lane.streams.forget(consumed)

    def _finish_beside(self, at_s: float) -> None:
        """Peers are at other tasks: a failure is none of theirs."""
        try:
            self._deliver()
        except Exception as error:
            self.error = error
            self._lane.log_failure(self._command, error)
            self._reclaim_after(error)
        self._tell(at_s)

    def _tell(self, at_s: float) -> None:
        lane, command = self._lane, self._command
        if self.error is None:
            seconds = max(0.0, at_s - self._started_s - self.stalled_s)
            lane.reports.tell(
                TaskFinished(
                    command.dispatch_id, lane.rank, seconds, self.views, self._dispatched_s, at_s, self.memory
                )
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

    def _failure(self, error: Exception) -> TaskFailed:
        command, rank = self._command, self._lane.rank
        known = isinstance(error, TaskError)
        text = str(error) if known else f"{_names(command)} failed on rank {rank}: {type(error).__name__}: {error}"
        status_code, culprit = (error.status_code, error.culprit) if isinstance(error, TaskError) else (500, None)
        by_peer = isinstance(error, _CAUSED_BY_PEER)
        return TaskFailed(command.dispatch_id, rank, text, status_code, by_peer, ran_out_of_memory(error), culprit)


# What says nothing about the task itself: it may run again.
_CAUSED_BY_PEER = (CommError, FailedAlongError, PeerError)


def _names(command: RunTask) -> str:
    return ", ".join(task.id for task in command.tasks)
