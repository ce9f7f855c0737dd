"""Who can still be served in time, and at what cost: the deadlines first, nobody for ever last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec, RequestView, SchedulerView, TaskView
from gfdit.policies._ranks import FreeRanks


class Prospect(NamedTuple):
    """What finishing a request takes now: seconds by specification, narrowest first, and the one it needs.

    ``needed`` is the narrowest that meets the deadline, None if there is no deadline or no such specification.
    """

    seconds: dict[ParallelSpec, float]
    narrow: ParallelSpec
    needed: ParallelSpec | None

    @property
    def alone_s(self) -> float:
        """Time on the narrowest specification."""
        return self.seconds[self.narrow]

    @property
    def work_rank_s(self) -> float:
        """Rank-seconds on the narrowest specification, which wastes least."""
        return self.alone_s * self.narrow.size


@dataclass
class Triage:
    """Keep the largest set of requests that can all be in time, serve it first, and let nobody wait for ever.

    Re-decided at every step boundary, since a step is the unit of preemption:

    1. *Who can be saved.* A request needs the narrowest specification that still meets its deadline. In order of
       deadlines, while the rank-seconds due by one exceed ``share`` of what the ranks can do until then, the
       request with the most work left per weight is given up (Moore and Hodgson's rule). It may be kept again at
       the next decision. The share leaves room for those yet to come, which cannot be known.
    2. *Who goes first.* The kept ones by deadline, then the others by the work they have left (shortest remaining
       processing time first). When the kept ones have room to spare, the shortest goes first whoever it is:
       that costs no deadline and shortens the mean.
    3. *How wide.* What is kept gets what it needs, and if that saves it, waits until as many ranks are free.
       Everything else stays narrow, where a rank-second does most. Ranks that nobody wants go where they save
       most time each.
    4. *Nobody starves.* The policy follows, as a fluid, what first come first served on single ranks would do, and
       how long it would let a request wait since the system was last empty. Once the oldest requests need all
       ranks to end within ``patience`` times that, newer ones stand back.

    Deadlines and patience pull in opposite directions: under overload the latest requests of first come first
    served can only be matched by giving up its deadlines. ``patience`` 1 does that, infinity never.
    A request of priority ``p`` weighs ``2 ** p``. ``objective="latency"`` ignores deadlines.
    """

    share: float = 0.85
    patience: float = 2.0
    objective: Literal["deadlines", "latency"] = "deadlines"
    name = "triage"
    _queue: ShadowQueue = field(default_factory=lambda: ShadowQueue(), init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if not self.patience >= 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")

    def schedule(self, view: SchedulerView) -> Decision:
        prospects = {name: self._prospect(request, view) for name, request in view.requests.items()}
        self._queue.follow(view.requests, prospects, len(view.ranks))
        kept, room = self._keep(view, prospects)
        pressing = self._pressing(view, prospects)

        def urgency(task: TaskView) -> tuple[float, ...]:
            request = view.requests[task.request_id]
            shortest = prospects[request.id].work_rank_s / _weight(request)
            if request.id in kept and not room:
                return (-pressing.get(request.id, 0), 0, kept[request.id], shortest)
            return (-pressing.get(request.id, 0), 0 if room else 1, shortest)

        free = FreeRanks.of(view.ranks)
        chosen: list[tuple[TaskView, ParallelSpec]] = []
        left = len(free)
        for task in sorted(view.ready, key=urgency):
            if left == 0:
                break
            if self._worth_waiting(task, prospects[task.request_id], left, kept, view):
                left = 0  # the others of its ranks are about to finish their steps
            elif spec := _fitting(task, prospects[task.request_id], left, view):
                chosen.append((task, spec))
                left -= spec.size
        if left and len(chosen) == len(view.ready):
            chosen = _widen(chosen, left, prospects, view)
        dispatches = []
        for task, spec in chosen:
            if layout := free.take(spec, task.model, view.requests[task.request_id].last_layout):
                dispatches.append(Dispatch((task.id,), layout))
        return Decision(tuple(dispatches))

    def _worth_waiting(
        self, task: TaskView, prospect: Prospect, num_free: int, kept: Mapping[str, float], view: SchedulerView
    ) -> bool:
        """Whether a kept request lacks ranks for what it needs, and would be in time if it waited for them."""
        spec = prospect.needed
        if task.request_id not in kept or spec is None or spec not in task.candidates or spec.size <= num_free:
            return False
        busy_until_s = sorted(rank.busy_until_s for rank in view.ranks if rank.busy_until_s is not None)
        lacking = spec.size - num_free
        if lacking > len(busy_until_s):
            return False
        return busy_until_s[lacking - 1] + prospect.seconds[spec] <= kept[task.request_id]

    def _prospect(self, request: RequestView, view: SchedulerView) -> Prospect:
        seconds = {
            spec: view.cost.remaining_s(request, ExecutionLayout(_RANKS[: spec.size], spec))
            for spec in request.candidates
        }
        narrow = min(seconds, key=lambda spec: (spec.size, spec.sp))
        due_s = math.inf if request.deadline_s is None else request.deadline_s - view.now_s
        needed = None
        if self.objective == "deadlines" and request.deadline_s is not None:
            needed = min(
                (spec for spec, left_s in seconds.items() if left_s <= due_s),
                key=lambda spec: (spec.size, spec.sp),
                default=None,
            )
        return Prospect(seconds, narrow, needed)

    def _keep(self, view: SchedulerView, prospects: Mapping[str, Prospect]) -> tuple[dict[str, float], bool]:
        """The deadlines of the requests to save, and whether they have room to spare."""
        capacity = self.share * len(view.ranks)
        saved: list[tuple[float, str]] = []
        by_deadline = sorted(
            (request.deadline_s, name)
            for name, request in view.requests.items()
            if request.deadline_s is not None and prospects[name].needed is not None
        )
        demand_rank_s = 0.0
        for deadline_s, name in by_deadline:
            work_rank_s = _needed_rank_s(prospects[name])
            demand_rank_s += work_rank_s
            heappush(saved, (-work_rank_s / _weight(view.requests[name]), name))
            while saved and demand_rank_s > capacity * (deadline_s - view.now_s):
                demand_rank_s -= _needed_rank_s(prospects[heappop(saved)[1]])
        names = {name for _, name in saved}
        kept = {name: deadline_s for deadline_s, name in by_deadline if name in names}
        return kept, self._has_room(kept, view, prospects)

    def _has_room(self, kept: Mapping[str, float], view: SchedulerView, prospects: Mapping[str, Prospect]) -> bool:
        """Whether every kept request would still be in time if the longest request of all went first."""
        demand_rank_s = 0.0
        longest_s = max((prospect.alone_s for prospect in prospects.values()), default=0.0)
        for name, deadline_s in kept.items():
            prospect = prospects[name]
            assert prospect.needed is not None
            demand_rank_s += _needed_rank_s(prospect)
            due_s = deadline_s - view.now_s
            spare_rank_s = self.share * len(view.ranks) * due_s - demand_rank_s
            if min(spare_rank_s, (due_s - prospect.seconds[prospect.needed]) * len(view.ranks)) < longest_s:
                return False
        return True

    def _pressing(self, view: SchedulerView, prospects: Mapping[str, Prospect]) -> dict[str, int]:
        """Requests that must go before newer ones: 1, or 2 for one that is late even if it starts now."""
        longest_s = self.patience * self._queue.longest_s
        demand_rank_s, older, pressing = 0.0, [], {}
        for name, request in view.requests.items():  # in order of arrival
            left_s = request.arrival_s + longest_s - view.now_s
            demand_rank_s += prospects[name].work_rank_s
            older.append(name)
            if demand_rank_s >= len(view.ranks) * left_s:
                pressing.update(dict.fromkeys(older, 1))
                older = []
            if prospects[name].alone_s >= left_s:
                pressing[name] = 2
        return pressing


@dataclass
class ShadowQueue:
    """How long first come first served on single ranks would let requests wait, the work flowing like a fluid.

    ``longest_s`` is the longest time from arrival to end since no request was alive.
    """

    longest_s: float = 0.0
    _backlog_rank_s: float = 0.0
    _until_s: float = 0.0
    _alive: set[str] = field(default_factory=set)

    def follow(
        self, requests: Mapping[str, RequestView], prospects: Mapping[str, Prospect], num_ranks: int
    ) -> None:
        self._alive &= requests.keys()
        for name, request in requests.items():  # in order of arrival
            if name in self._alive:
                continue
            if not self._alive:
                self.longest_s = self._backlog_rank_s = 0.0
            drained = num_ranks * (request.arrival_s - self._until_s)
            self._backlog_rank_s = max(0.0, self._backlog_rank_s - drained)
            self._until_s = request.arrival_s
            waiting_s = self._backlog_rank_s / max(num_ranks, 1)
            self.longest_s = max(self.longest_s, waiting_s + prospects[name].alone_s)
            self._backlog_rank_s += prospects[name].work_rank_s
            self._alive.add(name)


_RANKS = tuple(range(1024))  # costs depend on the specification only; which ranks does not matter


def _weight(request: RequestView) -> float:
    return 2.0**request.priority


def _needed_rank_s(prospect: Prospect) -> float:
    spec = prospect.needed
    return 0.0 if spec is None else prospect.seconds[spec] * spec.size


def _fitting(task: TaskView, prospect: Prospect, num_free: int, view: SchedulerView) -> ParallelSpec | None:
    """What the request needs, or the widest below it that fits; without need, the narrowest."""
    offered = view.cost.candidates(task)
    wanted = (prospect.needed or prospect.narrow).size
    fitting = [spec for spec in offered if spec.size <= min(num_free, wanted)]
    if fitting:
        return max(fitting, key=lambda spec: (spec.size, spec.sp))
    return offered[0] if offered[0].size <= num_free else None


def _widen(
    chosen: list[tuple[TaskView, ParallelSpec]],
    num_idle: int,
    prospects: Mapping[str, Prospect],
    view: SchedulerView,
) -> list[tuple[TaskView, ParallelSpec]]:
    """Give idle ranks to the tasks whose requests they shorten most, per rank, as long as any gains."""
    chosen = list(chosen)
    while num_idle:
        best_s, best = 0.0, None
        for index, (task, spec) in enumerate(chosen):
            seconds = prospects[task.request_id].seconds
            for wider in view.cost.candidates(task):
                extra = wider.size - spec.size
                if 0 < extra <= num_idle and wider in seconds and spec in seconds:
                    saved_s = (seconds[spec] - seconds[wider]) / extra
                    if saved_s > best_s:
                        best_s, best = saved_s, (index, wider)
        if best is None:
            break
        index, wider = best
        num_idle -= wider.size - chosen[index][1].size
        chosen[index] = (chosen[index][0], wider)
    return chosen
