"""Collectives between simulated processes: the edges of :mod:`gfdit.comm`, with their agreement and their faults.

What is modelled is what a scheduler can get wrong: the order of operations on an edge, edges that were aborted and
not reset, generations. Data goes from one process to the other as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gfdit.comm import CommAborted, CommError, CommTimeout
from gfdit.comm.agreement import NUM_SLOTS
from gfdit.core.commands import Lane
from tests.whole.books import Operation
from tests.whole.strands import Strand

if TYPE_CHECKING:
    from tests.whole.workers import Worker

LANES: tuple[Lane, ...] = ("compute", "migration")
WAKE_S = 0.01  # until a rank sees what another one has written, at most


@dataclass(slots=True)
class Sent:
    """One message on a directed edge."""

    generation: int
    number: int
    what: tuple[str, tuple[int, ...]]
    data: torch.Tensor | None


@dataclass(slots=True)
class Mark:
    """An abort, of the edge in one generation. ``by`` is the operation that has failed on it, if one has."""

    generation: int
    by: Operation | None


@dataclass(slots=True)
class Heap:
    """What all processes share, by directed edge; it outlives them."""

    sent: dict[tuple[Lane, int, int], deque[Sent]] = field(default_factory=dict)
    marks: dict[tuple[Lane, int, int], Mark] = field(default_factory=dict)
    waiting: dict[tuple[Lane, int], Strand] = field(default_factory=dict)  # in an operation

    def of(self, lane: Lane, source: int, destination: int) -> deque[Sent]:
        return self.sent.setdefault((lane, source, destination), deque())


@dataclass(slots=True)
class End:
    """A rank's end of the two edges that it shares with a peer. A process that has joined knows no generation.

    ``epoch`` is that of the control process that has had it reset last. ``broken_by``: an operation that has
    failed here since.
    """

    generation: int | None
    epoch: int = 0
    num_sent: int = 0
    num_received: int = 0
    broken: bool = False
    broken_by: Operation | None = None


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    ranks: tuple[int, ...]
    rank: int

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank != self.rank)


class SimulatedComm:
    """As much of :class:`~gfdit.comm.GroupFreeComm` as lanes and copies use, of one lane of one process."""

    device = torch.device("cpu")
    num_failures = 0  # operations raise their own

    def __init__(self, worker: Worker, lane: Lane, timeout_s: float) -> None:
        self.rank = worker.rank
        self.world_size = worker.world.num_ranks
        self._worker = worker
        self._lane = self.lane_name = lane
        self._timeout_s = timeout_s
        self._heap = worker.world.heap
        generation = None if worker.incarnation else 0
        self._ends = {peer: End(generation) for peer in range(self.world_size) if peer != self.rank}

    def group(self, ranks: Sequence[int]) -> SimulatedGroup:
        return SimulatedGroup(tuple(ranks), self.rank)

    def barrier(self, group: SimulatedGroup) -> None:
        """Everybody tells everybody."""
        what = ("barrier", group.ranks)
        self._begin(group.peers)
        try:
            for peer in group.peers:
                self._send(peer, what, None)
            for peer in group.peers:
                self._receive(peer, what, group.peers)
        except CommError:
            self._break(group.peers)
            raise

    def broadcast(self, x: torch.Tensor, src: int, group: SimulatedGroup) -> None:
        """The source goes on as soon as there is room for what it sends."""
        what = ("broadcast", group.ranks)
        peers = group.peers if src == self.rank else (src,)
        self._begin(peers)
        try:
            if src == self.rank:
                for peer in peers:
                    self._send(peer, what, x.clone())
            else:
                data = self._receive(src, what, peers)
                assert data is not None
                x.copy_(data)
        except CommError:
            self._break(peers)
            raise

    def check(self) -> None:
        """Operations raise their own errors."""

    synchronize = check

    def abort(self, ranks: Iterable[int], newest: int | None = None) -> None:
        if not self._worker.alive:
            return
        by = self._worker.current_operation(self._lane)
        for peer in sorted(set(ranks) - {self.rank}):
            end = self._ends[peer]
            if newest is not None and end.generation is not None and end.generation > newest:
                continue
            for edge in ((self.rank, peer), (peer, self.rank)):
                if end.generation is not None:
                    self._heap.marks[(self._lane, *edge)] = Mark(end.generation, by)
            self._wake(peer)
        self._wake(self.rank)

    def reset(self, peers: Iterable[int], generation: int) -> None:
        for peer in sorted(set(peers) - {self.rank}):
            end = self._ends[peer]
            if end.generation is not None and generation <= end.generation:
                self._worker.world.accuse(
                    f"rank {self.rank}: generation {generation} of an edge is not ahead of {end.generation}"
                )
            self._ends[peer] = End(generation, self._worker.current_epoch(self._lane))

    # One operation

    def _begin(self, peers: Iterable[int]) -> None:
        """Raise if an edge was aborted: to be expected of what was sent before the control plane knew of that."""
        operation = self._worker.current_operation(self._lane)
        for peer in peers:
            end = self._ends[peer]
            if end.generation is None or (operation is not None and end.epoch < operation.epoch):
                self._worker.world.accuse(
                    f"ranks {self.rank} and {peer} use an edge on lane {self._lane} that this control process "
                    "has not reset"
                )
            if (mark := self._aborted(peer)) is not None:
                by = mark.by
                if operation is not None and by is not None and by.is_known_before(operation):
                    self._worker.world.accuse(
                        f"ranks {self.rank} and {peer} use an edge on lane {self._lane} that was not reset"
                    )
                self._break(peers)
                raise CommAborted(self.rank, (peer, self.rank), lane=self._lane)

    def _aborted(self, peer: int) -> Mark | None:
        end = self._ends[peer]
        if end.broken:
            return Mark(end.generation or 0, end.broken_by)
        mark = self._heap.marks.get((self._lane, peer, self.rank))
        return mark if mark is not None and mark.generation == end.generation else None

    def _break(self, peers: Iterable[int]) -> None:
        for peer in peers:
            end = self._ends[peer]
            if not end.broken:
                end.broken, end.broken_by = True, self._worker.current_operation(self._lane)

    def _send(self, peer: int, what: tuple[str, tuple[int, ...]], data: torch.Tensor | None) -> None:
        end, queue = self._ends[peer], self._heap.of(self._lane, self.rank, peer)
        assert end.generation is not None
        while queue and queue[0].generation < end.generation:
            queue.popleft()
        self._await(lambda: len(queue) < NUM_SLOTS, (peer,))
        queue.append(Sent(end.generation, end.num_sent, what, data))
        end.num_sent += 1
        self._wake(peer)

    def _receive(
        self, peer: int, what: tuple[str, tuple[int, ...]], peers: tuple[int, ...]
    ) -> torch.Tensor | None:
        end, queue = self._ends[peer], self._heap.of(self._lane, peer, self.rank)
        assert end.generation is not None
        generation = end.generation

        def is_there() -> bool:
            while queue and queue[0].generation < generation:
                queue.popleft()
            return bool(queue) and queue[0].generation == generation

        self._await(is_there, peers)
        found = queue.popleft()
        if (found.number, found.what) != (end.num_received, what):
            self._worker.world.accuse(
                f"ranks {self.rank} and {peer} disagree on lane {self._lane}: {what} number {end.num_received} is "
                f"expected, there is {found.what} number {found.number}"
            )
        end.num_received += 1
        self._wake(peer)
        return found.data

    def _await(self, done: Any, peers: Iterable[int]) -> None:
        """What is there counts, even if the edge was aborted since."""
        world = self._worker.world
        deadline_s = world.scheduler.time_s + self._timeout_s
        place = (self._lane, self.rank)
        while not done():
            for peer in peers:
                if self._aborted(peer) is not None:
                    raise CommAborted(self.rank, (peer, self.rank), lane=self._lane)
            if (left_s := deadline_s - world.scheduler.time_s) <= 0:
                raise CommTimeout(self.rank, (next(iter(peers)), self.rank), lane=self._lane)
            assert world.scheduler.current is not None
            self._heap.waiting[place] = world.scheduler.current
            world.scheduler.wait(left_s)

    def _wake(self, rank: int) -> None:
        if (strand := self._heap.waiting.get((self._lane, rank))) is not None:
            strand.wake(self._worker.world.up_to(WAKE_S))
