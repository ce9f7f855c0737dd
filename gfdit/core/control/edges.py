"""Edges between ranks that are reset: which resets are under way, and the generation each edge is in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from gfdit.core.commands import Lane, ResetEdges
from gfdit.core.control.ranks import RankPool
from gfdit.core.events import EdgesReset

LANES: tuple[Lane, ...] = ("compute", "migration")


@dataclass(slots=True)
class _Reset:
    waiting_for: set[int]
    held: set[int]  # ranks that must not be given anything until all have reported


class EdgeResets:
    """Both ends of an edge count its generations alike, whatever happened to them: the count is kept here.

    A rank is not free while any reset holds it.
    """

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._open: dict[int, _Reset] = {}
        self._generations: dict[tuple[Lane, int, int], int] = {}
        self._first_generation = 0

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    @property
    def held(self) -> set[int]:
        return set().union(*[reset.held for reset in self._open.values()])

    def skip_to(self, generation: int) -> None:
        """The next reset of every edge is to a generation above this one."""
        self._first_generation = generation

    def involves(self, rank: int) -> bool:
        """Whether ``rank`` has still to reset an edge, or is held until others have."""
        return any([rank in reset.waiting_for or rank in reset.held for reset in self._open.values()])

    def generations(self, one: int, other: int) -> dict[Lane, int]:
        """The newest that the edge between these ranks was told to be in, by lane."""
        pair = min(one, other), max(one, other)
        return {lane: self._generations.get((lane, *pair), self._first_generation) for lane in LANES}

    def among(self, reset_id: int, lane: Lane, ranks: Iterable[int], *, hold: bool) -> ResetEdges:
        """All edges among ``ranks``."""
        ranks = tuple(ranks)
        return self._begin(reset_id, lane, ranks, combinations(sorted(ranks), 2), set(ranks) if hold else set())

    def of(self, reset_id: int, lane: Lane, rank: int, peers: Iterable[int]) -> ResetEdges:
        """The edges of ``rank``, which is held, with ``peers``, which go on meanwhile."""
        peers = tuple(peers)
        pairs = [(min(rank, peer), max(rank, peer)) for peer in peers]
        return self._begin(reset_id, lane, (rank, *peers), pairs, {rank})

    def on_reset(self, event: EdgesReset) -> bool:
        """A rank has done its part. Say whether ranks are free by that."""
        return self._report(event.reset_id, event.rank)

    def drop(self, rank: int) -> None:
        """``rank`` is lost."""
        for reset_id, reset in list(self._open.items()):
            reset.held.discard(rank)
            self._report(reset_id, rank)

    def check_integrity(self) -> None:
        held = self.held
        for rank in self._ranks.present.values():
            assert (rank.reset is None) == (rank.id not in held), f"rank {rank.id} and its edge reset disagree"

    def _report(self, reset_id: int, rank: int) -> bool:
        if (reset := self._open.get(reset_id)) is None:
            return False
        reset.waiting_for.discard(rank)
        if reset.waiting_for:
            return False
        del self._open[reset_id]
        released = reset.held - self.held
        for rank_id in sorted(released):
            self._ranks.release(rank_id)
        return bool(released)

    def _begin(
        self, reset_id: int, lane: Lane, ranks: tuple[int, ...], pairs: Iterable[tuple[int, int]], held: set[int]
    ) -> ResetEdges:
        edges = []
        for one, other in pairs:
            last = self._generations.get((lane, one, other), self._first_generation)
            generation = self._generations[lane, one, other] = last + 1
            edges.append((one, other, generation))
        for rank in sorted(held - self.held):
            self._ranks.reset(rank, reset_id)
        self._open[reset_id] = _Reset(set(ranks), held)
        return ResetEdges(reset_id, lane, ranks, tuple(edges))
