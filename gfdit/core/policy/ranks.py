"""Counting ranks, and cutting layouts from them: for policies, also of your own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, KeysView
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

    def __init__(self, ranks: Iterable[RankView]) -> None:
        self._ranks = {rank.id: rank for rank in sorted(ranks, key=lambda rank: len(rank.resident))}
        self._nodes: dict[str, dict[int, dict[int, None]]] = {}  # model -> node -> ranks in order of use

    @classmethod
    def of(cls, ranks: Iterable[RankView]) -> FreeRanks:
        """Those of ``ranks`` that run nothing."""
        return cls([rank for rank in ranks if rank.running_request is None])

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

    def take(self, spec: ParallelSpec, model: str, last: ExecutionLayout | None = None) -> ExecutionLayout | None:
        """A layout for ``spec`` on ranks with ``model``, which are free no more; None if they are too few.

        Ranks of ``last`` come first, in its order: they hold the artifacts. Others come from as few nodes as
        possible: one that is used already, else the one with the fewest free ranks that are enough.
        """
        chosen = [rank for rank in (last.ranks if last else ()) if self._has(rank, model)][: spec.size]
        if len(chosen) < spec.size > self.count(model):
            return None
        used = {self._ranks[rank].node for rank in chosen}
        self._remove(chosen)
        while missing := spec.size - len(chosen):
            nodes = self._with_model(model)
            node = min(nodes, key=lambda node: _reluctance(node, len(nodes[node]), missing, used))
            used.add(node)
            more = list(islice(nodes[node], missing))
            self._remove(more)
            chosen += more
        return ExecutionLayout(tuple(chosen), spec)

    def claim(self, layout: ExecutionLayout) -> bool:
        """Take exactly ``layout``; False, and nothing taken, unless all its ranks are free."""
        if not self._ranks.keys() >= set(layout.ranks):
            return False
        self._remove(layout.ranks)
        return True

    def _remove(self, rank_ids: Iterable[int]) -> None:
        for rank_id in rank_ids:
            rank = self._ranks.pop(rank_id)
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


def _reluctance(node: int, num_free: int, missing: int, used: set[int]) -> tuple[bool, bool, bool, int, int]:
    enough = num_free >= missing
    return num_free == 0, node not in used, not enough, num_free if enough else -num_free, node
