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
from pathlib import Path

import msgspec
import zmq

from gfdit.core import Request, TaskGraph
from gfdit.core import events as ev
from gfdit.core.cost.table import CostTable
from gfdit.runtime import messages as msg
from gfdit.runtime.calls import PendingCalls
from gfdit.runtime.claims import Claims
from gfdit.runtime.command_sender import CommandSender
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.plane import make_plane, open_recording
from gfdit.runtime.rank_queues import RankQueues
from gfdit.runtime.sockets import open_socket, received
from gfdit.runtime.supervisor import Supervisor, WorkerDiedError
from gfdit.runtime.task_timeline import TaskTimeline
from gfdit.runtime.time_limits import TimeLimits
from gfdit.runtime.usage import UsageReports

logger = logging.getLogger("gfdit.control")


class ControlProcess:
    """Sockets, clock and workers around one :class:`~gfdit.core.control.ControlPlane`."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        costs = None if config.costs_path is None else CostTable.load(config.costs_path)
        self.plane = make_plane(config, costs)
        self._usage = UsageReports(self.plane, config.num_ranks)
        self._recording = open_recording(config, costs)
        self._timeline = (
            TaskTimeline(config.timeline_path, config.num_ranks, self.plane) if config.timeline_path else None
        )
        self._context = zmq.Context()
        self._engine = open_socket(self._context, zmq.PAIR, config.address("engine"))
        self._events = open_socket(self._context, zmq.PULL, config.address("events"), bind=True)
        self._queues = RankQueues(self._context, config)
        self._decode_engine = msg.decoder(msg.EngineMessage)
        self._decode_worker = msg.decoder(msg.WorkerMessage)
        self._supervisor = Supervisor(config)
        self._limits = TimeLimits(config, time.monotonic)
        self._poller = zmq.Poller()
        Path(config.claims_dir).mkdir()
        self._sender = CommandSender(
            self.plane, self._engine, self._queues, Claims(config.claims_dir), self._limits, self._timeline
        )
        self._calls = PendingCalls()
        self._stopping = False
        self._worker_ended = False
        self._failed = False

    # Life

    def run(self) -> None:
        """Start the workers, then serve until the engine says stop or goes away."""
        try:
            for source in (self._engine, self._events, sys.stdin.fileno()):
                self._poller.register(source, zmq.POLLIN)
            for rank in range(self.config.num_ranks):
                self._start_worker(rank)
            self._await_workers()
            self._sender.tell(msg.Ready())
            self._serve()
        except WorkerDiedError as error:
            logger.error("%s", error)
            self._failed = True
            self._sender.tell(msg.Fatal(str(error)))
        except Exception as error:
            logger.exception("the control process fails")
            self._failed = True
            self._sender.tell(msg.Fatal(f"control process: {type(error).__name__}: {error}"))
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
            if self._sender.wake_at_s is not None and time.monotonic() >= self._sender.wake_at_s:
                self._sender.wake_at_s = None
                self._feed(ev.WakeUp())
            if report := self._usage.due():
                self._sender.tell(report)

    def _shut_down(self) -> None:
        self._queues.stop()
        # After a failure its peers may sit in a collective until their time-out.
        self._supervisor.stop(grace_s=1.0 if self._failed else 10.0)
        if self._timeline is not None:
            self._timeline.close()
        if self._recording is not None:
            self._recording.close()
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
        wake_at_s = self._sender.wake_at_s
        return until_check_s if wake_at_s is None else min(wake_at_s - time.monotonic(), until_check_s)

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
            self._sender.tell(call)
        self._sender.lose(rank)
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
                            self._sender.tell(done)

    def _submit(self, request: Request, graph: TaskGraph, payload: bytes) -> None:
        payloads = self._sender.payloads
        of_alive = payloads.get(request.id)  # one with the same id goes on undisturbed
        payloads[request.id] = payload
        try:
            self._feed(ev.RequestArrived(request, graph))
        except ValueError as error:
            del payloads[request.id]
            if of_alive is not None:
                payloads[request.id] = of_alive
            self._sender.tell(msg.Ended(request.id, "failed", str(error)))

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
                if self._timeline is not None:
                    self._timeline.ran(message)
                self._feed(ev.TaskFinished(dispatch_id, rank, finished_s - started_s, views))
            case msg.RunFailed(dispatch_id, rank, error, status_code, caused_by_peer):
                self._passed(dispatch_id, rank)
                self._feed(ev.TaskFailed(dispatch_id, rank, error, status_code, caused_by_peer))
            case msg.MoveDone(migration_id, rank, num_bytes, started_s, finished_s, error, caused_by_peer):
                if self._timeline is not None:
                    self._timeline.moved(message)
                seconds = finished_s - started_s
                self._feed(ev.MigrationFinished(migration_id, rank, seconds, num_bytes, error, caused_by_peer))
            case msg.ResetDone(reset_id, rank):
                self._feed(ev.EdgesReset(reset_id, rank))
            case msg.CallReply(call_id, rank, ok, value):
                self._limits.answered(rank)
                if done := self._calls.reply(call_id, rank, ok, value):
                    self._sender.tell(done)
            case msg.Heartbeat(rank, incarnation):
                self._supervisor.hear(rank, incarnation)
            case msg.WorkerReady(rank, incarnation):
                self._on_ready(rank, incarnation)
            case msg.WorkerFailed(rank, incarnation, error):
                if self._supervisor.hear(rank, incarnation):
                    self._lose_worker(rank, error)

    def _passed(self, dispatch_id: int, rank: int, *, done: bool = False) -> None:
        """A rank has a dispatch behind it."""
        self._limits.over(rank, dispatch_id, done=done)
        self._sender.passed(dispatch_id, rank)

    def _feed(self, event: ev.Event) -> None:
        now_s = time.monotonic()
        recording = self._recording
        commands = recording.handle(self.plane, event, now_s) if recording else self.plane.handle(event, now_s)
        for command in commands:
            self._sender.send(command)
        if self._timeline is not None and isinstance(event, _CLOSING):
            self._timeline.forget_ended()
        while self._sender.withdrawn:
            self._feed(ev.TaskWithdrawn(self._sender.withdrawn.popleft()))


_CLOSING = (ev.TaskFinished, ev.TaskFailed, ev.TaskWithdrawn, ev.MigrationFinished)


def main() -> None:
    # A terminal or a service manager signals every process of the server; the engine says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s [%(name)s] %(message)s")
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RuntimeConfig)
    ControlProcess(config).run()


if __name__ == "__main__":
    main()
