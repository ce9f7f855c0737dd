"""Which components to load on ranks that have nothing to do, for policies that weigh waiting against loading."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from gfdit.core import RankView, SchedulerView, TaskView
from gfdit.core.components import Component, Load
from gfdit.core.policy.placing import Placer
from gfdit.policies._prospects import Prospect


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
    num_with: Counter[str] = Counter()  # ranks that have a component, or will
    coming: Counter[str] = Counter()
    for rank in view.ranks:
        num_with.update(rank.resident)
        num_with[rank.loading] += 1
        coming[rank.loading] += 1
    wanted = {task.model for task in view.ready}
    ahead: Counter[str] = Counter()
    keep: set[str] = set()
    for task in waiting:
        if not left:
            return
        name = task.model
        if (component := table.get(name)) is None:
            continue
        ahead[name] += 1
        if (least := min([spec.size for spec in task.candidates])) > 1:
            keep.add(name)
        if ahead[name] <= coming[name]:
            continue  # it will have that one
        options = [
            (_price_s(load, table, wanted), rank.id, load)
            for rank in left.values()
            if (load := placer.load(name, rank, view, keep)) is not None
        ]
        if not options:
            continue
        price_s, number, load = min(options, key=lambda option: option[:2])
        if (copies := num_with[name]) >= least:
            saved_s = backlog_s[name] / (copies * (copies + 1))
            if component.load_s + price_s >= saved_s:
                continue
        del left[number]
        coming[name] += 1
        num_with[name] += 1
        yield load
    fitting: dict[frozenset[str], list[str]] = {}  # of ranks that have the same
    for rank in left.values():
        if (names := fitting.get(rank.resident)) is None:
            names = fitting[rank.resident] = list(_fitting(rank, backlog_s, view))
        if able := [name for name in names if table[name].may_be_on(rank.id)]:
            name = max(able, key=lambda name: backlog_s[name] / (1 + num_with[name]))
            num_with[name] += 1
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


def _backlogs_s(prospects: Iterable[Prospect]) -> dict[str, float]:
    """What all requests have left to do with each component, on one rank."""
    backlogs_s: dict[str, float] = {}
    for prospect in prospects:
        for part, count in (prospect.request.parts or {}).items():
            seconds = count * prospect.times.other_s.get(part, prospect.step_s)
            backlogs_s[part[0]] = backlogs_s.get(part[0], 0.0) + seconds
    return backlogs_s


def _price_s(load: Load, table: Mapping[str, Component], wanted: set[str]) -> float:
    return sum([table[name].load_s for name in load.evict if name in wanted])
