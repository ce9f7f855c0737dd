"""Which components to load on ranks that have nothing to do, for policies that weigh waiting against loading."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from gfdit.core import RankView, SchedulerView, TaskView
from gfdit.core.components import Load
from gfdit.core.policy.placing import Placer, copies_of, loads_in_advance, num_places
from gfdit.policies._prospects import Prospect


def worthwhile_loads(
    waiting: Iterable[TaskView],
    idle: Iterable[RankView],
    prospects: Iterable[Prospect],
    view: SchedulerView,
    placer: Placer,
) -> Iterator[Load]:
    """For tasks that wait, in order: a load where it takes less time than one more rank with the component saves.

    That is what there is to do with it, shared by one rank more. Of a rank with several components each has the
    share that it is wanted by. What has to be dropped counts with the time to load it again, if somebody wants it.
    A component that is on no rank, or on fewer than a task takes, is loaded in any case; of the ranks that are
    possible that is taken which loses least. Nobody drops what a task before needs on several ranks: they would
    take it from each other for ever. Then come loads in advance.
    """
    left = {rank.id: rank for rank in idle}
    if not left:
        return
    table, backlog_s = view.components, _backlogs_s(prospects)
    loading = Counter([rank.loading for rank in view.ranks if rank.loading])
    num_with = copies_of(view.ranks) + loading  # ranks that have a component, or will
    coming = copies_of(left.values()) + loading  # who waits for more ranks does so in spite of idle ones
    num_shared = _shared(view.ranks, backlog_s, num_with)
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
            if least > num_places(name, view):
                continue  # not before more ranks are there
            keep.add(name)
        ahead[name] += least
        if ahead[name] <= coming[name]:
            continue  # it will have that one
        copies = num_with[name]
        share = num_shared.get(name, 0.0) + loading[name]
        most_s = math.inf if copies < least or not share else backlog_s[name] / (share * (share + 1))
        if component.load_s >= most_s:
            continue
        if (best := _cheapest(name, left.values(), wanted, keep, view, placer)) is None:
            continue
        price_s, load = best
        if component.load_s + price_s < most_s:
            del left[load.rank]
            coming[name] += 1
            num_with[name] += 1
            num_shared[name] = share + 1 - loading[name]
            yield load
    yield from loads_in_advance(left.values(), backlog_s, num_with, view)


def _shared(
    ranks: Iterable[RankView], backlog_s: Mapping[str, float], copies: Mapping[str, int]
) -> dict[str, float]:
    """Ranks for each component, if those that have several of them share their time as these are wanted there."""
    shared: dict[str, float] = {}
    for resident, count in Counter([rank.resident for rank in ranks]).items():
        parts = {name: backlog_s[name] / copies[name] for name in resident if backlog_s.get(name)}
        whole = sum(parts.values())
        for name, part in parts.items():
            shared[name] = shared.get(name, 0.0) + count * part / whole
    return shared


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


def _backlogs_s(prospects: Iterable[Prospect]) -> dict[str, float]:
    """What all requests have left to do with each component, on one rank."""
    backlogs_s: dict[str, float] = {}
    for prospect in prospects:
        for part, count in (prospect.request.parts or {}).items():
            seconds = count * prospect.times.other_s.get(part, prospect.step_s)
            backlogs_s[part[0]] = backlogs_s.get(part[0], 0.0) + seconds
    return backlogs_s
