"""Where to load components that ready tasks lack: shared by policies, and in place of those that do not care."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from gfdit.core.components import Component, Load
from gfdit.core.policy.interface import RankView, SchedulerView


def num_places(name: str, view: SchedulerView) -> int:
    """How many of the ranks that are there may have component ``name``."""
    return sum([view.components[name].may_be_on(rank.id) for rank in view.ranks])


class Placer:
    """Chooses what a rank drops for a component: what nobody waits for first, then what was used longest ago.

    Of a policy: it remembers when each component was last asked for.
    """

    def __init__(self) -> None:
        self._used_s: dict[tuple[int, str], float] = {}
        self._wanted: frozenset[str] = frozenset()

    def note(self, view: SchedulerView) -> None:
        """To be told of every view: what ready tasks want, and what runs where."""
        self._wanted = frozenset([task.model for task in view.ready])
        for rank in view.ranks:
            for name in rank.resident & self._wanted:
                self._used_s[rank.id, name] = view.now_s

    def load(self, name: str, rank: RankView, view: SchedulerView, keep: Collection[str] = ()) -> Load | None:
        """``name`` on ``rank``, and what to drop for it; None if there would be no room. ``keep`` stays."""
        component = view.components.get(name)
        if component is None or name in rank.resident or not component.may_be_on(rank.id):
            return None
        if view.component_bytes is None:
            return Load(rank.id, name)
        table = view.components
        free = view.component_bytes - sum([table[one].num_bytes for one in rank.resident if one in table])
        evict = []
        for other in self._in_order_of_use(rank, table, keep):
            if free >= component.num_bytes:
                break
            evict.append(other)
            free += table[other].num_bytes
        return Load(rank.id, name, tuple(evict)) if free >= component.num_bytes else None

    def missing(self, view: SchedulerView, free: Iterable[int]) -> Iterator[Load]:
        """For every ready task, in order, of whose component fewer ranks have or will have a copy than it takes.

        What an earlier one cannot spare is not dropped for a later one: they would take it from each other
        for ever.
        """
        copies = Counter(name for rank in view.ranks for name in (*rank.resident, rank.loading))
        ranks = {rank.id: rank for rank in view.ranks}
        left = [ranks[number] for number in free]
        taken: dict[str, int] = {}  # ranks that earlier tasks need with a component
        for task in view.ready:
            name = task.model
            if name not in view.components:
                continue
            least = min([spec.size for spec in task.candidates])
            if least > num_places(name, view):
                continue  # not before more ranks are there
            taken[name] = needed = max(taken.get(name, 0), least)
            while copies[name] < needed:
                keep = [other for other, number in taken.items() if copies[other] <= number]
                options = [(len(load.evict), load) for rank in left if (load := self.load(name, rank, view, keep))]
                if not options:
                    break
                _, best = min(options, key=lambda option: (option[0], option[1].rank))
                left = [rank for rank in left if rank.id != best.rank]
                copies.subtract(best.evict)
                copies[name] += 1
                yield best

    def _in_order_of_use(self, rank: RankView, table: Mapping[str, Component], keep: Collection[str]) -> list[str]:
        able = [name for name in rank.resident if name in table and not table[name].pinned and name not in keep]
        return sorted(able, key=lambda n: (n in self._wanted, self._used_s.get((rank.id, n), 0.0), n))


def loads_in_advance(
    idle: Iterable[RankView], wanted: Mapping[str, float], copies: Mapping[str, int], view: SchedulerView
) -> Iterator[Load]:
    """Ranks with nothing to run that have room get what is ``wanted`` most for each of its ``copies``.

    Nothing is dropped for it, so that it is loaded once, and found there when more is asked for.
    """
    num_with = Counter(copies)
    fitting: dict[frozenset[str], list[str]] = {}  # of ranks that have the same
    for rank in idle:
        if (names := fitting.get(rank.resident)) is None:
            names = fitting[rank.resident] = list(_fitting(rank, wanted, view))
        if able := [name for name in names if view.components[name].may_be_on(rank.id)]:
            name = max(able, key=lambda name: wanted[name] / (1 + num_with[name]))
            num_with[name] += 1
            yield Load(rank.id, name)


def copies_of(ranks: Iterable[RankView]) -> Counter[str]:
    """How many of ``ranks`` have each component."""
    copies: Counter[str] = Counter()
    for resident, count in Counter([rank.resident for rank in ranks]).items():
        for name in resident:
            copies[name] += count
    return copies


def _fitting(rank: RankView, names: Iterable[str], view: SchedulerView) -> Iterator[str]:
    """Those that ``rank`` lacks and has room for."""
    table = view.components
    left_bytes = math.inf
    if view.component_bytes is not None:
        left_bytes = view.component_bytes - sum([table[one].num_bytes for one in rank.resident if one in table])
    for name in names:
        if name in table and name not in rank.resident and table[name].num_bytes <= left_bytes:
            yield name
