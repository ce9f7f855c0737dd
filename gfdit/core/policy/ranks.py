"""Counting ranks, and cutting layouts from them: for policies, also of your own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from functools import cached_property
from itertools import islice

from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.policy import RankView


class RankCounts:
    """How many ranks are left for a model: those with the fewest other models are used first."""

    def __init__(self, ranks: Iterable[RankView]) -> None:
        self._left = Counter([rank.resident for rank in ranks])

    def __bool__(self) -> bool:
        return any(self._left.values())

    def of(self, model: str) -> int:
        return sum([count for models, count in self._left.items() if model in models])

    def take(self, model: str, count: int) -> None:
        """``count`` is at most :meth:`of` ``model``."""
        for models in sorted([models for models in self._left if model in models], key=len):
            taken = min(count, self._left[models])
            self._left[models] -= taken
            count -= taken


class FreeRanks:
    """Ranks that nobody has taken yet, by the models they have loaded and by node.

    Those with the fewest models are used first, and of them the first given.
    """

    def __init__(self, ranks: Iterable[RankView], pool: Sequence[RankView] | None = None) -> None:
        """``pool``: all ranks there are, whether free or not; by default ``ranks``."""
        self._ranks = {rank.id: rank for rank in sorted(ranks, key=lambda rank: len(rank.resident))}
        self._pool = list(self._ranks.values()) if pool is None else pool
        self._taken: dict[int, RankView] = {}
        self._nodes: dict[str, dict[int, dict[int, None]]] = {}  # model -> node -> ranks in order of use

    @classmethod
    def of(cls, ranks: Sequence[RankView]) -> FreeRanks:
        """Those of ``ranks`` that run nothing."""
        return cls([rank for rank in ranks if rank.running_request is None], ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[RankView]:
        return iter(self._ranks.values())

    @property
    def ids(self) -> KeysView[int]:
        return self._ranks.keys()

    def count(self, model: str) -> int:
        """How many have ``model`` loaded."""
        return sum(map(len, self._with_model(model).values()))

    @cached_property
    def node_size(self) -> int:
        """The ranks of the largest node, whether free or not."""
        return max(Counter([rank.node for rank in self._pool]).values(), default=0)

    def fits(self, spec: ParallelSpec, model: str) -> bool:
        """Whether :meth:`take` finds all on one node, or each branch of guidance on one.

        Those of a branch that is wider than any node may be anywhere.
        """
        nodes = self._with_model(model)
        if len(nodes) < 2 or spec.size == 1:
            return spec.size <= self.count(model)
        free = [len(ranks) for ranks in nodes.values()]
        if max(free) >= spec.size:
            return True
        if spec.sp > self.node_size:
            return sum(free) >= spec.size
        return sum([count // spec.sp for count in free]) >= spec.cfg > 1

    def take(self, spec: ParallelSpec, model: str, last: ExecutionLayout | None = None) -> ExecutionLayout | None:
        """A layout for ``spec`` on ranks with ``model``, which are free no more; None if they are too few.

        All come from one node if any has enough: the one with the most of ``last``, else with the fewest free
        ranks that are enough. On several nodes each branch of guidance is chosen so, since those exchange little;
        what no node has enough for takes as few as possible. Ranks of ``last`` come first, in its order: they hold
        the artifacts.
        """
        held = self._held(last, model)
        if len(held) < spec.size > self.count(model):
            return None
        return self._cut(spec, self._with_model(model), held)

    def _held(self, last: ExecutionLayout | None, model: str) -> list[int]:
        return [rank for rank in (last.ranks if last else ()) if self._has(rank, model)]

    def _cut(
        self, spec: ParallelSpec, nodes: Mapping[int, Mapping[int, None]], held: list[int]
    ) -> ExecutionLayout:
        if len(held) >= spec.size and len({self._ranks[rank].node for rank in held[: spec.size]}) == 1:
            self._remove(held[: spec.size])
            return ExecutionLayout(tuple(held[: spec.size]), spec)
        if len(nodes) == 1 or spec.size == 1 or any([len(ranks) >= spec.size for ranks in nodes.values()]):
            return ExecutionLayout(tuple(self._take(spec.size, nodes, held)), spec)
        branches = [self._take(spec.sp, nodes, held) for _ in range(spec.cfg)]
        return ExecutionLayout(tuple([rank for branch in branches for rank in branch]), spec)

    def _take(self, count: int, nodes: Mapping[int, Mapping[int, None]], held: list[int]) -> list[int]:
        """``count`` ranks of ``nodes``, of one if possible; those ``held`` are preferred, and gone from there."""
        chosen: list[int] = []
        while missing := count - len(chosen):
            held_on = Counter([self._ranks[rank].node for rank in held])
            node = min(nodes, key=lambda node: _reluctance(node, len(nodes[node]), missing, held_on[node]))
            here = [rank for rank in held if rank in nodes[node]][:missing]
            here += islice([rank for rank in nodes[node] if rank not in here], missing - len(here))
            self._remove(here)
            held[:] = [rank for rank in held if rank in self._ranks]
            chosen += here
        return chosen

    def count_beside(self, layout: ExecutionLayout, model: str, size: int) -> int:
        """How many could join ``layout``, taken from here, for ``size`` ranks in all.

        Those of its nodes; of all, if no node has so many ranks.
        """
        return sum(map(len, self._beside(layout, model, size).values()))

    def widen(
        self, layout: ExecutionLayout, spec: ParallelSpec, model: str, last: ExecutionLayout | None = None
    ) -> ExecutionLayout:
        """One for ``spec`` in place of ``layout``, taken from here; :meth:`count_beside` must have enough."""
        beside = self._beside(layout, model, spec.size)
        for rank in layout.ranks:
            self._give_back(rank)
        return self._cut(spec, beside, self._held(last, model))

    def _beside(self, layout: ExecutionLayout, model: str, size: int) -> Mapping[int, Mapping[int, None]]:
        nodes = self._with_model(model)
        if len(nodes) < 2 or size > self.node_size:
            return nodes
        return {node: nodes.setdefault(node, {}) for node in {self._taken[rank].node for rank in layout.ranks}}

    def _give_back(self, rank_id: int) -> None:
        rank = self._ranks[rank_id] = self._taken.pop(rank_id)
        for model, nodes in self._nodes.items():
            if model in rank.resident:
                nodes.setdefault(rank.node, {})[rank_id] = None

    def hold(self, model: str, node: int | None = None) -> None:
        """Take those with ``model``, of ``node`` or all, for somebody who waits for more."""
        nodes = self._with_model(model)
        self._remove([rank for at in (nodes if node is None else [node]) for rank in nodes.get(at, ())])

    def claim(self, layout: ExecutionLayout) -> bool:
        """Take exactly ``layout``; False, and nothing taken, unless all its ranks are free."""
        if not self._ranks.keys() >= set(layout.ranks):
            return False
        self._remove(layout.ranks)
        return True

    def _remove(self, rank_ids: Iterable[int]) -> None:
        for rank_id in rank_ids:
            rank = self._taken[rank_id] = self._ranks.pop(rank_id)
            for nodes in self._nodes.values():
                nodes.get(rank.node, {}).pop(rank_id, None)

    def _has(self, rank_id: int, model: str) -> bool:
        return rank_id in self._ranks and model in self._ranks[rank_id].resident

    def _with_model(self, model: str) -> dict[int, dict[int, None]]:
        nodes = self._nodes.get(model)
        if nodes is None:
            nodes = self._nodes[model] = {}
            for rank in self._ranks.values():
                if model in rank.resident:
                    nodes.setdefault(rank.node, {})[rank.id] = None
        return nodes


def _reluctance(node: int, num_free: int, missing: int, num_held: int) -> tuple[bool, int, int, int]:
    enough = num_free >= missing
    return not enough, -min(num_held, missing), num_free if enough else -num_free, node
