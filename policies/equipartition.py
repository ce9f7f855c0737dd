"""Processor sharing: the ranks are split evenly among the live requests, again at every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import islice

from gfdit.core import (
    Decision,
    Dispatch,
    ExecutionLayout,
    ParallelSpec,
    RankView,
    RequestView,
    SchedulerView,
    TaskKind,
    TaskView,
)
from gfdit.core.layouts import SINGLE, widest
from gfdit.core.policy.changes import Changes, Queue


@dataclass
class Equipartition:
    """Equal shares for all live requests, re-decided at every step boundary (EQUI).

    Processor sharing for parallel jobs: Edmonds, "Scheduling in the dark" (STOC 1999). Ranks are handed out
    evenly: the request with the fewest, the oldest first, grows to its next feasible degree until nothing
    more fits. A running request that holds more than it is entitled to shrinks at its next step boundary, and
    whoever waits gets what it leaves; a request that is entitled to more takes what is free and grows later,
    so no rank stays idle for longer than the running step of the request it is meant for. With more requests than
    ranks the oldest have one each. A request stays on the ranks that hold its artifacts.
    """

    max_sp: int | None = None
    name = "equipartition"
    run_ahead = True
    _changes: Changes = field(default_factory=Changes, init=False, repr=False, compare=False)
    _begun: Queue = field(default_factory=Queue, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_sp is not None and self.max_sp < 1:
            raise ValueError(f"max_sp must be at least 1, got {self.max_sp}")

    def schedule(self, view: SchedulerView) -> Decision:
        entitled = self._entitlements(view)
        homes = {rank: name for name, last in self._waiting_on(view) for rank in last.ranks}
        free = {rank.id: rank for rank in view.ranks if rank.running_request is None}
        dispatches = []
        for task in view.ready:  # oldest first
            if not free:
                break
            usable = [rank.id for rank in free.values() if task.model in rank.resident]
            specs = self._allowed(view.cost.candidates(task))
            most = max(entitled.get(task.request_id, 1), specs[0].size)
            if spec := widest(specs, min(most, len(usable))):
                closest = _closest(usable, task, view.requests[task.request_id], homes)
                ranks = _of_few_nodes(closest, spec.size, free)
                dispatches.append(Dispatch((task.id,), ExecutionLayout(ranks, spec)))
                for rank_id in ranks:
                    del free[rank_id]
        return Decision(tuple(dispatches))

    def _waiting_on(self, view: SchedulerView) -> Iterator[tuple[str, ExecutionLayout]]:
        """Requests that wait and have run, in order of arrival, and where they ran last."""
        changed = self._changes.of(view)
        if changed is None:
            self._begun, changed = Queue(), view.requests
        for name in changed:
            request = view.requests.get(name)
            if request is None or request.last_layout is None:
                self._begun.drop(name)
            else:
                self._begun.put(name, request.arrival_s)
        ready = view.ready_by_request
        for name in self._begun:
            if name in ready and (last := view.requests[name].last_layout):
                yield name, last

    def _entitlements(self, view: SchedulerView) -> dict[str, int]:
        """Number of ranks by request; before its first step a request can use a single one."""
        left = len(view.ranks)
        sharing = list(islice(view.requests.values(), left))
        sizes = [sorted({spec.size for spec in self._specs(request)}) for request in sharing]
        entitled = dict.fromkeys((request.id for request in sharing), 1)
        left -= len(sharing)
        queue = [(1, age) for age in range(len(sharing))]  # (ranks so far, age): fewest first, then oldest
        heapify(queue)
        while queue and left > 0:
            have, age = queue[0]
            following = next((size for size in sizes[age] if have < size <= have + left), None)
            if following is None:
                queue = [entry for entry in queue if entry[1] != age]
                heapify(queue)
            else:
                heapreplace(queue, (following, age))
                entitled[sharing[age].id] = following
                left -= following - have
        return entitled

    def _specs(self, request: RequestView) -> tuple[ParallelSpec, ...]:
        """What its next task can take."""
        left = request.tasks_left
        if left.get(TaskKind.ENCODE, 0) + left.get(TaskKind.PREPARE, 0):
            return (SINGLE,)
        return self._allowed(request.candidates if left.get(TaskKind.DENOISE) else request.decode_candidates)

    def _allowed(self, specs: tuple[ParallelSpec, ...]) -> tuple[ParallelSpec, ...]:
        if self.max_sp is None:
            return specs
        return tuple(spec for spec in specs if spec.sp <= self.max_sp) or specs[:1]


def _closest(
    usable: Iterable[int], task: TaskView, request: RequestView, homes: Mapping[int, str]
) -> tuple[int, ...]:
    """``usable`` with those first that hold most inputs of ``task``, in the order it last ran on them.

    Of the others, those that another waiting request ran on come last, so that it can stay there.
    """
    held = {rank: 0 for rank in usable}
    for _, holders in task.artifacts:
        for rank in holders:
            if rank in held:
                held[rank] += 1
    last = request.last_layout.ranks if request.last_layout else ()
    order = {rank: index for index, rank in enumerate(last)}

    def distance(rank: int) -> tuple[int, int, bool, int]:
        claimed = homes.get(rank, request.id) != request.id
        return (-held[rank], order.get(rank, len(last)), claimed, rank)

    return tuple(sorted(held, key=distance))


def _of_few_nodes(closest: tuple[int, ...], count: int, views: Mapping[int, RankView]) -> tuple[int, ...]:
    """``count`` of ``closest``: of the first node that has so many, else of those that have the most."""
    nodes: dict[int, list[int]] = {}
    for rank in closest:
        nodes.setdefault(views[rank].node, []).append(rank)
    chosen = sorted(nodes.values(), key=lambda ranks: -min(len(ranks), count))
    return tuple([rank for ranks in chosen for rank in ranks][:count])
