"""A whole server under a virtual clock, from one seed: the control plane, its driver, workers and their faults.

What the control plane says is carried out by :mod:`tests.whole.workers`; the books are checked after every event.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from gfdit.core import ControlPlane, ParallelSpec, RankRecord, Request, TaskGraph
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.commands import Lane
from gfdit.core.cost.table import NominalCostModel
from tests.support.cluster import VIEWS
from tests.support.workload import fan_graph, random_graph, random_requests
from tests.whole.weather import Weather
from tests.whole.workers import (
    ECHO,
    SPLIT_VIEWS,
    Claim,
    Contents,
    ContractError,
    Life,
    Operation,
    Part,
    Process,
    Reset,
    break_edges,
    check_inputs,
    finds_broken_edge,
    has_part,
    use_edges,
    would_send,
)

FAULTS_END_S = 60.0  # from then on ranks come back and stay, and all must end
MAX_EVENTS = 100_000
MAX_RETRIES = 3


class World:
    """One run. ``run`` raises ``AssertionError``, of which :class:`ContractError` is one, if anything is wrong.

    ``log`` is given every event and command. ``digest`` is the same for the same run.
    """

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.log = log
        draw = self.draw = random.Random(seed)
        self.weather = Weather.draw(draw)
        self.contents = Contents(seed, SPLIT_VIEWS if self.weather.split else VIEWS)
        num_ranks = self.weather.draw_num_ranks(draw)
        ranks = [RankRecord(rank, frozenset("m")) for rank in range(num_ranks)]
        self.control = ControlPlane(
            self.weather.draw_policy(draw),
            ranks,
            NominalCostModel(),
            run_ahead=draw.randrange(2),
            max_retries=MAX_RETRIES,
            checkpoint_every_steps=draw.choice([0, 1, 2]),
        )
        self.processes = [self._start(rank, 0, num_ranks) for rank in range(num_ranks)]
        self.lives: dict[str, Life] = {}
        self.endings: Counter[str] = Counter()
        self.num_events = self.num_deaths = self.num_emitted = self.digest = 0
        self._time_s = self._clock_offset_s = 0.0
        self._wake_at_s: float | None = None
        self._ended: list[str] = []
        self._claims: dict[int, Claim] = {}
        self._harmed: set[int] = set()  # dispatches
        self._looks_ahead = False
        self._operations: dict[int, Operation] = {}  # by id, until everybody has reported
        self._last_message_s: dict[tuple[Process, Lane], float] = {}
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_queued = 0

    def run(self) -> World:
        self._plan()
        while self._queue:
            self._time_s, _, happen, arguments = heapq.heappop(self._queue)
            happen(*arguments)
            if self.num_events > MAX_EVENTS:
                raise ContractError("the world does not come to rest")
        self._check_rest()
        return self

    # What happens by itself

    def _plan(self) -> None:
        draw, at_s = self.draw, 0.0
        burst = draw.random() < 0.3
        for request, graph in random_requests(draw, draw.randint(1, 16)):
            at_s += 0.0 if burst else draw.expovariate(0.5)
            if self.weather.split:
                degrees = ParallelSpec(1), ParallelSpec(2)
                fan = draw.random() < 0.7
                graph = fan_graph(request.id, degrees, 5) if fan else random_graph(draw, request.id, degrees)
            if draw.random() < 0.3:  # its last task may run on several ranks, too
                widest = max((task.candidates for task in graph.tasks), key=len)
                graph = replace(graph, tasks=(*graph.tasks[:-1], replace(graph.tasks[-1], candidates=widest)))
            self._after(at_s, self._arrive, request, graph)
        for rate, happen in (
            (self.weather.deaths_per_s, self._strike),
            (self.weather.hangs_per_s, self._hang),
            (self.weather.cancel_storms_per_s, self._storm),
            (self.weather.clock_jumps_per_s, self._jump),
        ):
            at_s = draw.expovariate(rate) if rate else FAULTS_END_S
            while at_s < FAULTS_END_S:
                self._after(at_s, happen)
                at_s += draw.expovariate(rate)

    def _arrive(self, request: Request, graph: TaskGraph) -> None:
        draw, now_s = self.draw, self._now_s
        deadline_s = now_s + draw.uniform(0, 20) if draw.random() < 0.5 else None
        request = replace(request, arrival_s=now_s, deadline_s=deadline_s, priority=draw.randrange(3))
        self.lives[request.id] = Life(request, graph)
        self._tell(ev.RequestArrived(request, graph))

    def _storm(self) -> None:
        names = [*self.lives, *self._ended[-3:], "nobody"]
        for name in self.draw.sample(names, self.draw.randint(1, len(names))):
            if name in self.lives:  # an earlier one of the storm may have ended it
                self.lives[name].cancelled = True
            self._tell(ev.RequestCancelled(name))

    def _jump(self) -> None:
        self._clock_offset_s += self.draw.choice([-100.0, -0.5, 0.5, 3600.0])
        if self._wake_at_s is not None:
            self._set_wake(self._wake_at_s)

    def _strike(self) -> None:
        process = self.draw.choice(self.processes)
        if process.alive:
            self._say(f"rank {process.rank} dies")
            self.num_deaths += 1
            process.alive = False
            process.silenced = self.draw.random() < 0.5
            self._after(self._up_to(self.weather.longest_detection_s), self._detect, process)

    def _hang(self) -> None:
        process = self.draw.choice(self.processes)
        if process.alive and not process.stuck:
            self._say(f"rank {process.rank} is stuck")
            process.stuck = True
            limit_s = self._up_to(self.weather.longest_detection_s)
            self._after(limit_s, self._time_out, process)
            self._after(limit_s + self._up_to(self.weather.longest_detection_s), self._kill_stuck, process)

    def _time_out(self, stuck: Process) -> None:
        """Its peers in a task have waited for long enough."""
        for peer in self.processes:
            if peer is not stuck and "compute" in peer.busy:
                operation = peer.lanes["compute"][0]
                if isinstance(operation, Operation) and stuck in operation.members.values():
                    self._after(self._up_to(0.05), self._fail, operation, peer, ECHO)

    def _kill_stuck(self, process: Process) -> None:
        """What it had said before arrives; the control process has killed it itself, and knows at once."""
        if process.alive:
            self.num_deaths += 1
            process.alive = False
            self._detect(process)

    def _detect(self, process: Process) -> None:
        for operation in list(self._operations.values()):
            if operation.members.get(process.rank) is process:
                operation.bereft = True
                self._hear(operation, process.rank)
        for peer in self.processes:
            if peer.alive:
                self._after(self._up_to(0.1), self._learn_of_death, peer, process)
        for life in self.lives.values():
            life.disturbed = True
        self._tell(ev.RankLost(process.rank, "killed"))
        self._after(self._up_to(self.weather.longest_restart_s), self._restart, process)

    def _restart(self, dead: Process) -> None:
        process = self._start(dead.rank, dead.incarnation + 1, len(self.processes))
        self.processes[dead.rank] = process
        self._tell(ev.RankJoined(dead.rank))

    def _start(self, rank: int, incarnation: int, num_ranks: int) -> Process:
        slowness = 10.0 if self.draw.random() < self.weather.slow_rank else 1.0
        return Process(rank, incarnation, num_ranks, self.contents, slowness)

    # Workers

    def _advance(self, process: Process, lane: Lane) -> None:
        """Go on with what is first in a lane, if it may."""
        if not process.goes_on(lane) or lane in process.busy or not process.lanes[lane]:
            return
        match process.lanes[lane][0]:
            case cmd.FreeArtifacts(_, names, before):
                for name in names:
                    if name in process.store and process.store[name].number <= before:
                        del process.store[name]
                self._leave(process, lane)
            case Reset() as reset:
                process.reset(reset)
                self._report(process, lane, ev.EdgesReset(reset.command.reset_id, process.rank))
                self._leave(process, lane)
            case Operation() as operation:
                self._take_part(operation, process)

    def _leave(self, process: Process, lane: Lane) -> None:
        process.lanes[lane].popleft()
        process.busy.discard(lane)
        self._after(self._lag(lane), self._advance, process, lane)

    def _take_part(self, operation: Operation, process: Process) -> None:
        command = operation.command
        if isinstance(command, cmd.RunTask):
            if command.after is not None and not self._goes_on_to(operation, command, process):
                return
            own = [move.migration_id for move in command.migrations if process.rank in move.ranks]
            if any(migration_id not in process.copies for migration_id in own):
                return  # the end of a copy brings it here again
            if errors := [error for migration_id in own if (error := process.copies[migration_id])]:
                self._fail(operation, process, errors[0])
                return
            self._report(process, "compute", ev.TaskStarted(command.dispatch_id, process.rank))
        process.busy.add(operation.lane)
        operation.arrived.add(process.rank)
        members = operation.members.values()
        dead = not process.known_dead.isdisjoint(members)
        if operation.aborted or dead or finds_broken_edge(operation, process.rank):
            self._fail(operation, process, ECHO)
        elif len(operation.arrived) == len(members) and all(member.goes_on(operation.lane) for member in members):
            use_edges(operation)
            operation.begun = True
            seconds = self.draw.uniform(0.01, 0.5) * max(member.slowness for member in members)
            if isinstance(command, cmd.RunTask):
                self._begin_task(operation, command, seconds)
            else:
                self._begin_copy(operation, command, seconds * 0.1)

    def _goes_on_to(self, operation: Operation, command: cmd.RunTask, process: Process) -> bool:
        """Whether a process that has come to a queued task is on it. If not it leaves it behind."""
        cannot = command.after in process.failed
        claim = self._claims.setdefault(command.dispatch_id, "withdrawn" if cannot else "begun")
        if claim == "begun" and not cannot:
            return True
        if claim == "withdrawn":
            self._leave(process, "compute")
        else:
            self._fail(operation, process, ECHO)
        return False

    def _begin_task(self, operation: Operation, command: cmd.RunTask, seconds: float) -> None:
        for process in operation.members.values():
            for task in command.tasks:
                check_inputs(process, task, command.layout)
        draw = self.draw
        culprit = operation.members[draw.choice(command.layout.ranks)]
        if draw.random() < self.weather.task_error:
            self._after(seconds * draw.random(), self._fail, operation, culprit, f"rank {culprit.rank} raised")
        elif len(operation.members) > 1 and draw.random() < self.weather.spurious_echo:
            self._after(seconds * draw.random(), self._fail, operation, culprit, ECHO)
        self._after(seconds, self._complete, operation)

    def _begin_copy(self, operation: Operation, command: cmd.Migrate, seconds: float) -> None:
        name = command.artifact
        held = [(operation.members[rank], layout) for rank, layout in command.held]
        lacking = [process.rank for process, layout in held if not would_send(process, name, layout)]
        operation.brings_junk = not all(has_part(process, name, layout) for process, layout in held)
        if lacking:  # its task has run on and this was to fall back on; or it did not get there, or has left
            if not (command.keep or any(life.disturbed for life in operation.lives)):
                raise ContractError(f"rank {lacking[0]} does not hold its part of {name}")
            operation.refused = True
            self._after(seconds, self._refuse_copy, operation, ECHO)
        elif self.draw.random() < self.weather.copy_error:
            operation.refused = True
            self._after(seconds, self._refuse_copy, operation, "cannot be sent")
        else:
            self._after(seconds, self._complete, operation)

    def _complete(self, operation: Operation) -> None:
        members = operation.members.values()
        if not operation.aborted and all(process.goes_on(operation.lane) for process in members):
            for process in operation.members.values():
                self._after(self._up_to(0.01), self._finish, operation, process)

    def _finish(self, operation: Operation, process: Process) -> None:
        command = operation.command
        if not process.goes_on(operation.lane) or process.rank in operation.finished | operation.failed:
            return
        operation.finished.add(process.rank)
        if isinstance(command, cmd.Migrate):
            known = process.store.get(command.artifact)
            newest = known is None or known.number < command.migration_id  # it may have been made again meanwhile
            if newest and process.rank in command.target.ranks:
                process.store[command.artifact] = Part(command.migration_id, command.target, operation.brings_junk)
            self._end_copy(command, process, "")
            return
        made = Part(command.dispatch_id, command.layout)
        process.store |= {name: made for task in command.tasks for name in task.outputs}
        for name in command.consumes:
            process.store.pop(name, None)
        views: tuple[tuple[str, ArtifactView], ...] = ()
        if process.rank == command.layout.ranks[0]:
            views = tuple(view for task in command.tasks for view in self.contents.to_report(task))
            for life, task in zip(operation.lives, command.tasks, strict=True):
                life.has_result |= not task.outputs
        done = ev.TaskFinished(command.dispatch_id, process.rank, self.draw.random(), views)
        self._report(process, "compute", done)
        self._leave(process, "compute")

    def _refuse_copy(self, operation: Operation, error: str) -> None:
        """The source says that it has nothing to send; all members take part to the end."""
        command = operation.command
        assert isinstance(command, cmd.Migrate)
        for life in operation.lives:
            life.blamed |= error != ECHO
        for process in operation.members.values():
            if process.goes_on(operation.lane) and process.rank not in operation.finished | operation.failed:
                operation.failed.add(process.rank)
                self._end_copy(command, process, error)

    def _fail(self, operation: Operation, process: Process, error: str) -> None:
        """A member gives up and wakes its peers."""
        if not process.goes_on(operation.lane) or process.rank in operation.finished | operation.failed:
            return
        operation.failed.add(process.rank)
        operation.aborted = True
        operation.blamed |= error != ECHO
        break_edges(operation, process.rank)
        for peer in sorted(operation.arrived):
            self._leave_broken(operation, operation.members[peer])
        command = operation.command
        if isinstance(command, cmd.Migrate):
            self._end_copy(command, process, error)
            return
        process.failed.add(command.dispatch_id)
        for life in operation.lives:
            life.blamed |= error != ECHO
        # How far it got is open, but for its inputs.
        names = [name for task in command.tasks for name in task.outputs if self.draw.random() < 0.5]
        process.store |= dict.fromkeys(names, Part(command.dispatch_id, command.layout))
        failed = ev.TaskFailed(command.dispatch_id, process.rank, error, caused_by_peer=error == ECHO)
        self._report(process, "compute", failed)
        self._leave(process, "compute")

    def _leave_broken(self, operation: Operation, process: Process) -> None:
        """A member was lost: ``process`` fails with an echo, unless it has received all it needs."""
        if operation.begun and not operation.refused and self.draw.random() < 0.3:
            self._after(self._up_to(0.05), self._finish, operation, process)
        else:
            self._after(self._up_to(0.05), self._fail, operation, process, ECHO)

    def _end_copy(self, command: cmd.Migrate, process: Process, error: str) -> None:
        process.copies[command.migration_id] = error
        if error and (life := self.lives.get(command.request_id)):
            life.disturbed = True
        done = ev.MigrationFinished(command.migration_id, process.rank, error=error, caused_by_peer=error == ECHO)
        self._report(process, "migration", done)
        self._leave(process, "migration")
        self._advance(process, "compute")

    def _learn_of_death(self, process: Process, dead: Process) -> None:
        """Leave whatever is shared with the dead."""
        process.known_dead.add(dead)
        for lane in sorted(process.busy):  # which order a set has differs from process to process
            operation = process.lanes[lane][0]
            if isinstance(operation, Operation) and dead in operation.members.values():
                self._leave_broken(operation, process)

    # Messages to the control process

    def _report(self, process: Process, lane: Lane, event: ev.Event) -> None:
        """Messages of one lane of a process stay in order, but for second copies, which come any time."""
        at_s = self._time_s + self._up_to(self.weather.longest_delay_s)
        at_s = max(at_s, self._last_message_s.get((process, lane), 0.0))
        self._last_message_s[process, lane] = at_s
        self._after(at_s - self._time_s, self._deliver, process, event)
        if self.draw.random() < self.weather.duplicate:
            self._after(at_s - self._time_s + self._up_to(5.0), self._deliver, process, event)

    def _deliver(self, process: Process, event: ev.Event) -> None:
        if process.silenced:
            return
        match event:
            case ev.TaskFinished(number, rank) | ev.TaskFailed(number, rank) | ev.MigrationFinished(number, rank):
                if operation := self._operations.get(number):
                    if isinstance(event, ev.TaskFinished):
                        operation.known_finished.add(rank)
                    self._hear(operation, rank)
        self._tell(event)

    def _hear(self, operation: Operation, rank: int) -> None:
        """The control plane is about to know that ``rank`` is done with an operation."""
        operation.unreported.discard(rank)
        if operation.unreported:
            return
        operation.reported = self.num_emitted
        command = operation.command
        if isinstance(command, cmd.Migrate):
            del self._operations[command.migration_id]
            return
        del self._operations[command.dispatch_id]
        harmed = operation.bereft or len(operation.known_finished) < len(operation.members)
        # What is queued behind a task that fails had no chance: it does not count.
        lost = harmed and not (operation.known_finished or operation.blamed or command.after in self._harmed)
        if harmed:
            self._harmed.add(command.dispatch_id)
        for life in {id(life): life for life in operation.lives}.values():
            life.num_harmed += harmed
            life.num_lost += lost

    @property
    def _now_s(self) -> float:
        return self._time_s + self._clock_offset_s

    def _tell(self, event: ev.Event) -> None:
        self.num_events += 1
        self._say(f"{event}")
        commands = self.control.handle(event, self._now_s)
        self.control.check_integrity()
        for command in commands:
            self.num_emitted += 1
            self._say(f"    {command}")
            self._emit(command)
        self._check_dispatches()
        if self.control.wants_to_look_ahead and not self._looks_ahead:
            self._looks_ahead = True
            self._after(self._up_to(0.1), self._look_ahead)

    def _look_ahead(self) -> None:
        self._looks_ahead = False
        self._tell(ev.LookAhead())

    def _check_dispatches(self) -> None:
        known = {number for number, op in self._operations.items() if isinstance(op.command, cmd.RunTask)}
        if over := known - self.control.state.dispatches.keys():
            raise ContractError(f"dispatch {min(over)} is closed although a rank has not reported")

    # Commands

    def _emit(self, command: cmd.Command) -> None:
        self.digest = zlib.crc32(repr(command).encode(), self.digest)
        match command:
            case cmd.RunTask(number, tasks, layout):
                lives = [self.lives[task.request_id] for task in tasks]
                if any(life.num_lost > MAX_RETRIES for life in lives):
                    raise ContractError(f"dispatch {number} is one retry too many")
                self._give(number, Operation(command, "compute", self.num_emitted, self._at(layout.ranks), lives))
            case cmd.WithdrawTask(number):
                if self._claims.setdefault(number, "withdrawn") == "withdrawn":
                    self._after(self._up_to(0.01), self._answer_withdrawal, number)
            case cmd.Migrate(number, name):
                lives = [self.lives[name]]
                self._give(
                    number, Operation(command, "migration", self.num_emitted, self._at(command.ranks), lives)
                )
            case cmd.FreeArtifacts(ranks):
                for process in self._at(ranks).values():
                    self._push(process, "migration", command)
            case cmd.ResetEdges(_, lane, ranks):
                for process in self._at(ranks).values():
                    self._push(process, lane, Reset(command, self.num_emitted))
            case cmd.WakeAt(at_s):
                self._set_wake(at_s)
            case cmd.ProbeRank(rank):
                self._after(self._up_to(0.1), self._probe, self.processes[rank])
            case cmd.RestartRank(rank):
                self._after(self._up_to(0.1), self._kill_stuck, self.processes[rank])
            case cmd.ReportFault(message):
                raise ContractError(f"the policy is at fault: {message}")
            case cmd.CompleteRequest() | cmd.CancelRequest() | cmd.RejectRequest() | cmd.FailRequest():
                self._end(command)

    def _probe(self, process: Process) -> None:
        if process.goes_on("compute"):
            error = "cannot add" if self.draw.random() < 0.1 else ""
            self._tell(ev.RankProbed(process.rank, error))

    def _answer_withdrawal(self, number: int) -> None:
        self._operations.pop(number, None)  # its ranks may be lost already
        self._tell(ev.TaskWithdrawn(number))

    def _at(self, ranks: tuple[int, ...]) -> dict[int, Process]:
        """Of processes that have died lately the control plane cannot know."""
        if unknown := set(ranks) - self.control.state.ranks.present.keys():
            raise ContractError(f"a command for rank {min(unknown)}, which is lost")
        return {rank: self.processes[rank] for rank in ranks}

    def _give(self, number: int, operation: Operation) -> None:
        operation.unreported = set(operation.members)
        self._operations[number] = operation
        for process in operation.members.values():
            self._push(process, operation.lane, operation)

    def _push(self, process: Process, lane: Lane, item: Operation | Reset | cmd.FreeArtifacts) -> None:
        process.lanes[lane].append(item)
        self._after(self._lag(lane), self._advance, process, lane)

    def _lag(self, lane: Lane) -> float:
        return self._up_to(self.weather.longest_lag_s if lane == "migration" else 0.001)

    def _set_wake(self, at_s: float) -> None:
        self._wake_at_s = at_s
        self._after(max(0.0, at_s - self._now_s), self._wake, at_s)

    def _wake(self, at_s: float) -> None:
        if self._wake_at_s == at_s and self._now_s >= at_s - 1e-9:
            self._wake_at_s = None
            self._tell(ev.WakeUp())

    def _end(self, command: cmd.CompleteRequest | cmd.CancelRequest | cmd.RejectRequest | cmd.FailRequest) -> None:
        life = self.lives.pop(command.request_id, None)
        if life is None:
            raise ContractError(f"a second end of one request: {command}")
        self._ended.append(command.request_id)
        self.endings[type(command).__name__] += 1
        if isinstance(command, cmd.CompleteRequest):
            if not life.has_result and any(not task.outputs for task in life.graph.tasks):
                raise ContractError(f"{command.request_id} is complete without a result")
        elif isinstance(command, cmd.CancelRequest):
            if not life.cancelled:
                raise ContractError(f"{command.request_id} was not cancelled")
        elif isinstance(command, cmd.FailRequest) and command.status_code == 503:
            if life.num_harmed <= MAX_RETRIES:
                raise ContractError(f"{command} after {life.num_harmed} dispatches that a peer was lost from")
        elif not life.blamed:
            raise ContractError(f"{command} for no reason")

    # The books

    def _check_rest(self) -> None:
        """Nothing will happen any more."""
        stuck = [process.rank for process in self.processes if any(process.lanes.values())]
        if stuck:
            raise ContractError(f"ranks {stuck} wait for each other")
        if self.lives:
            raise ContractError(f"requests {sorted(self.lives)} never end")
        if not self.control.idle:
            raise ContractError("the control plane still waits for something")
        if self.control.state.ranks.free_in_order != tuple(range(len(self.processes))):
            raise ContractError("a rank was never given back")
        for process in self.processes:
            if process.store:
                raise ContractError(f"rank {process.rank} still holds {min(process.store)}")

    def _after(self, delay_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (self._time_s + delay_s, self._num_queued, happen, arguments))

    def _up_to(self, most_s: float) -> float:
        return self.draw.random() ** 3 * most_s

    def _say(self, text: str) -> None:
        if self.log is not None:
            self.log(f"{self._time_s:10.4f} {text}")
