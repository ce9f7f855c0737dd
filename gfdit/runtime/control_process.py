"""The control process: drives the control plane from sockets, one thread, no polling.

Started by the engine as ``python -m gfdit.runtime.control_process`` with its :class:`RuntimeConfig` on standard
input. End of file there means that the engine has closed or is gone, and everything stops.
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from gfdit.core import ControlPlane, RankRecord, Request, TaskGraph
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost_table import CostTable, NominalCostModel, TableCostModel
from gfdit.core.policy_loading import load_policy
from gfdit.observe.recording import RecordingHeader, RecordingWriter
from gfdit.observe.timeline import TimelineWriter
from gfdit.runtime import messages as msg
from gfdit.runtime.calls import PendingCalls
from gfdit.runtime.claims import Claims
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.policy_guard import GuardedPolicy
from gfdit.runtime.rank_queues import RankQueues
from gfdit.runtime.sockets import open_socket, push, received
from gfdit.runtime.supervisor import Supervisor, WorkerDiedError
from gfdit.runtime.time_limits import TimeLimits
from gfdit.runtime.usage import UsageReports

logger = logging.getLogger("gfdit.control")


class ControlProcess:
    """Sockets, clock and workers around one :class:`ControlPlane`."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        costs = None if config.costs_path is None else CostTable.load(config.costs_path)
        policy = load_policy(config.policy, config.policy_args, config.admission)
        self.plane = ControlPlane(
            GuardedPolicy(policy, config.policy_timeout_s),
            [RankRecord(rank, frozenset({config.model})) for rank in range(config.num_ranks)],
            NominalCostModel() if costs is None else TableCostModel(costs),
            run_ahead=config.run_ahead,
            max_retries=config.max_retries,
            checkpoint_every_steps=config.checkpoint_every_steps,
            max_artifact_bytes=config.max_artifact_bytes,
        )
        self._usage = UsageReports(self.plane, config.num_ranks)
        self.timeline = TimelineWriter(config.timeline_path, config.num_ranks) if config.timeline_path else None
        self.recording = _open_recording(config, costs)
        self._context = zmq.Context()
        self._engine = open_socket(self._context, zmq.PAIR, config.address("engine"))
        self._events = open_socket(self._context, zmq.PULL, config.address("events"), bind=True)
        self._queues = RankQueues(self._context, config)
        self._decode_engine = msg.decoder(msg.EngineMessage)
        self._decode_worker = msg.decoder(msg.WorkerMessage)
        self._supervisor = Supervisor(config)
        self._limits = TimeLimits(config, time.monotonic)
        self._poller = zmq.Poller()
        self._payloads: dict[str, bytes] = {}
        Path(config.claims_dir).mkdir()
        self._claims = Claims(config.claims_dir)
        self._withdrawn: deque[int] = deque()  # dispatches that the control plane has still to hear of
        self._to_come: dict[int, set[int]] = {}  # of queued dispatches: ranks that have not come to them
        self._running: dict[int, _Emitted] = {}
        self._moving: dict[int, cmd.Migrate] = {}
        self._calls = PendingCalls()
        self._wake_at_s: float | None = None
        self._stopping = False
        self._worker_ended = False
        self._failed = False
        self._emitters: dict[type, Callable[[Any], None]] = {
            cmd.RunTask: self._emit_run,
            cmd.WithdrawTask: self._emit_withdraw,
            cmd.Migrate: self._emit_migrate,
            cmd.FreeArtifacts: self._emit_free,
            cmd.ResetEdges: self._emit_reset,
            cmd.StartRequest: lambda c: self._tell(msg.Started(c.request_id, c.queue_wait_s)),
            cmd.CompleteRequest: lambda c: self._end(msg.Ended(c.request_id, "completed")),
            cmd.CancelRequest: lambda c: self._end(msg.Ended(c.request_id, "cancelled")),
            cmd.FailRequest: lambda c: self._end(msg.Ended(c.request_id, "failed", c.error, c.status_code)),
            cmd.RejectRequest: lambda c: self._end(
                msg.Ended(c.request_id, "rejected", c.reason, 429, c.retry_after_s)
            ),
            cmd.ReportFault: lambda c: logger.error("%s", c.message),
            cmd.WakeAt: self._set_wake,
        }

    # Life

    def run(self) -> None:
        """Start the workers, then serve until the engine says stop or goes away."""
        try:
            for source in (self._engine, self._events, sys.stdin.fileno()):
                self._poller.register(source, zmq.POLLIN)
            for rank in range(self.config.num_ranks):
                self._start_worker(rank)
            self._await_workers()
            self._tell(msg.Ready())
            self._serve()
        except WorkerDiedError as error:
            logger.error("%s", error)
            self._failed = True
            self._tell(msg.Fatal(str(error)))
        except Exception as error:
            logger.exception("the control process fails")
            self._failed = True
            self._tell(msg.Fatal(f"control process: {type(error).__name__}: {error}"))
        finally:
            self._shut_down()

    def _await_workers(self) -> None:
        waiting = set(range(self.config.num_ranks))
        deadline_s = time.monotonic() + self.config.start_timeout_s
        while waiting and not self._stopping:
            if time.monotonic() > deadline_s:
                raise WorkerDiedError(
                    f"workers {sorted(waiting)} not ready after {self.config.start_timeout_s:.0f} s"
                )
            self._wait(1.0)
            for message in received(self._events, self._decode_worker):
                if isinstance(message, msg.WorkerFailed):
                    raise WorkerDiedError(f"worker {message.rank} failed to start: {message.error}")
                if isinstance(message, msg.WorkerReady):
                    self._supervisor.hear(message.rank, message.incarnation, ready=True)
                    self._queues.await_connected(message.rank)
                    waiting.discard(message.rank)
            if ended := self._supervisor.ended():
                raise WorkerDiedError("; ".join(f"rank {rank}: {how}" for rank, how in ended.items()))
            self._take_engine_messages()

    def _serve(self) -> None:
        while not self._stopping:
            looks_ahead = self.plane.wants_to_look_ahead
            self._wait(0.0 if looks_ahead else self._seconds_to_wake())
            ended = self._supervisor.ended() if self._worker_ended else {}
            messages = received(self._events, self._decode_worker)
            for message in messages:
                self._on_worker(message)
            # After what they had still to say.
            for rank, how in (self._limits.overdue() | self._supervisor.silent() | ended).items():
                self._lose_worker(rank, how)
            self._take_engine_messages()
            if looks_ahead and not messages:
                self._feed(ev.LookAhead())
            if self.plane.idle:
                self.plane.check_integrity()
            if self._wake_at_s is not None and time.monotonic() >= self._wake_at_s:
                self._wake_at_s = None
                self._feed(ev.WakeUp())
            if report := self._usage.due():
                self._tell(report)

    def _shut_down(self) -> None:
        self._queues.stop()
        # After a failure its peers may sit in a collective until their time-out.
        self._supervisor.stop(grace_s=1.0 if self._failed else 10.0)
        if self.timeline is not None:
            self.timeline.close()
        if self.recording is not None:
            self.recording.close()
        self._context.destroy(linger=500)
        # The engine does this too, unless it was killed.
        shutil.rmtree(self.config.run_dir, ignore_errors=True)

    # Waiting

    def _wait(self, timeout_s: float | None) -> None:
        """Sleep until a socket, a worker's end, the engine's end or the timeout."""
        # Rounded up: waking a moment early would only mean another round.
        ready = dict(self._poller.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))))
        self._stopping |= sys.stdin.fileno() in ready
        self._worker_ended = not ready.keys().isdisjoint(self._supervisor.sentinels)

    def _seconds_to_wake(self) -> float:
        """Until the policy wants to be asked, and not longer than a worker may be silent unnoticed."""
        until_check_s = self.config.heartbeat_timeout_s / 10
        return until_check_s if self._wake_at_s is None else min(self._wake_at_s - time.monotonic(), until_check_s)

    # Workers that come and go

    def _start_worker(self, rank: int) -> None:
        self._supervisor.start(rank)
        self._poller.register(self._supervisor.workers[rank].process.sentinel, zmq.POLLIN)

    def _lose_worker(self, rank: int, how: str) -> None:
        """Go on without a rank, and have it replaced. Raises :class:`WorkerDiedError` if none is left."""
        if rank not in self._supervisor.workers:
            return
        logger.error("rank %d is lost: %s", rank, how)
        self._poller.unregister(self._supervisor.workers[rank].process.sentinel)
        self._supervisor.remove(rank)
        self._limits.forget(rank)
        self._queues.renew(rank, self._supervisor.config_of(rank))
        for peer in self._supervisor.workers:
            self._queues.send("watch", peer, msg.PeerLost(rank))
        for call in self._calls.lose(rank):
            self._tell(call)
        for dispatch_id in list(self._to_come):
            self._passed(dispatch_id, rank)
        self._feed(ev.RankLost(rank, how))
        if self._supervisor.may_restart(rank):
            self._start_worker(rank)
        elif self._supervisor.workers:
            logger.error("rank %d is not started again; the others go on", rank)
        else:
            raise WorkerDiedError(f"no worker is left; the last one, rank {rank}: {how}")

    def _on_ready(self, rank: int, incarnation: int) -> None:
        if self._supervisor.hear(rank, incarnation, ready=True):
            self._queues.await_connected(rank)
            logger.info("rank %d is back", rank)
            self._feed(ev.RankJoined(rank))

    # Input

    def _take_engine_messages(self) -> None:
        for message in received(self._engine, self._decode_engine):
            match message:
                case msg.Submit(request, graph, payload):
                    self._submit(request, graph, payload)
                case msg.Cancel(request_id):
                    self._feed(ev.RequestCancelled(request_id))
                case msg.CallWorkers(call_id, ranks, method, payload):
                    self._calls.add(call_id, ranks)
                    for rank in ranks:
                        if rank not in self.plane.state.ranks.lost:
                            self._limits.called(rank)
                            self._queues.send("compute", rank, msg.Call(call_id, method, payload))
                        elif done := self._calls.reply(call_id, rank, False, f"rank {rank} is lost".encode()):
                            self._tell(done)

    def _submit(self, request: Request, graph: TaskGraph, payload: bytes) -> None:
        self._payloads[request.id] = payload
        try:
            self._feed(ev.RequestArrived(request, graph))
        except ValueError as error:
            self._tell(msg.Ended(request.id, "failed", str(error)))

    def _on_worker(self, message: msg.WorkerMessage) -> None:
        match message:
            case msg.RunStarted(dispatch_id, rank):
                self._limits.got_on(rank)
                self._feed(ev.TaskStarted(dispatch_id, rank))
            case msg.RunDispatched(dispatch_id, rank):
                self._limits.got_on(rank)
                self._feed(ev.TaskDispatched(dispatch_id, rank))
            case msg.RunSkipped(dispatch_id, rank):
                self._passed(dispatch_id, rank)
            case msg.RunDone(dispatch_id, rank, _, started_s, finished_s, views):
                self._passed(dispatch_id, rank, done=True)
                self._record_run(message)
                self._feed(ev.TaskFinished(dispatch_id, rank, finished_s - started_s, views))
            case msg.RunFailed(dispatch_id, rank, error, status_code, secondary):
                self._passed(dispatch_id, rank)
                self._feed(ev.TaskFailed(dispatch_id, rank, error, status_code, secondary))
            case msg.MoveDone(migration_id, rank, num_bytes, started_s, finished_s, error, secondary):
                self._record_move(message)
                seconds = finished_s - started_s
                self._feed(ev.MigrationFinished(migration_id, rank, seconds, num_bytes, error, secondary))
            case msg.ResetDone(reset_id, rank):
                self._feed(ev.EdgesReset(reset_id, rank))
            case msg.CallReply(call_id, rank, ok, value):
                self._limits.answered(rank)
                if done := self._calls.reply(call_id, rank, ok, value):
                    self._tell(done)
            case msg.Heartbeat(rank, incarnation):
                self._supervisor.hear(rank, incarnation)
            case msg.WorkerReady(rank, incarnation):
                self._on_ready(rank, incarnation)
            case msg.WorkerFailed(rank, incarnation, error):
                if self._supervisor.hear(rank, incarnation):
                    self._lose_worker(rank, error)

    def _record_run(self, done: msg.RunDone) -> None:
        emitted = self._running.get(done.dispatch_id)
        if self.timeline is None or emitted is None:
            return  # the last word of a rank that was lost
        run = emitted.command
        for task in run.tasks:
            self.timeline.record(
                rank=done.rank,
                task_id=task.id,
                request_id=task.request_id,
                kind=str(task.kind),
                step_index=task.step_index,
                layout=run.layout,
                start_s=done.started_s,
                end_s=done.finished_s,
                decided_s=emitted.at_s,
                dispatched_s=done.dispatched_s,
                run_ahead=run.after is not None,
            )

    def _record_move(self, done: msg.MoveDone) -> None:
        move = self._moving.get(done.migration_id)
        if self.timeline is None or move is None or done.error:
            return
        self.timeline.record_migration(
            rank=done.rank,
            artifact=move.artifact,
            request_id=move.request_id,
            ranks=move.ranks,
            start_s=done.started_s,
            end_s=done.finished_s,
            num_bytes=done.num_bytes,
        )

    # Output

    def _feed(self, event: ev.Event) -> None:
        now_s = time.monotonic()
        recording = self.recording
        commands = recording.handle(self.plane, event, now_s) if recording else self.plane.handle(event, now_s)
        for command in commands:
            self._emitters[type(command)](command)
        match event:
            case ev.TaskFinished() | ev.TaskFailed() | ev.TaskWithdrawn():
                for dispatch_id in self._running.keys() - self.plane.state.dispatches.keys():
                    del self._running[dispatch_id]
            case ev.MigrationFinished(migration_id):
                if migration_id not in self.plane.migrations:
                    self._moving.pop(migration_id, None)
        while self._withdrawn:
            self._feed(ev.TaskWithdrawn(self._withdrawn.popleft()))

    def _emit_run(self, command: cmd.RunTask) -> None:
        now_s = time.monotonic()
        self._running[command.dispatch_id] = _Emitted(command, now_s)
        record = self.plane.state.dispatches[command.dispatch_id]
        self._limits.emitted(record, record.expected_s or record.ends_s - now_s)
        if command.after is not None:
            self._to_come[command.dispatch_id] = set(command.layout.ranks)
        roots = [task.request_id for task in command.tasks if not task.inputs]
        payloads = {request_id: self._payloads[request_id] for request_id in roots}
        data = msg.encode(msg.Run(command, payloads))
        for rank in command.layout.ranks:
            self._queues.send("compute", rank, data)

    def _emit_withdraw(self, command: cmd.WithdrawTask) -> None:
        if self._claims.withdraw(command.dispatch_id):
            self._withdrawn.append(command.dispatch_id)

    def _passed(self, dispatch_id: int, rank: int, *, done: bool = False) -> None:
        """A rank has a dispatch behind it; after the last one, nobody asks any more whether it runs."""
        self._limits.over(rank, dispatch_id, done=done)
        if (to_come := self._to_come.get(dispatch_id)) is not None:
            to_come.discard(rank)
            if not to_come:
                del self._to_come[dispatch_id]
                self._claims.forget(dispatch_id)

    def _emit_migrate(self, command: cmd.Migrate) -> None:
        self._moving[command.migration_id] = command
        data = msg.encode(msg.Move(command))
        for rank in command.ranks:
            self._queues.send("migration", rank, data)

    def _emit_free(self, command: cmd.FreeArtifacts) -> None:
        data = msg.encode(msg.Free(command))
        for rank in command.ranks:
            self._queues.send("migration", rank, data)

    def _emit_reset(self, command: cmd.ResetEdges) -> None:
        data = msg.encode(msg.Reset(command))
        for rank in command.ranks:
            self._queues.send(command.lane, rank, data)

    def _end(self, message: msg.Ended) -> None:
        self._payloads.pop(message.request_id, None)
        self._tell(message)

    def _set_wake(self, command: cmd.WakeAt) -> None:
        self._wake_at_s = command.at_s

    def _tell(self, message: msg.ControlMessage) -> None:
        push(self._engine, message)


class _Emitted(NamedTuple):
    """A dispatch in flight and when it was sent."""

    command: cmd.RunTask
    at_s: float


def _open_recording(config: RuntimeConfig, costs: CostTable | None) -> RecordingWriter | None:
    if config.record_path is None:
        return None
    header = RecordingHeader(
        model=config.model,
        num_ranks=config.num_ranks,
        policy=config.policy,
        policy_args=config.policy_args,
        admission=config.admission,
        costs=costs,
        run_ahead=config.run_ahead,
        max_artifact_bytes=config.max_artifact_bytes,
    )
    return RecordingWriter(config.record_path, header)


def main() -> None:
    # A terminal or a service manager signals every process of the server; the engine says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s [%(name)s] %(message)s")
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RuntimeConfig)
    ControlProcess(config).run()


if __name__ == "__main__":
    main()
