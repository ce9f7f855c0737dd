"""Worker groups: ranks in groups of a fixed size, each with a queue of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any

from gfdit.core import Dispatch, ExecutionLayout, ParallelSpec, RankView, RequestView, SchedulerView, TaskView
from gfdit.core.layouts import widest
from gfdit.core.policy.changes import Changes, Queue
from gfdit.core.policy.estimates import Estimates

GroupId = tuple[int, int]
"""Node (-1 where groups cross nodes), and rank id divided by the size of a group."""

_PLACE = attrgetter("id", "node", "resident")


@dataclass(eq=False, slots=True)
class Group:
    """``left_s``: seconds of work left of each request that was assigned here; ``queue`` has them in order."""

    ranks: list[RankView]
    left_s: dict[str, float] = field(default_factory=dict)
    queue: Queue = field(default_factory=Queue)
    _layouts: dict[tuple[str, tuple[ParallelSpec, ...]], ExecutionLayout | None] = field(default_factory=dict)

    def set_ranks(self, ranks: list[RankView]) -> None:
        self.ranks = ranks
        self._layouts.clear()

    def layout(self, model: str, specs: tuple[ParallelSpec, ...]) -> ExecutionLayout | None:
        """The widest of ``specs`` that fits, on the first ranks that have ``model``."""
        if (model, specs) not in self._layouts:
            ranks = [rank.id for rank in self.ranks if model in rank.resident]
            spec = widest(specs, len(ranks))
            self._layouts[model, specs] = ExecutionLayout(tuple(ranks[: spec.size]), spec) if spec else None
        return self._layouts[model, specs]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a request was assigned, and how it denoises there."""

    group: Group
    spec: ParallelSpec


Load = Callable[[Group, RequestView, SchedulerView], float]
"""Of a group, if the request were assigned to it."""

Urgency = Callable[[RequestView, float], Any]
"""Of a request with so many seconds left."""


class WorkerGroups:
    """Assigns each request, once, to the group with the least estimated work ahead of it.

    GF-DiT paper, section 5.4. Groups are ranks with consecutive ids, of one node unless they are larger than that.
    One is smaller than the others where the number of ranks does not divide or a rank was lost. With ``size`` None
    they are as large as the widest specification of any request. In any case they are as large as needed: every
    request that the ranks can run fits some group. When the ranks change, or what a request can run at, requests
    stay where they still fit.
    """

    def __init__(
        self, size: int | None, load: Load | None = None, *, by_task: bool = False, urgency: Urgency | None = None
    ) -> None:
        """The group is chosen where ``load`` is least, by default the estimated work.

        With ``by_task`` that is the work of the tasks that are ready or run there, and :meth:`assign_tasks`
        chooses again for each. In their group requests are in the order of ``urgency``, the least first, and of
        arrival.
        """
        self._by_task = by_task
        self._assigned: dict[str, str] = {}  # task by request
        self._wanted_size = size
        self._load = load or _work_left_s
        self._urgency = urgency
        self._size = 1
        self._ranks: Sequence[object] = ()
        self._groups: dict[GroupId, Group] = {}
        self._group_of_rank: dict[int, Group] = {}
        self._homes: dict[str, Home | None] = {}  # of every live request; None if no ranks can run it
        self._arrivals: dict[str, int] = {}  # the same requests and those that could not be assigned, numbered
        self._numbers = count()
        self._changes = Changes()
        self._estimates = Estimates()

    def update(self, view: SchedulerView) -> None:
        """Take in which ranks and requests have come, gone and changed."""
        changed = self._changes.of(view)
        if changed is None:
            changed = dict.fromkeys((*self._arrivals, *view.requests))
        try:
            new = self._unplaced(changed, view)
            if (ranks := list(map(_PLACE, view.ranks))) != self._ranks:
                new = self._form(self._size_for(view.requests.values(), view), view)
                self._ranks = ranks
            if new:
                if (size := self._size_for(new, view)) > self._size:
                    new = self._form(size, view)
                for request in sorted(new, key=lambda request: self._arrivals[request.id]):
                    self._assign(request, view)
            if self._urgency is not None and self._estimates.are_old(view):
                for name, home in self._homes.items():
                    if home is not None:
                        self._enqueue(view.requests[name], home, view)
        except Exception:
            self._changes.forget()
            raise

    def _unplaced(self, changed: Iterable[str], view: SchedulerView) -> list[RequestView]:
        """Those of ``changed`` that are to be assigned; who is gone is forgotten."""
        homes, requests, unplaced = self._homes, view.requests, []
        for name in changed:
            if (request := requests.get(name)) is None:
                self._forget(name)
                self._arrivals.pop(name, None)
                continue
            home = homes.get(name)
            if home is None:
                if name not in homes:
                    self._arrivals.setdefault(name, next(self._numbers))
                    unplaced.append(request)
            elif not request.running and home.spec not in request.candidates:
                self._forget(name)  # it does not fit into memory, as it turned out
                unplaced.append(request)
            elif self._urgency is not None:
                self._enqueue(request, home, view)
        return unplaced

    def _enqueue(self, request: RequestView, home: Home, view: SchedulerView) -> None:
        home.group.queue.put(request.id, self._turn(request, home, view))

    def _turn(self, request: RequestView, home: Home, view: SchedulerView) -> tuple[Any, int]:
        number = self._arrivals[request.id]
        if self._urgency is None:
            return (), number
        remaining_s = self._estimates.of(request, view).remaining_s(request, home.spec)
        return self._urgency(request, remaining_s), number

    def assign_tasks(self, view: SchedulerView) -> None:
        """Assign every task that has become ready since, the oldest first; of equal groups to that of the last."""
        self._assigned = {name: task for name, task in self._assigned.items() if name in view.requests}
        for task in view.ready:
            name = task.request_id
            if self._assigned.get(name) == task.id or (home := self._homes[name]) is None:
                continue
            self._forget(name)
            try:
                self._assign(view.requests[name], view, home.group)
                if chosen := self._homes[name]:
                    layout = chosen.group.layout(task.model, view.cost.candidates(task))
                    chosen.group.left_s[name] = view.cost.task_s(task, layout) if layout else 0.0
            except Exception:
                self._changes.forget()
                raise
            self._assigned[name] = task.id

    def idle(self, view: SchedulerView) -> list[Group]:
        """Groups that have requests, and whose ranks are all free."""
        if self._size == 1:
            return [group for rank in view.free_ranks if (group := self._group_of_rank[rank]).left_s]
        num_free = Counter([self._group_of_rank[rank] for rank in view.free_ranks])
        return [group for group, count in num_free.items() if group.left_s and count == len(group.ranks)]

    def remaining_s(self, request_id: str, view: SchedulerView) -> float:
        """Time to finish an assigned request in its group, a running task in full."""
        request, home = view.requests[request_id], self._homes[request_id]
        assert home is not None
        return self._estimates.of(request, view).remaining_s(request, home.spec)

    def start(self, task: TaskView, view: SchedulerView) -> Dispatch | None:
        """Run ``task`` in its group; None if it does not fit there."""
        home = self._homes[task.request_id]
        assert home is not None
        if layout := home.group.layout(task.model, view.cost.candidates(task)):
            if not self._by_task:
                home.group.left_s[task.request_id] = self.remaining_s(task.request_id, view)
            return Dispatch((task.id,), layout)
        return None

    def _forget(self, name: str) -> None:
        if home := self._homes.pop(name, None):
            del home.group.left_s[name]
            home.group.queue.drop(name)

    def _assign(self, request: RequestView, view: SchedulerView, last: Group | None = None) -> None:
        times = self._estimates.of(request, view)
        groups = self._groups.values()
        homes = (
            Home(group, layout.parallel)
            for group in sorted(groups, key=lambda group: (self._load(group, request, view), group is not last))
            if (layout := group.layout(request.model, tuple(times.step_s)))
        )
        home = next(homes, None)
        if home is not None:
            turn = self._turn(request, home, view)
            home.group.left_s[request.id] = times.remaining_s(request, home.spec)
            home.group.queue.put(request.id, turn)
        self._homes[request.id] = home

    def _form(self, size: int, view: SchedulerView) -> list[RequestView]:
        """Make groups of ``size``; returns those that have no place there."""
        old = self._groups if size == self._size else {}
        self._size, self._groups = size, {}
        for group_id, ranks in _members(view.ranks, size).items():
            self._groups[group_id] = group = old.get(group_id) or Group(ranks)
            group.set_ranks(ranks)
        self._group_of_rank = {rank.id: group for group in self._groups.values() for rank in group.ranks}
        kept = set(self._groups.values())
        for name, home in list(self._homes.items()):
            if (
                not home
                or home.group not in kept
                or not home.group.layout(view.requests[name].model, (home.spec,))
            ):
                self._forget(name)
        return [request for name, request in view.requests.items() if name not in self._homes]

    def _size_for(self, requests: Iterable[RequestView], view: SchedulerView) -> int:
        """The smallest size, from the wanted one on, at which some group can run each of ``requests``."""
        return max([self._size_for_one(request, view) for request in requests], default=1)

    def _size_for_one(self, request: RequestView, view: SchedulerView) -> int:
        """The smallest size, from the wanted one on, at which some group can run ``request``."""
        num_able = sum(request.model in rank.resident for rank in view.ranks)
        sizes = [spec.size for spec in self._estimates.of(request, view).step_s if spec.size <= num_able]
        if not sizes:
            return 1
        size = max(self._wanted_size or max(sizes), min(sizes))
        while min(sizes) > 1 and size < 2 * view.ranks[-1].id:
            groups = _members(view.ranks, size).values()
            if any(sum(request.model in rank.resident for rank in ranks) >= min(sizes) for ranks in groups):
                break
            size *= 2
        return size


def _work_left_s(group: Group, request: RequestView, view: SchedulerView) -> float:
    return sum(group.left_s.values())


def _members(ranks: Sequence[RankView], size: int) -> dict[GroupId, list[RankView]]:
    across = size > max(Counter(rank.node for rank in ranks).values())
    members: dict[GroupId, list[RankView]] = {}
    for rank in ranks:
        members.setdefault((-1 if across else rank.node, rank.id // size), []).append(rank)
    return members
