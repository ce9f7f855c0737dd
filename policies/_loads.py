"""Which components to load on ranks that have nothing to do, for policies that weigh waiting against loading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from gfdit.core import RankView, SchedulerView, TaskView
from gfdit.core.components import Component, Load
from gfdit.core.policy.placing import Placer


def worthwhile_loads(
    waiting: Iterable[TaskView], idle: Iterable[RankView], view: SchedulerView, placer: Placer
) -> Iterator[Load]:
    """For tasks that wait, in order: a load where that is done sooner than a rank with the component comes free.

    What has to be dropped counts with the time to load it again, if somebody wants it. A component that is on no
    rank is loaded in any case. Of the ranks that are possible that is taken which loses least.
    """
    table, now_s = view.components, view.now_s
    left = list(idle)
    ends_s: dict[str, list[float]] = {}  # when ranks with a component come free
    coming: Counter[str] = Counter()
    for rank in view.ranks:
        for name in rank.resident:
            ends_s.setdefault(name, []).append(max(0.0, (rank.busy_until_s or now_s) - now_s))
        coming[rank.loading] += 1
    wanted = {task.model for task in view.ready}
    ahead: Counter[str] = Counter()
    for task in waiting:
        if not left:
            return
        name = task.model
        if (component := table.get(name)) is None:
            continue
        ahead[name] += 1
        if ahead[name] <= coming[name]:
            continue  # it will have that one
        options = [
            (_price_s(load, table, wanted), rank.id, load)
            for rank in left
            if (load := placer.load(name, rank, view)) is not None
        ]
        if not options:
            continue
        price_s, _, load = min(options, key=lambda option: option[:2])
        there = sorted(ends_s.get(name, ()))
        number = ahead[name] - coming[name] - 1
        if there and component.load_s + price_s >= there[min(number, len(there) - 1)] * (1 + number // len(there)):
            continue
        left = [rank for rank in left if rank.id != load.rank]
        coming[name] += 1
        yield load


def _price_s(load: Load, table: Mapping[str, Component], wanted: set[str]) -> float:
    return sum([table[name].load_s for name in load.evict if name in wanted])
