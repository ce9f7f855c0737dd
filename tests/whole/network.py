"""Simulated sockets: the ends that engine and control process have of them, and what happens on the way.

What one thread tells one peer arrives in that order, everything else in any. A control process that ends takes
with it what it had received, and of each queue what has not arrived at some point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gfdit.core import events as ev
from gfdit.observe.snapshot import Snapshot
from gfdit.runtime import messages as msg
from gfdit.runtime.client import FromRuntime
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.sockets import Arrived, Queue
from tests.whole.strands import Host, Strand

if TYPE_CHECKING:
    from tests.whole.workers import Worker
    from tests.whole.world import World

TURN_S = 0.002
"""What a turn of the control process takes, at most."""
LONGEST_S = 0.01
"""From the control process to a rank or the engine, at most."""


class Channel:
    """First in, first out; every message takes its time."""

    def __init__(self, world: World, longest_s: float) -> None:
        self._world = world
        self._longest_s = longest_s
        self._last_s = 0.0
        self._is_cut = False

    def send(self, arrive: Callable[..., None], *arguments: Any, counts: bool = True) -> None:
        """``counts``: the world does not come to rest before."""
        scheduler = self._world.scheduler
        at_s = self._last_s = max(self._last_s, scheduler.time_s + self._world.up_to(self._longest_s))
        self._world.network.num_on_their_way += counts
        scheduler.after(at_s - scheduler.time_s, self._arrive, arrive, arguments, counts)

    def cut(self) -> None:
        """What is on its way is lost."""
        self._is_cut = True

    def _arrive(self, arrive: Callable[..., None], arguments: tuple[Any, ...], counts: bool) -> None:
        self._world.network.num_on_their_way -= counts
        if not self._is_cut:
            arrive(*arguments)


class Network:
    """Between ranks and whichever control process and engine there is."""

    def __init__(self, world: World) -> None:
        self.num_on_their_way = 0
        self.port: SimulatedPort | None = None
        self._world = world
        self._waiting: list[msg.WorkerMessage] = []  # for a control process
        self._from_workers: dict[tuple[Worker, str], Channel] = {}
        self._results: dict[Worker, Channel] = {}

    def bind(self, port: SimulatedPort) -> None:
        self.port = port
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._to_control(message)

    def unbind(self) -> None:
        self.port = None

    def from_worker(self, worker: Worker, message: msg.WorkerMessage) -> None:
        """In order for each lane. Second copies of what the control plane hears of come any time."""
        world, strand = self._world, self._world.scheduler.current
        if not worker.alive:
            return
        assert strand is not None
        key = worker, strand.name
        if (channel := self._from_workers.get(key)) is None:
            is_beat = strand.name == "watch"
            longest_s = LONGEST_S if is_beat else world.weather.longest_delay_s
            channel = self._from_workers[key] = Channel(world, longest_s)
        counts = not isinstance(message, msg.Heartbeat)
        channel.send(self._leave, worker, message, counts=counts)
        if isinstance(message, _REPEATED) and world.draw.random() < world.weather.duplicate:
            world.scheduler.after(world.up_to(5.0), channel.send, self._leave, worker, message)

    def _leave(self, worker: Worker, message: msg.WorkerMessage) -> None:
        if not worker.silenced:
            self._to_control(message)

    def _to_control(self, message: msg.WorkerMessage) -> None:
        if self.port is None:
            self._waiting.append(message)
        else:
            self.port.from_workers.append(message)
            self.port.wake()

    def result(self, worker: Worker, message: msg.Result) -> None:
        """To the engine."""
        if worker not in self._results:
            self._results[worker] = Channel(self._world, self._world.weather.longest_delay_s)
        if worker.alive:
            self._results[worker].send(self._world.link.put_result, worker, message)


_REPEATED = (
    ev.TaskStarted,
    ev.TaskDispatched,
    ev.TaskFinished,
    ev.TaskFailed,
    ev.MigrationFinished,
    ev.EdgesReset,
    ev.ComponentLoaded,
)


class SimulatedPort:
    """A :class:`~gfdit.runtime.sockets.ControlPort`."""

    def __init__(self, world: World, config: RuntimeConfig) -> None:
        self.config = config
        self.from_workers: list[msg.WorkerMessage] = []
        self.from_engine: list[msg.EngineMessage] = []
        self.ended = False
        self.strand: Strand | None = None
        self._world = world
        self._incarnations: dict[int, int] = {}
        self._queues: dict[tuple[Queue, int], Channel] = {}
        self._to_engine = Channel(world, LONGEST_S)
        self._to_operators = Channel(world, 0.0)

    def wake(self) -> None:
        if self.strand is not None:
            self.strand.wake()

    @property
    def is_empty(self) -> bool:
        return not (self.from_workers or self.from_engine or self.ended)

    def wait(self, timeout_s: float | None, sentinels: Iterable[int]) -> Arrived:
        scheduler = self._world.scheduler
        scheduler.sleep(self._world.up_to(TURN_S))
        if self.is_empty and (timeout_s is None or timeout_s > 0) and not self._world.any_ended(sentinels):
            self.strand = scheduler.current
            scheduler.wait(timeout_s)
            self.strand = None
        arrived = Arrived(self.from_workers, self.from_engine, self.ended)
        self.from_workers, self.from_engine = [], []
        return arrived

    def send(self, queue: Queue, ranks: Sequence[int], message: msgspec.Struct) -> None:
        for rank in ranks:
            self._queues[queue, rank].send(
                self._world.put_at_worker, rank, self._incarnations[rank], queue, message
            )

    def tell(self, message: msg.ControlMessage) -> None:
        counts = not isinstance(message, (msg.Alive, Snapshot))
        # What operators are told, and how often, is no part of what is drawn.
        channel = self._to_operators if isinstance(message, Snapshot) else self._to_engine
        channel.send(self._world.link.put_control, self.config.epoch, message, counts=counts)

    def renew(self, rank: int, config: RuntimeConfig) -> None:
        self._incarnations[rank] = config.incarnation
        for queue in ("compute", "migration", "watch"):
            if (queue, rank) in self._queues:
                self._queues[queue, rank].cut()
            self._queues[queue, rank] = Channel(self._world, LONGEST_S)

    def close(self) -> None:
        """All that was sent arrives."""
        self._world.scheduler.sleep(LONGEST_S)

    def lose(self) -> None:
        """Its process has ended."""
        for channel in (*self._queues.values(), self._to_engine):
            if self._world.draw.random() < 0.5:
                channel.cut()


class SimulatedLink:
    """An :class:`~gfdit.runtime.client.EngineLink`."""

    pid = 1

    def __init__(self, world: World) -> None:
        self.host: Host | None = None  # the control process
        self.returncode: int | None = None
        self._world = world
        self._port: SimulatedPort | None = None
        self._to_control = Channel(world, LONGEST_S)
        self._results: list[msg.Result] = []
        self._from_control: list[msg.ControlMessage] = []
        self._is_awake = False
        self._strand: Strand | None = None

    @property
    def is_empty(self) -> bool:
        return not (self._results or self._from_control or self._is_awake)

    def start(self, config: RuntimeConfig) -> None:
        self.returncode = None
        self._to_control = Channel(self._world, LONGEST_S)
        self._port = SimulatedPort(self._world, config)
        self.host = self._world.start_control(config, self._port)

    def wait(self, timeout_s: float) -> FromRuntime:
        if self.is_empty and self.returncode is None:
            self._strand = self._world.scheduler.current
            self._world.scheduler.wait(timeout_s)
            self._strand = None
        arrived = FromRuntime(self._results, self._from_control, self.returncode is not None)
        self._results, self._from_control, self._is_awake = [], [], False
        return arrived

    def tell(self, message: msg.EngineMessage) -> None:
        assert self._port is not None
        self._to_control.send(self._put_at_port, self._port, message, counts=not isinstance(message, msg.Alive))

    def _put_at_port(self, port: SimulatedPort, message: msg.EngineMessage) -> None:
        port.from_engine.append(message)
        port.wake()

    def wake(self) -> None:
        self._is_awake = True
        self._stir()

    def kill(self) -> None:
        self._world.end_control(-9)

    def drop(self) -> None:
        self._to_control.cut()
        self._from_control = []

    def close(self, grace_s: float) -> None:
        assert self._port is not None
        self._port.ended = True
        self._port.wake()
        scheduler = self._world.scheduler
        until_s = scheduler.time_s + grace_s
        while self.returncode is None and scheduler.time_s < until_s:
            scheduler.wait(0.1)
        if self.returncode is None:
            self.kill()

    # What comes

    def ended(self, returncode: int) -> None:
        self.returncode = returncode
        self._stir()

    def put_control(self, epoch: int, message: msg.ControlMessage) -> None:
        if self._port is not None and self._port.config.epoch == epoch:
            self._from_control.append(message)
            self._stir()

    def put_result(self, worker: Worker, message: msg.Result) -> None:
        if not worker.silenced:
            self._results.append(message)
            self._stir()

    def _stir(self) -> None:
        if self._strand is not None:
            self._strand.wake()
