"""LegoDiffusion's scheduler: the oldest task of any workflow first, where it costs least (paper, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gfdit.core import (
    Decision,
    Dispatch,
    ExecutionLayout,
    ParallelSpec,
    RankView,
    SchedulerView,
    TaskView,
    UnknownCostError,
)
from gfdit.core.components import Load
from gfdit.core.policy.admission import DeadlineAdmission
from gfdit.core.policy.estimates import MAX_BATCH
from gfdit.core.policy.placing import Placer
from gfdit.policies._wide import useful_times

_Waiting = tuple[tuple[str, ...], tuple[int, ...]]
"""A batch and the ranks that load its component; by the first task."""


@dataclass
class Lego:
    """Algorithm 1 of the LegoDiffusion paper: in every cycle the oldest tasks, until no task or no rank is left.

    1. The head of the queue is the oldest ready task, by arrival of its request and then by depth in its graph.
    2. Ready tasks of the same component join it, up to the largest batch that takes less time than its tasks would
       one after the other; they may be of other workflows (§5.1).
    3. It runs on as many ranks as are free and shorten it (§5.2).
    4. Those with the lowest score are taken: time to fetch its inputs, to load its component, and to run (§5.1).

    A rank that lacks the component loads it first, and the batch waits for that: as in the paper it is out of the
    queue. What is dropped for it, nobody waits for, and was used longest ago; of that the paper says nothing.

    ``batching`` and ``adaptive`` switch steps 2 and 3 off, ``early_abort`` the admission of section 5.3: a request
    is turned away if those that are there leave it too little time.
    """

    batching: bool = True
    adaptive: bool = True
    early_abort: bool = False
    name = "lego"
    places_components = True
    _placer: Placer = field(default_factory=Placer, init=False, repr=False)
    _loading: dict[str, _Waiting] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.early_abort:
            self.admit = DeadlineAdmission(self).admit

    def schedule(self, view: SchedulerView) -> Decision:
        self._placer.note(view)
        ranks = {rank.id: rank for rank in view.ranks}
        free = {number: ranks[number] for number in view.free_ranks}
        queue = {task.id: task for task in view.ready}
        dispatches = self._go_on(queue, free, ranks)
        loads: list[Load] = []
        while queue and free:
            head = next(iter(queue.values()))
            batch = self._batch(head, queue, view)
            for task in batch:
                del queue[task.id]
            if chosen := self._choose(batch, free, view):
                names = tuple([task.id for task in batch])
                needed = [load for load in chosen.values() if load is not None]
                for number in chosen:
                    del free[number]
                if needed:
                    self._loading[head.id] = names, tuple(chosen)
                    loads += needed
                else:
                    dispatches.append(Dispatch(names, ExecutionLayout(tuple(chosen), _spec(head, len(chosen)))))
        return Decision(tuple(dispatches), loads=tuple(loads))

    def _go_on(
        self, queue: dict[str, TaskView], free: dict[int, RankView], ranks: Mapping[int, RankView]
    ) -> list[Dispatch]:
        """Start what has waited for its component, and keep the ranks of what still does."""
        starts = []
        for name, (names, chosen) in list(self._loading.items()):
            batch = [queue.pop(one) for one in names if one in queue]
            if not batch:
                del self._loading[name]
                continue
            there = [ranks[number] for number in chosen if number in ranks]
            model = batch[0].model
            if any(rank.loading == model for rank in there):
                for rank in there:
                    free.pop(rank.id, None)
                continue
            del self._loading[name]
            able = [rank.id for rank in there if rank.id in free and model in rank.resident]
            spec = max((s for s in batch[0].candidates if s.size <= len(able)), key=lambda s: s.size, default=None)
            if spec is None:  # the load failed, or the rank is lost: it is in the queue again
                queue.update({task.id: task for task in batch})
                continue
            for number in able[: spec.size]:
                del free[number]
            layout = ExecutionLayout(tuple(able[: spec.size]), spec)
            starts.append(Dispatch(tuple([task.id for task in batch]), layout))
        return starts

    def _batch(self, head: TaskView, queue: Mapping[str, TaskView], view: SchedulerView) -> list[TaskView]:
        if not self.batching:
            return [head]
        alike = (head.model, head.kind, head.shape, head.cfg)
        same = [task for task in queue.values() if (task.model, task.kind, task.shape, task.cfg) == alike]
        return same[: _largest_batch(head, view)]

    def _choose(
        self, batch: Sequence[TaskView], free: Mapping[int, RankView], view: SchedulerView
    ) -> dict[int, Load | None]:
        """The ranks to take, with what each has to load; none if no free rank can have the component."""
        head = batch[0]
        scored = []
        for rank in free.values():
            load, load_s = None, 0.0
            if head.model not in rank.resident:
                if (load := self._placer.load(head.model, rank, view)) is None:
                    continue
                load_s = view.components[head.model].load_s
            layout = ExecutionLayout((rank.id,))
            data_s = sum([view.cost.migration_s(task, layout) for task in batch])
            # The time to run is the same wherever it runs, and decides nothing.
            scored.append((data_s + load_s, rank.id, load))
        scored.sort(key=lambda one: one[:2])
        fitting = [spec for spec in self._useful(head, view) if spec.size <= len(scored)]
        fitting = [spec for spec in fitting if _is_known(head, spec, len(batch), view)]
        if not fitting:
            return {}
        return {number: load for _, number, load in scored[: max(spec.size for spec in fitting)]}

    def _useful(self, task: TaskView, view: SchedulerView) -> Sequence[ParallelSpec]:
        specs, _ = useful_times(task, view)
        return specs if self.adaptive else specs[:1]


def _spec(task: TaskView, size: int) -> ParallelSpec:
    return max((spec for spec in task.candidates if spec.size == size), key=lambda spec: spec.sp)


def _is_known(task: TaskView, spec: ParallelSpec, batch: int, view: SchedulerView) -> bool:
    with suppress(UnknownCostError):
        view.cost.task_s(task, ExecutionLayout(tuple(range(spec.size)), spec), batch)
        return True
    return False


def _largest_batch(task: TaskView, view: SchedulerView) -> int:
    """The largest that is faster than its tasks one after the other, as far as the cost model knows."""
    alone, best = view.cost.task_s(task, ExecutionLayout((0,))), 1
    for size in range(2, MAX_BATCH + 1):
        with suppress(UnknownCostError):
            if view.cost.task_s(task, ExecutionLayout((0,)), size) < size * alone:
                best = size
    return best
