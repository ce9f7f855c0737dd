"""Worker groups: ranks in groups of a fixed size, each with a queue of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, is_not

from gfdit.core import Dispatch, ExecutionLayout, ParallelSpec, RankView, RequestView, SchedulerView, TaskView
from gfdit.core.layouts import widest
from gfdit.core.policy.estimates import Estimates

GroupId = tuple[int, int]
"""Node (-1 where groups cross nodes), and rank id divided by the size of a group."""

_PLACE = attrgetter("id", "node", "resident")


@dataclass(eq=False, slots=True)
class Group:
    """``left_s``: seconds of work left of each request that was assigned here."""

    ranks: list[RankView]
    left_s: dict[str, float] = field(default_factory=dict)
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


class WorkerGroups:
    """Assigns each request, once, to the group with the least estimated work ahead of it.

    GF-DiT paper, section 5.4. Groups are ranks with consecutive ids, of one node unless they are larger than that.
    One is smaller than the others where the number of ranks does not divide or a rank was lost. With ``size`` None
    they are as large as the widest specification of any request. In any case they are as large as needed: every
    request that the ranks can run fits some group. When the ranks change, or what a request can run at, requests
    stay where they still fit.
    """

    def __init__(self, size: int | None, load: Load | None = None, *, by_task: bool = False) -> None:
        """The group is chosen where ``load`` is least, by default the estimated work.

        With ``by_task`` that is the work of the tasks that are ready or run there, and :meth:`assign_tasks`
        chooses again for each.
        """
        self._by_task = by_task
        self._assigned: dict[str, str] = {}  # task by request
        self._wanted_size = size
        self._load = load or _work_left_s
        self._size = 1
        self._ranks: Sequence[object] = ()
        self._groups: dict[GroupId, Group] = {}
        self._group_of_rank: dict[int, Group] = {}
        self._homes: dict[str, Home | None] = {}  # of every live request; None if no ranks can run it
        self._requests: list[RequestView] = []  # as of the last update
        self._estimates = Estimates()

    def update(self, view: SchedulerView) -> None:
        """Take in which ranks and requests have come and gone."""
        for name in self._outgrown(view):
            self._forget(name)
        ranks = list(map(_PLACE, view.ranks))
        if ranks == self._ranks and self._homes.keys() == view.requests.keys():
            return
        for name in self._homes.keys() - view.requests.keys():
            self._forget(name)
        if ranks != self._ranks:
            self._form(max([1, *(self._size_for(request, view) for request in view.requests.values())]), view)
            self._ranks = ranks
        new = [request for request in view.requests.values() if request.id not in self._homes]
        size = max([0, *(self._size_for(request, view) for request in new)])
        if size > self._size:
            self._form(size, view)
        for request in view.requests.values():
            if request.id not in self._homes:
                self._assign(request, view)

    def assign_tasks(self, view: SchedulerView) -> None:
        """Assign every task that has become ready since, the oldest first; of equal groups to that of the last."""
        self._assigned = {name: task for name, task in self._assigned.items() if name in view.requests}
        for task in view.ready:
            name = task.request_id
            if self._assigned.get(name) == task.id or (home := self._homes[name]) is None:
                continue
            self._assigned[name] = task.id
            self._forget(name)
            self._assign(view.requests[name], view, home.group)
            if chosen := self._homes[name]:
                layout = chosen.group.layout(task.model, view.cost.candidates(task))
                chosen.group.left_s[name] = view.cost.task_s(task, layout) if layout else 0.0

    def idle(self, view: SchedulerView) -> set[Group]:
        """Groups that have requests, and whose ranks are all free."""
        if self._size == 1:
            return {group for rank in view.free_ranks if (group := self._group_of_rank[rank]).left_s}
        num_free = Counter([self._group_of_rank[rank] for rank in view.free_ranks])
        return {group for group, count in num_free.items() if group.left_s and count == len(group.ranks)}

    def home(self, request_id: str) -> Group | None:
        home = self._homes[request_id]
        return home.group if home else None

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

    def _outgrown(self, view: SchedulerView) -> list[str]:
        """Requests that cannot denoise as they were assigned to: it does not fit into memory, as it turned out."""
        before, self._requests = self._requests, list(view.requests.values())
        changed: Iterable[RequestView] = self._requests
        if len(before) == len(self._requests):  # else any may be at another place
            changed = compress(changed, map(is_not, changed, before))
        return [
            request.id
            for request in changed
            if (home := self._homes.get(request.id)) is not None
            and not request.running
            and home.spec not in request.candidates
        ]

    def _forget(self, name: str) -> None:
        if home := self._homes.pop(name):
            del home.group.left_s[name]

    def _assign(self, request: RequestView, view: SchedulerView, last: Group | None = None) -> None:
        times = self._estimates.of(request, view)
        self._homes[request.id] = None
        groups = self._groups.values()
        for group in sorted(groups, key=lambda group: (self._load(group, request, view), group is not last)):
            if layout := group.layout(request.model, tuple(times.step_s)):
                self._homes[request.id] = Home(group, layout.parallel)
                group.left_s[request.id] = times.remaining_s(request, layout.parallel)
                return

    def _form(self, size: int, view: SchedulerView) -> None:
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

    def _size_for(self, request: RequestView, view: SchedulerView) -> int:
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
