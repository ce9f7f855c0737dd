"""Which components to load on ranks that have nothing to do, for policies that weigh waiting against loading."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from gfdit.core import RankView, SchedulerView, TaskView
from gfdit.core.components import Load
from gfdit.core.policy.placing import Placer
from gfdit.policies._prospects import Prospect

_MOST_LOADING = 0.25
"""In advance, of the ranks that have nothing to run."""


def worthwhile_loads(
    waiting: Iterable[TaskView],
    idle: Iterable[RankView],
    prospects: Iterable[Prospect],
    view: SchedulerView,
    placer: Placer,
) -> Iterator[Load]:
    """For tasks that wait, in order: a load where it takes less time than one more rank with the component saves.

    That is what there is to do with it, shared by one rank more. What has to be dropped counts with the time to
    load it again, if somebody wants it. A component that is on no rank, or on fewer than a task takes, is loaded in
    any case; of the ranks that are possible that is taken which loses least. Nobody drops what a task before needs on
    several ranks: they would take it from each other for ever.

    Then ranks that have nothing to do all the same and room get what there is most to do with for each rank that
    has it: nothing is dropped for it, so that it is loaded once, and found there when more is asked for.
    """
    left = {rank.id: rank for rank in idle}
    if not left:
        return
    table, backlog_s = view.components, _backlogs_s(prospects)
    loading = Counter([rank.loading for rank in view.ranks if rank.loading])
    num_with = _copies(view.ranks) + loading  # ranks that have a component, or will
    coming = _copies(left.values()) + loading  # who waits for other ranks, does so in spite of those that are idle
    wanted = {task.model for task in view.ready}
    ahead: Counter[str] = Counter()
    keep: set[str] = set()
    for task in waiting:
        if not left:
            return
        name = task.model
        if (component := table.get(name)) is None:
            continue
        least = min([spec.size for spec in task.candidates])
        if least > 1:
            keep.add(name)
        ahead[name] += least
        if ahead[name] <= coming[name]:
            continue  # it will have that one
        copies = num_with[name]
        most_s = math.inf if copies < least else backlog_s[name] / (copies * (copies + 1))
        if component.load_s >= most_s:
            continue
        if (best := _cheapest(name, left.values(), wanted, keep, view, placer)) is None:
            continue
        price_s, load = best
        if component.load_s + price_s < most_s:
            del left[load.rank]
            coming[name] += 1
            num_with[name] += 1
            yield load
    yield from _in_advance(left.values(), num_with, backlog_s, view)


def _cheapest(
    name: str,
    ranks: Iterable[RankView],
    wanted: set[str],
    keep: set[str],
    view: SchedulerView,
    placer: Placer,
) -> tuple[float, Load] | None:
    """Where ``name`` can be loaded, and the time to load again what is dropped there and wanted."""
    best: tuple[float, Load] | None = None
    for rank in ranks:
        if (load := placer.load(name, rank, view, keep)) is not None:
            price_s = sum([view.components[one].load_s for one in load.evict if one in wanted])
            if best is None or price_s < best[0]:
                best = price_s, load
            if not price_s:
                break  # the first ranks have the most room
    return best


def _in_advance(
    idle: Collection[RankView], num_with: Counter[str], backlog_s: Mapping[str, float], view: SchedulerView
) -> Iterator[Load]:
    """Few at a time, since who arrives meanwhile finds these ranks busy."""
    num_loading = sum(1 for rank in view.ranks if rank.loading)
    num_more = max(1, round(_MOST_LOADING * (len(idle) + num_loading))) - num_loading
    fitting: dict[frozenset[str], list[str]] = {}  # of ranks that have the same
    for rank in idle:
        if num_more <= 0:
            return
        if (names := fitting.get(rank.resident)) is None:
            names = fitting[rank.resident] = list(_fitting(rank, backlog_s, view))
        if able := [name for name in names if view.components[name].may_be_on(rank.id)]:
            name = max(able, key=lambda name: backlog_s[name] / (1 + num_with[name]))
            num_with[name] += 1
            num_more -= 1
            yield Load(rank.id, name)


def _fitting(rank: RankView, names: Iterable[str], view: SchedulerView) -> Iterator[str]:
    """Those that ``rank`` lacks and has room for."""
    table = view.components
    left_bytes = math.inf
    if view.component_bytes is not None:
        left_bytes = view.component_bytes - sum([table[one].num_bytes for one in rank.resident if one in table])
    for name in names:
        if name in table and name not in rank.resident and table[name].num_bytes <= left_bytes:
            yield name


def _copies(ranks: Iterable[RankView]) -> Counter[str]:
    copies: Counter[str] = Counter()
    for resident, count in Counter([rank.resident for rank in ranks]).items():
        for name in resident:
            copies[name] += count
    return copies


def _backlogs_s(prospects: Iterable[Prospect]) -> dict[str, float]:
    """What all requests have left to do with each component, on one rank."""
    backlogs_s: dict[str, float] = {}
    for prospect in prospects:
        for part, count in (prospect.request.parts or {}).items():
            seconds = count * prospect.times.other_s.get(part, prospect.step_s)
            backlogs_s[part[0]] = backlogs_s.get(part[0], 0.0) + seconds
    return backlogs_s
