"""Which components to load on ranks that have nothing to do, for policies that weigh waiting against loading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from gfdit.core import ExecutionLayout, RankView, SchedulerView, TaskView
from gfdit.core.components import Component, Load
from gfdit.core.policy.placing import Placer


def worthwhile_loads(
    waiting: Iterable[TaskView], idle: Iterable[RankView], view: SchedulerView, placer: Placer
) -> Iterator[Load]:
    """For tasks that wait, in order: a load where it takes less time than one more rank with the component saves.

    That is what there is to do with it, shared by one rank more. What has to be dropped counts with the time to
    load it again, if somebody wants it. A component that is on no rank is loaded in any case; of the ranks that
    are possible that is taken which loses least.
    """
    table = view.components
    left = list(idle)
    num_with: Counter[str] = Counter()  # ranks that have a component, or will
    coming: Counter[str] = Counter()
    for rank in view.ranks:
        num_with.update(rank.resident)
        num_with[rank.loading] += 1
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
        if number := num_with[name]:
            saved_s = _backlog_s(task, view) / (number * (number + 1))
            if component.load_s + price_s >= saved_s:
                continue
        left = [rank for rank in left if rank.id != load.rank]
        coming[name] += 1
        num_with[name] += 1
        yield load


def _backlog_s(task: TaskView, view: SchedulerView) -> float:
    """What all requests have left to do with the component of ``task``, on one rank."""
    part = task.model, task.kind
    count = sum([request.parts.get(part, 0) for request in view.requests.values() if request.parts is not None])
    return count * view.cost.task_s(task, ExecutionLayout((0,)))


def _price_s(load: Load, table: Mapping[str, Component], wanted: set[str]) -> float:
    return sum([table[name].load_s for name in load.evict if name in wanted])
