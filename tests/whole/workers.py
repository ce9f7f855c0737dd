"""Simulated worker processes: the real lanes, claims and watch, on a model of what tasks do.

A worker's executor checks that every input is there, element by element; what must never be asked of a worker is a
:class:`~tests.whole.books.ContractError`.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gfdit.comm import CommTimeout
from gfdit.core import ExecutionLayout, Task
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.views import ArtifactView, Box, FieldView, inside
from gfdit.core.commands import Lane
from gfdit.core.events import MemoryPoint, MemoryUse
from gfdit.core.tasks import artifact_kind
from gfdit.migration.parts import ArtifactParts
from gfdit.runtime import messages as msg
from gfdit.runtime.completion import HostMonitor
from gfdit.runtime.compute_lane import ComputeLane
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.executor import PeerError, Results
from gfdit.runtime.messages import Holding
from gfdit.runtime.migration_lane import MigrationLane
from gfdit.runtime.sockets import ORPHAN_GRACE_S
from gfdit.runtime.streams import Streams
from gfdit.runtime.watch import Watch
from tests.whole.books import Operation
from tests.whole.comm import SimulatedComm
from tests.whole.strands import Host, SimulatedCondition, Strand
from tests.whole.workflows import MAX_PARTS, SOUND, WHOLE_MODEL, parts_of

if TYPE_CHECKING:
    from tests.whole.world import World

SPLIT_VIEWS = (
    ArtifactView((FieldView("rows", "float32", 4, (1, 12), sp_dim=1),)),  # in parts of the same shape
    ArtifactView((FieldView("branches", "float32", 4, (2, 12), sp_dim=1, cfg_dim=0),)),
)


@dataclass(slots=True)
class Contents:
    """What artifacts consist of in one run: alike for those of one kind of a request."""

    seed: int
    views: tuple[ArtifactView, ...]
    _views: dict[str, ArtifactView] = field(default_factory=dict)
    _tensors: dict[tuple[FieldView, Box], torch.Tensor] = field(default_factory=dict)

    def view(self, artifact: str) -> ArtifactView:
        if (view := self._views.get(artifact)) is None:
            request_id = artifact.partition("/")[0]
            name = f"{self.seed}/{request_id}/{artifact_kind(request_id, artifact)}"
            view = self._views[artifact] = self.views[zlib.crc32(name.encode()) % len(self.views)]
        return view

    def tensor(self, spec: FieldView, box: Box) -> torch.Tensor:
        """Every element says where it belongs."""
        if (found := self._tensors.get((spec, box))) is None:
            whole = torch.arange(1, math.prod(spec.shape) + 1, dtype=torch.float32).view(spec.shape)
            found = self._tensors[spec, box] = whole[inside(spec.whole, box)].clone()
        return found

    def parts(self, artifact: str, layout: ExecutionLayout, rank: int) -> ArtifactParts:
        fields = self.view(artifact).fields
        tensors = {spec.name: self.tensor(spec, spec.box(layout, rank)) for spec in fields}
        return ArtifactParts(artifact.encode(), tensors, layout)

    def to_report(self, task: Task) -> tuple[tuple[str, ArtifactView], ...]:
        """Of outputs that are not like an input."""
        kinds = {artifact_kind(task.request_id, name) for name in task.inputs}
        new = [name for name in task.outputs if artifact_kind(task.request_id, name) not in kinds]
        return tuple((name, self.view(name)) for name in new)


class TaskRaisedError(Exception):
    """A task failed by itself."""


class ModelExecutor:
    """A :class:`~gfdit.runtime.executor.TaskExecutor` without a model; its components are names."""

    device = torch.device("cpu")
    streams: Streams

    def __init__(self, worker: Worker, comm: SimulatedComm) -> None:
        self.store: dict[str, ArtifactParts] = {}
        pool = worker.world.pool
        self.loaded = {WHOLE_MODEL} if pool is None else pool.pinned_on(worker.rank)
        self._worker = worker
        self._comm = comm

    def execute(self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: Mapping[str, bytes]) -> Results:
        worker, world = self._worker, self._worker.world
        operation = worker.current_operation("compute")
        assert operation is not None and isinstance(operation.command, cmd.RunTask)
        worker.check_is_new("compute", operation.command.dispatch_id)
        for task in tasks:
            if not task.inputs and payloads.get(task.request_id) != task.request_id.encode():
                world.accuse(f"rank {worker.rank} runs {task.id} without its payload")
            self._check_inputs(task, layout)
            if (component := task.component or WHOLE_MODEL) not in self.loaded:
                world.accuse(f"rank {worker.rank} runs {task.id} without {component}")
        world.decide_fate(operation)
        if worker.is_faulty and world.draw.random() < world.weather.faulty_share:
            self._raise(operation)
        if world.is_too_large(operation.command) and operation.culprit == worker.rank:
            raise torch.OutOfMemoryError("a rank has too little memory")
        group = self._comm.group(layout.ranks)
        seconds = operation.seconds * worker.slowness
        try:
            if len(layout.ranks) > 1:
                self._comm.barrier(group)
            world.scheduler.sleep(seconds / 2)
            self._fail_if_told(operation, late=False)
            self._suffer_from_flaws(operation, tasks)
            worker.get_stuck_if_told()
            if len(layout.ranks) > 1:
                self._comm.barrier(group)
            if world.pool is None:
                world.scheduler.sleep(seconds / 2)
            else:
                self._stream(tasks, seconds / 2)
            self._fail_if_told(operation, late=True)
        except Exception:
            # How far it got is open, but for its inputs.
            names = [name for task in tasks for name in task.outputs if world.draw.random() < 0.5]
            self._put(names, layout)
            raise
        self._put([name for task in tasks for name in task.outputs], layout)
        made = {}
        if worker.rank == layout.ranks[0]:
            made = {
                task.request_id: b"result of " + task.request_id.encode() for task in tasks if not task.outputs
            }
        return lambda: made

    def _stream(self, tasks: tuple[Task, ...], seconds: float) -> None:
        """Part after part: what is read on its way, if all of it is wanted, and what is handed on meanwhile."""
        world, streams = self._worker.world, self.streams
        for index in range(MAX_PARTS + 1):
            world.scheduler.sleep(seconds / (MAX_PARTS + 1))
            for task in tasks:
                for name in task.deferred:
                    if streams.is_stream(name) and index < parts_of(name) - (len(name) % 5 == 0):
                        found, whole = streams.fetch(name, index), world.parts.part(name, index)
                        if not torch.equal(found, whole):
                            world.accuse(f"rank {self._worker.rank} gets {found} for part {index} of {name}")
                        world.counts["parts read on their way"] += 1
                life = world.lives.get(task.request_id)
                streamed = () if life is None else life.streamed
                for name in task.outputs:
                    if name in streamed and index < parts_of(name):
                        streams.emit(name, world.parts.part(name, index))

    def _check_inputs(self, task: Task, layout: ExecutionLayout) -> None:
        worker = self._worker
        for name in task.reads:
            if self.streams.is_stream(name):
                continue
            held = self.store.get(name)
            needed = worker.world.contents.parts(name, layout, worker.rank)
            if held is None or not _are_alike(held, needed):
                worker.world.accuse(f"rank {worker.rank} runs {task.id} without {name}")

    def _fail_if_told(self, operation: Operation, *, late: bool) -> None:
        if operation.culprit != self._worker.rank or operation.is_late != late:
            return
        if operation.fault == "echo":
            raise CommTimeout(self._worker.rank, (operation.ranks[0], self._worker.rank))
        if operation.fault == "error":
            self._raise(operation)

    def _suffer_from_flaws(self, operation: Operation, tasks: tuple[Task, ...]) -> None:
        """Of the component that runs."""
        worker, world = self._worker, self._worker.world
        if world.pool is None or operation.culprit != worker.rank:
            return
        flaws = world.pool.flaws.get(tasks[0].component, SOUND)
        if world.draw.random() < flaws.task_kills:
            world.counts["tasks that end their process"] += 1
            worker.end_itself()
        if world.draw.random() < flaws.task_fails:
            world.counts["tasks that fail"] += 1
            self._raise(operation)

    @staticmethod
    def _raise(operation: Operation) -> None:
        operation.blamed = True
        for life in operation.lives:
            life.blamed = True
        raise TaskRaisedError("it raised")

    def _put(self, names: list[str], layout: ExecutionLayout) -> None:
        worker = self._worker
        for name in names:
            self.store[name] = worker.world.contents.parts(name, layout, worker.rank)

    def output_views(self, tasks: tuple[Task, ...]) -> tuple[tuple[str, ArtifactView], ...]:
        return tuple(view for task in tasks for view in self._worker.world.contents.to_report(task))

    def load_component(self, name: str, evict: tuple[str, ...]) -> int:
        worker, world = self._worker, self._worker.world
        pool = world.pool
        assert pool is not None
        command = worker.current["compute"]
        worker.check_is_new("compute", command.load_id)
        if name in self.loaded or not self.loaded.issuperset(evict):
            world.accuse(f"rank {worker.rank}, which has {sorted(self.loaded)}, is told {command}")
        self.loaded.difference_update(evict)
        world.counts["unloads"] += len(evict)
        world.counts["loads"] += 1
        if pool.component_bytes is not None and pool.num_bytes(self.loaded | {name}) > pool.component_bytes:
            world.accuse(f"rank {worker.rank}, which has {sorted(self.loaded)}, has no room for {name}")
        flaws = pool.flaws.get(name, SOUND)
        world.scheduler.sleep(pool.components[name].load_s * world.draw.uniform(0.5, 2.0) * worker.slowness)
        worker.get_stuck_if_told()
        if world.draw.random() < flaws.load_kills:
            world.counts["loads that end their process"] += 1
            worker.end_itself()
        if world.draw.random() < max(flaws.load_fails, world.weather.load_error):
            world.counts["loads that fail"] += 1
            raise TaskRaisedError(f"{name} cannot be read")
        self.loaded.add(name)
        return pool.measured[name]

    def resident(self) -> tuple[str, ...]:
        return tuple(sorted(self.loaded)) if self._worker.world.pool is not None else ()

    def memory_use(self) -> MemoryUse | None:
        return None

    def memory_points(self) -> tuple[MemoryPoint, ...]:
        return ()

    def reclaim(self) -> None:
        pass

    def export_artifact(self, artifact: str) -> ArtifactParts:
        """Of what is not there, or another part, it must have been disturbed, or be a copy to fall back on."""
        worker, world = self._worker, self._worker.world
        command = worker.current["migration"]
        operation = worker.current_operation("migration")
        assert isinstance(command, cmd.Migrate) and operation is not None
        worker.check_is_new("migration", command.migration_id)
        held, layout = self.store.get(artifact), dict(command.held)[worker.rank]
        view = world.contents.view(artifact)
        if held is None or held.layout is None or not view.same_part(worker.rank, held.layout, layout):
            if not (command.keep or any(life.disturbed for life in operation.lives)):
                world.accuse(f"rank {worker.rank} does not hold its part of {artifact}")
        elif world.draw.random() < world.weather.copy_error:
            operation.blamed = True
            for life in operation.lives:
                life.blamed = True
            raise TypeError("cannot pickle this")
        return self.store[artifact]

    def import_artifact(self, artifact: str, parts: ArtifactParts, view: ArtifactView) -> None:
        if parts.metadata != artifact.encode():
            self._worker.world.accuse(f"rank {self._worker.rank} is brought {parts.metadata!r} for {artifact}")
        self.store[artifact] = parts

    def free(self, artifacts: tuple[str, ...]) -> None:
        for name in artifacts:
            self.store.pop(name, None)

    def holdings(self) -> tuple[Holding, ...]:
        contents = self._worker.world.contents
        return tuple(
            Holding(name, parts.layout, contents.view(name))
            for name, parts in self.store.items()
            if parts.layout is not None
        )

    def probe(self) -> None:
        worker = self._worker
        if worker.is_faulty and worker.world.draw.random() < worker.world.weather.probe_tells:
            raise TaskRaisedError("one and one is three")

    def call(self, method: str, payload: bytes) -> bytes:
        return method.encode()

    def close(self) -> None:
        pass


def _are_alike(held: ArtifactParts, needed: ArtifactParts) -> bool:
    return held.tensors.keys() == needed.tensors.keys() and all(
        held.tensors[name] is tensor or torch.equal(held.tensors[name], tensor)
        for name, tensor in needed.tensors.items()
    )


class SimulatedInbox:
    """One queue of a rank, in the order in which the control process has sent."""

    def __init__(self, worker: Worker, lane: str) -> None:
        self.first_id = 0
        self.ended = False
        self.reconnected = 0  # the first number of the control process that was heard of last
        self.messages: deque[Any] = deque()
        self.strand: Strand | None = None  # that waits for the next one
        self._worker = worker
        self._lane = lane

    @property
    def is_idle(self) -> bool:
        return not self.messages and self.strand is not None

    def put(self, message: Any) -> None:
        self.messages.append(message)
        if self.strand is not None:
            self.strand.wake()

    def get(self, timeout_s: float | None = None) -> Any | None:
        world = self._worker.world
        self._worker.current[self._lane] = None
        self.strand = world.scheduler.current
        while not self.messages:
            self.ended = world.is_closed
            if self.ended or not world.scheduler.wait(timeout_s):
                self.strand = None
                return None
        self.strand = None
        if self._lane == "migration":
            world.scheduler.sleep(world.up_to(world.weather.longest_lag_s))
            if world.draw.random() < world.weather.lane_error:
                raise MemoryError
        message = self._worker.current[self._lane] = self.messages.popleft()
        if isinstance(message, msg.Reconnect):
            self.reconnected = message.first_id
        return message


class SimulatedReports:
    """A rank's way to the control process and to the engine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def tell(self, message: msg.WorkerMessage) -> None:
        match message:
            case ev.MigrationFinished(number, error=error) if error:
                self._disturb(number)
            case ev.TaskFailed(number, caused_by_peer=True):  # it may have waited in vain for a copy still to come
                self._disturb(number)
        self._worker.world.network.from_worker(self._worker, message)

    def _disturb(self, number: int) -> None:
        for life in self._worker.world.operations[number].lives:
            life.disturbed = True

    def deliver(self, results: dict[str, bytes]) -> None:
        for request_id, value in results.items():
            if request_id in self._worker.world.lives:
                self._worker.world.lives[request_id].has_result = True
            self._worker.world.network.result(self._worker, msg.Result(request_id, value))


class SimulatedDeliveries:
    """Results that take their time, each on a strand of its own that waits for the one before."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._under_way: deque[Callable[[], None]] = deque()
        self._done = SimulatedCondition(worker.world.scheduler)

    def put(self, deliver: Callable[[], None]) -> None:
        self._under_way.append(deliver)
        self._worker.world.scheduler.spawn(self._worker, "delivery", lambda: self._run(deliver))

    def _run(self, deliver: Callable[[], None]) -> None:
        world = self._worker.world
        while self._under_way[0] is not deliver:
            self._done.wait()
        world.scheduler.sleep(world.up_to(world.weather.longest_delivery_s or 0.0))
        deliver()
        self._under_way.popleft()
        self._done.notify_all()

    def drain(self) -> None:
        while self._under_way:
            self._done.wait()

    def close(self) -> None:
        if self._worker.world.scheduler.current is not None:  # else the run is over, and no strand ends by itself
            self.drain()


class Worker(Host):
    """One process of a rank, and what its parent has of it: :class:`gfdit.runtime.supervisor.Process`."""

    def __init__(self, world: World, rank: int, config: RuntimeConfig) -> None:
        super().__init__(f"rank {rank}.{config.incarnation}")
        self.world = world
        self.rank = rank
        self.incarnation = config.incarnation
        self.pid = self.sentinel = world.new_pid()
        self.exitcode: int | None = None
        self.slowness = 10.0 if world.draw.random() < world.weather.slow_rank else 1.0
        self.is_ready = False
        self.has_worked = False  # as far as the control process knows
        self.to_get_stuck = False
        self.is_faulty = False  # its tasks raise
        self.silenced = False  # what it sent last never left
        self.current: dict[str, Any] = {}  # message of each lane
        self.lanes = {name: SimulatedInbox(self, name) for name in ("compute", "migration", "watch")}
        self.reports = SimulatedReports(self)
        self.comms: dict[Lane, SimulatedComm] = {
            lane: SimulatedComm(self, lane, config.comm_timeout_s) for lane in ("compute", "migration")
        }
        self.executor = ModelExecutor(self, self.comms["compute"])
        self._config = config

    # As its parent sees it

    def is_alive(self) -> bool:
        return self.alive

    def kill(self) -> None:
        if self.alive:
            self.end()
            self.exitcode = -9
            self.world.on_worker_end(self)

    def end_itself(self) -> None:
        """By what the strand that runs now does, which never goes on."""
        self.kill()
        self.world.scheduler.vanish()

    def join(self, timeout: float | None = None) -> None:
        scheduler = self.world.scheduler
        until_s = math.inf if timeout is None else scheduler.time_s + timeout
        while self.alive and scheduler.time_s < until_s:
            scheduler.wait(0.05)

    # Its life, as in gfdit.runtime.worker_process

    def start(self, delay_s: float, failure: str) -> None:
        self.world.scheduler.spawn(self, "compute", lambda: self._serve(failure), delay_s)
        self._lease = self.world.scheduler.spawn(self, "lease", self._end_with_server)

    def _end_with_server(self) -> None:
        while not self.world.is_closed:
            self.world.scheduler.wait()
        self.world.scheduler.sleep(ORPHAN_GRACE_S)
        self.kill()
        self.world.scheduler.vanish()

    def _serve(self, failure: str) -> None:
        world, config = self.world, self._config
        while failure == "hang":
            world.scheduler.wait()
        if failure == "error":
            self.reports.tell(msg.WorkerFailed(self.rank, self.incarnation, "out of memory"))
        if failure:
            self.exitcode = 1
            self.end()
            world.on_worker_end(self)
            return
        inboxes = self.lanes
        clock = world.clock
        migration = MigrationLane(
            self.rank,
            inboxes["migration"],
            self.reports,
            self.executor,
            self.comms["migration"],  # type: ignore[arg-type]
            config.comm_timeout_s,
            clock,
            SimulatedCondition(world.scheduler),
        )
        compute = ComputeLane(
            self.rank,
            self.incarnation,
            inboxes["compute"],
            self.reports,
            self.executor,
            self.comms["compute"],  # type: ignore[arg-type]
            migration,
            world.claims,
            HostMonitor(clock),
            None if world.weather.longest_delivery_s is None else SimulatedDeliveries(self),
            clock,
        )
        watch = Watch(
            msg.Heartbeat(self.rank, self.incarnation),
            config.heartbeat_timeout_s / 10,
            inboxes["watch"],  # type: ignore[arg-type]
            self.reports,
            list(self.comms.values()),  # type: ignore[arg-type]
            (inboxes["compute"], inboxes["migration"]),
            migration.wake,
        )
        world.scheduler.spawn(self, "migration", lambda: self._guard(migration.run))
        self.is_ready = True
        self.reports.tell(msg.WorkerReady(self.rank, self.incarnation))
        world.scheduler.spawn(self, "watch", watch.run)
        try:
            compute.run()
            self.exitcode = 0
        except PeerError as error:
            self._say_failed(error)
            self.exitcode = 1
        self.end()
        world.on_worker_end(self)

    def note_end_of_server(self) -> None:
        self._lease.wake()
        for inbox in self.lanes.values():
            if inbox.strand is not None:
                inbox.strand.wake()

    def _guard(self, run: Callable[[], None]) -> None:
        """A thread that ends by itself ends its process, in the end."""
        try:
            run()
        except MemoryError as error:
            self._say_failed(error)

    def _say_failed(self, error: Exception) -> None:
        self.reports.tell(msg.WorkerFailed(self.rank, self.incarnation, repr(error)))

    def get_stuck_if_told(self) -> None:
        """In a task, while the rest of the process goes on."""
        while self.to_get_stuck:
            self.world.scheduler.wait()

    def current_operation(self, lane: str) -> Operation | None:
        """Which the strand that runs now is at; None of one that is no part of ``lane``."""
        strand, message = self.world.scheduler.current, self.current.get(lane)
        if strand is None or strand.host is not self or strand.name != lane:
            return None
        match message:
            case cmd.RunTask(number) | cmd.Migrate(number):
                return self.world.operations.get(number)
        return None

    def check_is_new(self, lane: str, number: int) -> None:
        """What the control process before has wanted is not done after the lane has heard of the one there is."""
        if number < self.lanes[lane].reconnected:
            self.world.accuse(f"rank {self.rank} does number {number}, of a control process that is gone")

    def current_epoch(self, lane: str) -> int:
        """Of the control process that has sent what ``lane`` is at."""
        message = self.current.get(lane)
        assert isinstance(message, cmd.ResetEdges)
        return message.reset_id >> 32
