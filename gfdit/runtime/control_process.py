"""The control process: drives the control plane, one thread, no polling.

Started by the engine as ``python -m gfdit.runtime.control_process`` with its :class:`RuntimeConfig` on standard
input. End of file there means that the engine has closed or is gone, and everything stops. If this process itself
ends in any other way, or hangs, the workers stay: the engine starts another one, which goes on with what they
hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gfdit.core import ControlPlane
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost.table import NOMINAL, CostTable
from gfdit.observe.logs import log_as_vllm
from gfdit.observe.meter import INTERVAL_S, MAX_SHARE, Meter
from gfdit.observe.recording import RecordingWriter
from gfdit.observe.timeline import TimelineWriter
from gfdit.runtime import messages as msg
from gfdit.runtime.claims import Claims
from gfdit.runtime.config import CHANGEABLE, RuntimeConfig
from gfdit.runtime.plane import choice_of, make_plane, open_recording
from gfdit.runtime.policy_guard import GuardedPolicy
from gfdit.runtime.sockets import Arrived, ControlPort, ControlSockets
from gfdit.runtime.supervisor import Supervisor, WorkerDiedError
from gfdit.runtime.task_reports import TaskReports
from gfdit.runtime.time_limits import TimeLimits

logger = logging.getLogger("gfdit.control")

ALIVE_INTERVAL_S = 0.5
ENGINE_SILENT_S = 30.0
# Workers that are still at a step are not waited for by requests that need them not.
RECONNECT_S = 2.0
# No control process resets an edge more often. Workers tell the generations of their edges, but all that could may
# have been replaced since, and what they wrote to the heap is still there.
GENERATIONS_AHEAD = 256


class ControlProcess:
    """Workers and engine around one :class:`~gfdit.core.control.ControlPlane`.

    Everything it knows of the world comes through ``port``, ``supervisor`` and ``clock``.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        port: ControlPort,
        supervisor: Supervisor,
        claims: Claims,
        clock: Callable[[], float] = time.monotonic,
        plane: ControlPlane | None = None,
    ) -> None:
        """``plane`` is by default the one that ``config`` asks for."""
        costs = None if config.costs_path is None else CostTable.load(config.costs_path)
        self.config = config
        self.plane = plane or make_plane(config, costs)
        self.stopping = False
        self._port = port
        self._supervisor = supervisor
        self._claims = claims
        self._clock = clock
        self._limits = TimeLimits(config, clock)
        self._costs = costs
        self._recording = open_recording(config, costs)
        self._timeline = self._open_timeline()
        self._task_reports = self._join_reports()
        self._payloads: dict[str, bytes] = {}  # of requests, for their first tasks
        self._to_come: dict[int, set[int]] = {}  # of queued dispatches: ranks that have not come to them
        self._withdrawn: deque[int] = deque()  # dispatches of which the plane has still to hear
        self._calls = PendingCalls()
        self._restarts: deque[cmd.RestartRank] = deque()
        self._owing: dict[int, float] = {}  # ranks that have to answer, and until when
        self._generation = 0  # of which no edge is ahead, as far as the workers have told
        self._wake_at_s: float | None = None
        models = [one.name for one in config.components] or [config.model]
        self._meter = Meter(self.plane, config.num_ranks, models, config.epoch)
        self._time_policy()
        self._alive_at_s = self._snapshot_at_s = 0.0
        self._told_idle = False
        self._told_ranks: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # lost, and for good
        self._engine_heard_s = clock()
        self._engine_silent = False
        self._senders: dict[type, Callable[[Any], None]] = {
            cmd.RunTask: self._send_run,
            cmd.WithdrawTask: self._withdraw,
            cmd.Migrate: self._send_migrate,
            cmd.FreeArtifacts: lambda c: port.send("migration", c.ranks, c),
            cmd.ResetEdges: lambda c: port.send(c.lane, c.ranks, c),
            cmd.ProbeRank: self._send_probe,
            cmd.LoadComponent: self._send_load,
            cmd.RestartRank: self._restarts.append,
            cmd.StartRequest: port.tell,
            cmd.CompleteRequest: self._send_end,
            cmd.CancelRequest: self._send_end,
            cmd.FailRequest: self._send_end,
            cmd.RejectRequest: self._send_end,
            cmd.ReportFault: lambda c: logger.error("policy fault: %s", c.message),
            cmd.WakeAt: self._set_wake,
        }

    # Life

    def run(self) -> None:
        """Start or find the workers, then serve until the engine says stop or goes away.

        Raises :class:`WorkerDiedError` if there is no worker to serve with.
        """
        if self.config.epoch:
            self._reconnect()
        else:
            self._start_all()
        if not self.stopping:
            self._port.tell(msg.Ready())
        while not self.stopping:
            self.turn()

    def shut_down(self, *, failed: bool = False) -> None:
        self._port.send("compute", tuple(self._supervisor.workers), msg.Stop())
        self._port.send("migration", tuple(self._supervisor.workers), msg.Stop())
        # After a failure its peers may sit in a collective until their time-out.
        self._supervisor.stop(grace_s=1.0 if failed else 10.0)
        self.close_files()
        self._port.close()

    def close_files(self) -> None:
        for file in (self._timeline, self._recording):
            if file is not None:
                file.close()

    def _open_timeline(self) -> TimelineWriter | None:
        path = self.config.timeline_path
        return None if path is None else TimelineWriter(path, self.config.num_ranks, serving=True)

    def _join_reports(self) -> TaskReports | None:
        """For the timeline and traces; None if there is neither."""
        if self._timeline is None and not self.config.traces:
            return None
        return TaskReports(self.plane, self._timeline, traces=self.config.traces)

    def _time_policy(self) -> None:
        if isinstance(self.plane.policy, GuardedPolicy):
            self.plane.policy.seconds = self._meter.decisions_s

    def _start_all(self) -> None:
        for rank in range(self.config.num_ranks):
            self._start_worker(rank)
        waiting = set(range(self.config.num_ranks))
        deadline_s = self._clock() + self.config.start_timeout_s
        while waiting and not self.stopping:
            if self._clock() > deadline_s:
                seconds = self.config.start_timeout_s
                raise WorkerDiedError(f"workers {sorted(waiting)} not ready after {seconds:.0f} s")
            arrived = self._wait(ALIVE_INTERVAL_S)
            for message in arrived.from_workers:
                if isinstance(message, msg.WorkerFailed):
                    raise WorkerDiedError(f"worker {message.rank} failed to start: {message.error}")
                if isinstance(message, msg.WorkerReady):
                    self._supervisor.hear(message.rank, message.incarnation, ready=True)
                    waiting.discard(message.rank)
            if ended := self._supervisor.ended():
                raise WorkerDiedError("; ".join(f"rank {rank}: {how}" for rank, how in ended.items()))
            for engine_message in arrived.from_engine:
                self._on_engine(engine_message)

    def _reconnect(self) -> None:
        """Go on where a control process has ended: with the workers that are there, and what they hold.

        The engine submits again what is alive. Every number below the first one of this process is of the past.
        """
        config, port = self.config, self._port
        awaited = {rank for rank in range(config.num_ranks) if self._supervisor.adopt(rank)}
        for rank in range(config.num_ranks):
            port.renew(rank, self._supervisor.config_of(rank))
        for queue in ("watch", "migration", "compute"):
            port.send(queue, tuple(awaited), msg.Reconnect(config.first_id))
        ready: dict[int, msg.WorkerReady] = {}
        alive: list[msg.Submit] = []
        rest: list[msg.EngineMessage] = []
        told: msg.Resubmitted | None = None
        deadline_s = self._clock() + RECONNECT_S
        while not self.stopping and not (told and (awaited <= ready.keys() or self._clock() > deadline_s)):
            arrived = self._wait(ALIVE_INTERVAL_S / 5)
            for message in arrived.from_workers:
                if isinstance(message, msg.WorkerReady) and message.first_id != config.first_id:
                    continue  # it was loading, or this is what it told the control process before
                if isinstance(message, msg.WorkerReady) and message.rank in awaited:
                    self._supervisor.hear(message.rank, message.incarnation, ready=True)
                    ready[message.rank] = message
                elif isinstance(message, msg.Heartbeat):
                    self._supervisor.hear(message.rank, message.incarnation)
            for engine_message in arrived.from_engine:
                match engine_message:
                    case msg.Submit() if told is None:
                        alive.append(engine_message)
                    case msg.Resubmitted():
                        told = engine_message
                    case _:
                        rest.append(engine_message)
            awaited -= self._supervisor.ended().keys()
        if self.stopping:
            return
        assert told is not None
        self._claims.forget_before(config.first_id)
        for submit in alive:
            self._payloads[submit.request.id] = submit.payload
        newest = max([message.generation for message in ready.values()], default=0)
        self._generation = max(newest, config.epoch * GENERATIONS_AHEAD) + GENERATIONS_AHEAD
        self._feed(
            ev.Reconnected(
                tuple((submit.request, submit.graph) for submit in alive),
                tuple(
                    (rank, tuple((held.artifact, held.layout, held.view) for held in ready[rank].holdings))
                    for rank in sorted(ready)
                ),
                self._generation,
                told.started,
                tuple((rank, ready[rank].resident) for rank in sorted(ready) if ready[rank].resident),
            )
        )
        logger.warning(
            "control process %d goes on with ranks %s and %d requests", config.epoch, sorted(ready), len(alive)
        )
        for engine_message in rest:
            self._on_engine(engine_message)
        for rank, how in self._supervisor.ended().items():
            self._lose_worker(rank, how)
        self._owing = dict.fromkeys(awaited - ready.keys(), self._clock() + config.task_timeout_s)
        for rank in range(config.num_ranks):
            if rank in self._supervisor.workers:
                continue
            if self._supervisor.plan_start(rank):
                self._start_worker(rank)
            else:
                self._feed(ev.RankLost(rank, "it was lost before", for_good=True))
        if not self._supervisor.any_to_come:
            raise WorkerDiedError("no worker is left")

    def turn(self) -> None:
        """Wait for what comes next, and answer it."""
        looks_ahead = self.plane.wants_to_look_ahead
        arrived = self._wait(0.0 if looks_ahead else self._seconds_to_wake())
        ended = self._supervisor.ended()
        for message in arrived.from_workers:
            self._on_worker(message)
        # After what they had still to say.
        now_s = self._clock()
        late = {rank: "it does not answer" for rank, limit_s in self._owing.items() if now_s > limit_s}
        for rank, how in (self._limits.overdue() | late | self._supervisor.silent() | ended).items():
            self._lose_worker(rank, how)
        while self._restarts:
            self._replace_worker(self._restarts.popleft())
        for rank in self._supervisor.due():
            self._start_worker(rank)
        for engine_message in arrived.from_engine:
            self._on_engine(engine_message)
        if looks_ahead and not arrived.from_workers:
            self._feed(ev.LookAhead())
        if self.plane.idle:
            self.plane.check_integrity()
        self._wake_if_due()
        self._report(is_quiet=not (arrived.from_workers or arrived.from_engine))

    def _wake_if_due(self) -> None:
        """The policy wants to be asked, or something in the control plane ends by itself."""
        now_s, expiry_s = self._clock(), self.plane.next_expiry_s
        wakes = self._wake_at_s is not None and now_s >= self._wake_at_s
        if wakes:
            self._wake_at_s = None
        if wakes or (expiry_s is not None and now_s >= expiry_s):
            self._feed(ev.WakeUp())

    # Waiting

    def _wait(self, timeout_s: float) -> Arrived:
        """Until something comes, or for ``timeout_s``; and say that this process is alive."""
        now_s = self._clock()
        if now_s >= self._alive_at_s:
            self._alive_at_s = now_s + ALIVE_INTERVAL_S
            self._port.tell(msg.Alive())
        arrived = self._port.wait(timeout_s, self._supervisor.sentinels)
        self.stopping |= arrived.ended
        self._note_engine(bool(arrived.from_engine))
        return arrived

    def _note_engine(self, heard: bool) -> None:
        """Nothing follows from its silence but that it is said: its end is noticed otherwise."""
        now_s = self._clock()
        if heard:
            if self._engine_silent:
                logger.warning("the engine is heard again after %.0f s", now_s - self._engine_heard_s)
            self._engine_heard_s, self._engine_silent = now_s, False
        elif not self._engine_silent and now_s - self._engine_heard_s > ENGINE_SILENT_S:
            self._engine_silent = True
            logger.error("the engine has not been heard for %.0f s", ENGINE_SILENT_S)

    def _seconds_to_wake(self) -> float:
        """Until the policy wants to be asked or a rank is to start, and not longer than anybody may be silent."""
        longest_s = min(self.config.heartbeat_timeout_s / 10, ALIVE_INTERVAL_S)
        moments_s = (self._wake_at_s, self._supervisor.next_start_s, self.plane.next_expiry_s)
        left_s = [at_s - self._clock() for at_s in moments_s if at_s is not None]
        return max(0.0, min([longest_s, *left_s]))

    # Workers that come and go

    def _start_worker(self, rank: int) -> None:
        self._port.renew(rank, self._supervisor.config_of(rank))
        self._supervisor.start(rank)

    def _lose_worker(self, rank: int, how: str) -> None:
        """Go on without a rank, and have it replaced. Raises :class:`WorkerDiedError` if none is to come."""
        if rank not in self._supervisor.workers:
            return
        logger.error("rank %d is lost: %s", rank, how)
        self._owing.pop(rank, None)
        self._supervisor.remove(rank)
        self._limits.forget(rank)
        for peer in self._supervisor.workers:
            self._port.send("watch", (peer,), msg.PeerLost(rank, self.plane.generations(peer, rank)))
        for call in self._calls.lose(rank):
            self._port.tell(call)
        for dispatch_id in list(self._to_come):
            self._passed(dispatch_id, rank)
        if self._task_reports is not None:
            self._task_reports.lost(rank, how, self._clock())
        to_come = self._supervisor.plan_start(rank)
        self._feed(ev.RankLost(rank, how, for_good=not to_come))
        if not to_come:
            left = len(self.plane.state.ranks.present)
            logger.error("rank %d is not started again before the server is; %d others go on", rank, left)
            if not self._supervisor.any_to_come:
                raise WorkerDiedError(f"no worker is left; the last one, rank {rank}: {how}")

    def _replace_worker(self, command: cmd.RestartRank) -> None:
        if command.for_good:
            self._supervisor.give_up(command.rank)
        self._lose_worker(command.rank, command.reason)

    def _on_ready(self, message: msg.WorkerReady) -> None:
        rank = message.rank
        if not self._supervisor.hear(rank, message.incarnation, ready=True):
            return
        if message.first_id != (self.config.first_id if rank in self._owing else 0):
            return  # told to the control process before, or told before what that asks of it
        if message.generation > self._generation:
            self._lose_worker(rank, "it told too late which generation its edges are in")
            return
        self._owing.pop(rank, None)
        if message.holdings:  # it has come too late for the others to go on from that
            names = tuple(held.artifact for held in message.holdings)
            self._port.send("migration", (rank,), cmd.FreeArtifacts((rank,), names, self.config.first_id))
        logger.info("rank %d is back", rank)
        # One that is late has kept what it has loaded.
        self._feed(ev.RankJoined(rank, message.resident or None))

    # Input

    def _on_engine(self, message: msg.EngineMessage) -> None:
        match message:
            case msg.Submit(request, graph, payload):
                of_alive = self._payloads.get(request.id)  # one with the same id goes on undisturbed
                self._payloads[request.id] = payload
                try:
                    self._feed(ev.RequestArrived(request, graph))
                except ValueError as error:
                    del self._payloads[request.id]
                    if of_alive is not None:
                        self._payloads[request.id] = of_alive
                    self._port.tell(cmd.FailRequest(request.id, str(error)))
            case ev.RequestCancelled():
                self._feed(message)
            case msg.CallWorkers(call_id, ranks, method, payload):
                self._calls.add(call_id, ranks)
                for rank in ranks:
                    if not self.plane.is_away(rank):
                        self._limits.called(rank, call_id, method)
                        self._port.send("compute", (rank,), msg.Call(call_id, method, payload))
                    else:
                        gone = self._supervisor.is_gone(rank)
                        answer = (True, msg.GONE) if gone else (False, f"rank {rank} is being started".encode())
                        if done := self._calls.reply(call_id, rank, *answer):
                            self._port.tell(done)
            case msg.Reconfigure(change_id, config):
                try:
                    self._change_to(config)
                except (ValueError, OSError) as error:
                    self._port.tell(msg.Reconfigured(change_id, str(error)))
                else:
                    self._port.tell(msg.Reconfigured(change_id))
            case msg.Alive() | msg.Resubmitted():
                pass

    def _on_worker(self, message: msg.WorkerMessage) -> None:
        match message:
            case ev.TaskStarted(_, rank) | ev.TaskDispatched(_, rank):
                self._limits.got_on(rank)
                self._feed(message)
            case ev.TaskDelivering(dispatch_id, rank):
                self._limits.delivering(rank, dispatch_id)
                self._feed(message)
            case ev.TaskFinished(dispatch_id, rank):
                self._passed(dispatch_id, rank, done=True)
                self._supervisor.worked(rank)
                if self._task_reports is not None:
                    self._task_reports.ran(message)
                self._feed(message)
            case ev.TaskFailed(dispatch_id, rank):
                self._passed(dispatch_id, rank)
                if self._task_reports is not None:
                    self._task_reports.failed(message, self._clock())
                self._feed(message)
            case ev.MigrationFinished():
                self._meter.moved(message)
                if self._task_reports is not None:
                    self._task_reports.moved(message)
                self._feed(message)
            case ev.EdgesReset() | ev.MemoryMeasured():
                self._feed(message)
            case ev.RankProbed(probe_id, rank):
                if probe_id >= self.config.first_id:
                    self._owing.pop(rank, None)
                self._feed(message)
            case ev.ComponentLoaded(load_id, rank):
                self._limits.loaded(rank, load_id)
                self._feed(message)
            case msg.TaskSkipped(dispatch_id, rank):
                self._passed(dispatch_id, rank)
            case msg.CallReply(call_id, rank, ok, value):
                self._limits.answered(rank, call_id)
                if done := self._calls.reply(call_id, rank, ok, value):
                    self._port.tell(done)
            case msg.Heartbeat(rank, incarnation):
                self._supervisor.hear(rank, incarnation)
            case msg.WorkerReady():
                self._on_ready(message)
            case msg.WorkerFailed(rank, incarnation, error):
                if self._supervisor.hear(rank, incarnation):
                    self._lose_worker(rank, error)

    def _passed(self, dispatch_id: int, rank: int, *, done: bool = False) -> None:
        """A rank has a dispatch behind it; after the last one, nobody asks any more whether it runs."""
        self._limits.over(rank, dispatch_id, done=done)
        if (to_come := self._to_come.get(dispatch_id)) is not None:
            to_come.discard(rank)
            if not to_come:
                del self._to_come[dispatch_id]
                self._claims.forget(dispatch_id)

    def _feed(self, event: ev.Event) -> None:
        """Hand an event in, and send what follows."""
        now_s = self._clock()
        if self._task_reports is not None and isinstance(event, ev.TaskWithdrawn):
            self._task_reports.withdrawn(event)
        recording = self._recording
        commands = recording.handle(self.plane, event, now_s) if recording else self.plane.handle(event, now_s)
        for command in commands:
            self._senders[type(command)](command)
        while self._withdrawn:
            self._feed(ev.TaskWithdrawn(self._withdrawn.popleft()))

    def _change_to(self, config: RuntimeConfig) -> None:
        """Go on with ``config``. Raises ``ValueError`` or ``OSError`` where that cannot be; all is as before."""
        old, new = self.config, msgspec.structs.replace(config, epoch=self.config.epoch)
        changed = {name for name in new.__struct_fields__ if getattr(old, name) != getattr(new, name)}
        if fixed := changed.difference(CHANGEABLE):
            raise ValueError(f"{', '.join(sorted(fixed))} cannot be changed while the server runs")
        costs = self._costs
        if "costs_path" in changed:
            costs = None if new.costs_path is None else CostTable.load(new.costs_path)
        renews = changed & {"costs_path", "policy", "policy_args", "admission", "without_policy"}
        self._feed(
            ev.SettingsChanged(
                choice_of(new) if renews and not new.without_policy else None,
                (costs or NOMINAL) if "costs_path" in changed else None,
                new.max_queue_s,
                new.max_retries,
                new.checkpoint_every_steps,
                new.drained,
            )
        )
        self.config, self._costs = new, costs
        if renews:
            self._time_policy()
            self._meter.forget_times()
        if "record_path" in changed:
            _close_beside(self._recording)
            self._recording = open_recording(new, costs, from_start=False)
        if "timeline_path" in changed:
            _close_beside(self._timeline)
            self._timeline = self._open_timeline()
            if self._task_reports is not None and self.config.traces:
                self._task_reports.timeline = self._timeline  # what traces have collected stays
            else:
                self._task_reports = self._join_reports()
        logger.info("changed: %s", ", ".join(f"{name} {getattr(new, name)!r}" for name in sorted(changed)))

    # Output: each command where it belongs, in the order given; nothing here waits

    def _send_run(self, command: cmd.RunTask) -> None:
        now_s = self._clock()
        if self._task_reports is not None:
            self._task_reports.sent(command, now_s)
        record = self.plane.state.dispatches[command.dispatch_id]
        self._limits.emitted(record, record.expected_s or record.ends_s - now_s)
        ranks = command.layout.ranks
        if command.after is not None:
            self._to_come[command.dispatch_id] = set(ranks)
        if roots := [task.request_id for task in command.tasks if not task.inputs]:
            payloads = {request_id: self._payloads[request_id] for request_id in roots}
            self._port.send("compute", ranks, msg.Payloads(command.dispatch_id, payloads))
        self._port.send("compute", ranks, command)

    def _withdraw(self, command: cmd.WithdrawTask) -> None:
        if self._claims.withdraw(command.dispatch_id):
            self._withdrawn.append(command.dispatch_id)

    def _send_probe(self, command: cmd.ProbeRank) -> None:
        """It stands behind what the rank has, which may wait for a peer, until that fails by itself."""
        self._owing[command.rank] = self._clock() + self.config.task_timeout_s + self.config.comm_timeout_s
        self._port.send("compute", (command.rank,), command)

    def _send_load(self, command: cmd.LoadComponent) -> None:
        self._limits.loading(command.rank, command.load_id, command.component)
        self._port.send("compute", (command.rank,), command)

    def _send_migrate(self, command: cmd.Migrate) -> None:
        if self._task_reports is not None:
            self._task_reports.sent_copy(command, self._clock())
        self._port.send("migration", command.ranks, command)

    def _send_end(self, command: msg.RequestEnd) -> None:
        self._payloads.pop(command.request_id, None)
        if self._task_reports is not None:
            self._task_reports.ended(command.request_id)
        self._port.tell(command)

    def _set_wake(self, command: cmd.WakeAt) -> None:
        self._wake_at_s = command.at_s

    def _report(self, *, is_quiet: bool) -> None:
        """A snapshot for operators: when one is due and nothing is waiting, and at once where that matters.

        That is when ranks have gone or come, and when the last request has ended. With it goes what traces are
        made of.
        """
        now_s, lost, idle = self._clock(), self.plane.state.ranks.lost, not self.plane.state.requests
        ranks = self._told_ranks
        if lost or ranks[0]:
            ranks = frozenset(lost), frozenset([rank for rank in lost if self._supervisor.is_gone(rank)])
        if ranks == self._told_ranks and (self._told_idle or not idle):
            late_s = now_s - self._snapshot_at_s
            if late_s < 0 or not (is_quiet or late_s > INTERVAL_S):
                return
        self._told_ranks, self._told_idle = ranks, idle
        if self._task_reports is not None and (traces := self._task_reports.take(now_s)) is not None:
            self._port.tell(traces)
        self._port.tell(self._meter.snapshot(now_s, self._supervisor.restarts, ranks[1]))
        self._snapshot_at_s = self._clock() + max(INTERVAL_S, (self._clock() - now_s) / MAX_SHARE)


def _close_beside(file: TimelineWriter | RecordingWriter | None) -> None:
    """What is still to be written to a slow disk must not hold up serving."""
    if file is not None:
        threading.Thread(target=file.close, name="gfdit-close").start()


@dataclass(slots=True)
class PendingCalls:
    """``add`` a call for some ranks; ``reply`` returns the collected answer with the last reply."""

    _open: dict[int, dict[int, tuple[bool, bytes] | None]] = field(default_factory=dict)

    def add(self, call_id: int, ranks: tuple[int, ...]) -> None:
        self._open[call_id] = dict.fromkeys(ranks)

    def reply(self, call_id: int, rank: int, ok: bool, value: bytes) -> msg.CallDone | None:
        if (replies := self._open.get(call_id)) is None or replies.get(rank) is not None:
            return None  # answered for it, since it was lost
        replies[rank] = (ok, value)
        collected = [reply for reply in replies.values() if reply is not None]
        if len(collected) < len(replies):
            return None
        del self._open[call_id]
        return msg.CallDone(call_id, collected)

    def lose(self, rank: int) -> list[msg.CallDone]:
        """``rank`` will not answer any more; returns the calls that this completes."""
        waiting = [call_id for call_id, replies in self._open.items() if rank in replies]
        done = [self.reply(call_id, rank, False, f"rank {rank} was lost".encode()) for call_id in waiting]
        return [call for call in done if call is not None]


def main() -> None:
    # A terminal or a service manager signals every process of the server; the engine says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RuntimeConfig)
    log_as_vllm(config.logging, "gfdit-control")
    port = ControlSockets(config)
    try:
        claims = Claims.create(Path(config.claims_dir))
        process = ControlProcess(config, port, Supervisor(config), claims)
    except Exception as error:
        logger.exception("the control process cannot start")
        port.tell(msg.Fatal(f"the control process cannot start: {type(error).__name__}: {error}"))
        port.close()
        return
    try:
        process.run()
    except WorkerDiedError as error:
        logger.error("the runtime cannot go on: %s", error)
        port.tell(msg.Fatal(str(error)))
        process.shut_down(failed=True)
    except Exception:
        # The workers are not told: another control process goes on with them.
        logger.exception("the control process fails")
        with contextlib.suppress(Exception):
            process.close_files()
        sys.stderr.flush()
        os._exit(1)
    else:
        process.shut_down()
    # The engine does this too, unless it was killed.
    shutil.rmtree(config.run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
