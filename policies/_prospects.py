"""What finishing a request takes from now on, at every degree of parallelism."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count

from gfdit.core import ExecutionLayout, ParallelSpec, RequestView, SchedulerView, TaskKind
from gfdit.core.policy.changes import Changes
from gfdit.core.policy.estimates import MAX_CLASSES, Estimates, ServiceTimes
from gfdit.policies._allocation import ROUNDING_S, Degree, useful_degrees
from gfdit.policies._aside import Aside

MAX_PRIORITY = 64


@dataclass(eq=False, slots=True)
class Prospect:
    """A live request and what it still needs behind the task that it runs, if it runs one.

    ``specs`` are the useful degrees, narrowest first: each is faster than those before; ``degrees`` are the same
    with the seconds of a step. Denoising the ``num_steps`` left at one of them takes ``left_s`` seconds with
    everything that comes after, ``after_s`` of them, and ``left_rank_s`` rank-seconds.
    ``free_s`` is when the running task should end, minus infinity without one; it holds ``num_held`` ranks.

    The last fields change with time: whether the deadline is to be met, the narrowest of ``specs`` that does it
    (by index, 0 if it is not), the rank-seconds that takes behind the running task and with it, and by when.
    """

    request: RequestView
    times: ServiceTimes
    degrees: tuple[Degree, ...]
    specs: tuple[ParallelSpec, ...]
    num_steps: int
    after_s: float
    left_s: tuple[float, ...]
    left_rank_s: tuple[float, ...]
    weight: float
    deadline_s: float  # infinite without one
    free_s: float = -math.inf
    num_held: int = 0
    step_s: float = field(init=False)  # at the narrowest degree
    fastest_s: float = field(init=False)  # at the widest
    shortness: float = field(init=False)  # rank-seconds left at the narrowest degree, for each unit of weight
    arrival_s: float = field(init=False)
    kept: bool = field(init=False, default=False)
    needed: int = field(init=False, default=0)
    rest_rank_s: float = field(init=False, default=0.0)
    work_rank_s: float = field(init=False, default=0.0)
    due_s: float = field(init=False, default=math.inf)
    settled_until_s: float = field(init=False, default=-math.inf)  # until then ``settle`` would change nothing
    number: int = field(init=False, default=0)  # in order of arrival
    is_aside: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.step_s, self.fastest_s = self.degrees[0][1], self.degrees[-1][1]
        self.shortness = self.left_rank_s[0] / self.weight
        self.arrival_s = self.request.arrival_s

    @property
    def spec(self) -> ParallelSpec:
        return self.specs[self.needed]

    def within(self, limit_s: float) -> ParallelSpec:
        """The narrowest degree at which a step takes no longer, or the fastest."""
        return next((spec for spec, step_s in self.degrees if step_s <= limit_s), self.specs[-1])

    @property
    def latest_start_s(self) -> float:
        """When the next step must start to be over by ``due_s``."""
        return self.due_s - self.left_s[self.needed]

    def spare_s(self, now_s: float) -> float:
        """How long it may wait and be in time all the same, at its fastest; negative if it cannot be."""
        return self.deadline_s - self.left_s[-1] - max(now_s, self.free_s)

    def is_late(self, now_s: float) -> bool:
        """Whether it has a deadline and misses it even if nobody else is there."""
        return self.deadline_s < math.inf and self.spare_s(now_s) < 0

    def settle(self, now_s: float, max_waste: float) -> None:
        """Find the narrowest degree that meets the deadline; keep the request if there is one for its price.

        Where a degree is just too slow the next one is needed only until it is fast enough again: the work lies
        between those of both.
        """
        start_s = max(now_s, self.free_s)
        left_s, left_rank_s, allowed_s = self.left_s, self.left_rank_s, self.deadline_s - start_s + ROUNDING_S
        if self.deadline_s == math.inf or left_s[-1] > allowed_s:
            self.give_up()
            self.settled_until_s = math.inf  # time only makes it later
        elif left_s[0] <= allowed_s:
            self.kept, self.needed, self.rest_rank_s = True, 0, left_rank_s[0]
            self.settled_until_s = self.deadline_s - left_s[0]
        else:
            wide = next(index for index, seconds in enumerate(left_s) if seconds <= allowed_s)
            self.settled_until_s = -math.inf
            if left_rank_s[wide] > (1 + max_waste) * left_rank_s[0]:
                self.give_up()
                return
            share = (left_s[wide - 1] - allowed_s) / (left_s[wide - 1] - left_s[wide])
            self.rest_rank_s = left_rank_s[wide - 1] + share * (left_rank_s[wide] - left_rank_s[wide - 1])
            self.kept, self.needed = True, wide

    def give_up(self) -> None:
        """The rest is done at the narrowest degree, unless it is kept again."""
        self.kept, self.needed, self.rest_rank_s = False, 0, self.left_rank_s[0]


class Prospects:
    """Prospects by request; one is made again only when its request, the ranks or the costs have changed.

    ``live`` are those that are not put ``aside``; ``changed`` are the names of requests that came, went or
    changed between the last two times that all were asked for; None if any may have.
    """

    def __init__(self, *, deadlines: bool = True, weights: bool = True) -> None:
        self.live: dict[str, Prospect] = {}
        self.aside = Aside()
        self.changed: Collection[str] | None = None
        self._deadlines, self._weights = deadlines, weights
        self._estimates = Estimates()
        self._known: dict[str, Prospect] = {}
        self._changes = Changes()
        self._numbers = count()
        self._trajectories: dict[tuple[int, int], _Trajectory] = {}  # by identity of times and ranks for the model
        self._num_able: Counter[str] = Counter()  # ranks by model
        self._num_ranks = 0

    def of(self, view: SchedulerView) -> Mapping[str, Prospect]:
        """In order of arrival, without requests that no ranks can run; see also ``changed``."""
        self._refresh(view)
        known, requests = self._known, view.requests
        self.changed = names = self._changes.of(view)
        try:
            for name in dict.fromkeys((*known, *requests)) if names is None else names:
                request, old = requests.get(name), known.get(name)
                if old is not None and old.request is request:
                    continue
                made = None if request is None else self._make(request, view)
                if old is not None:
                    self._forget(old)
                if made is None:
                    known.pop(name, None)
                    continue
                made.number = next(self._numbers) if old is None else old.number
                known[name] = self.live[name] = made
        except Exception:
            self._changes.forget()
            raise
        return known

    def put_aside(self) -> None:
        """Those that wait, and have no deadline or, as last settled, none that they could still meet.

        Not edits under masks, which share steps all the same.
        """
        lost = [one for one in self.live.values() if one.settled_until_s == math.inf and not one.kept]
        for prospect in lost:
            request = prospect.request
            if not request.running and request.shape.computed_percent == 100:
                del self.live[request.id]
                prospect.is_aside = True
                self.aside.add(prospect)

    def _forget(self, prospect: Prospect) -> None:
        if prospect.is_aside:
            self.aside.remove(prospect)
        else:
            del self.live[prospect.request.id]

    def of_one(self, request: RequestView, view: SchedulerView) -> Prospect | None:
        """None if no ranks can run it."""
        self._refresh(view)
        prospect = self._known.get(request.id)
        if prospect is None or prospect.request is not request:
            return self._make(request, view)
        return prospect

    def _refresh(self, view: SchedulerView) -> None:
        if self._estimates.are_old(view) or len(view.ranks) != self._num_ranks:
            self._known, self._trajectories, self.live, self.aside = {}, {}, {}, Aside()
            self._changes.forget()
            self._num_able = Counter([model for rank in view.ranks for model in rank.resident])
            self._num_ranks = len(view.ranks)

    def _make(self, request: RequestView, view: SchedulerView) -> Prospect | None:
        times = self._estimates.of(request, view)
        # Components of workflows can come to any rank.
        num_able = self._num_able[request.model] if request.parts is None else self._num_ranks
        trajectory = self._trajectories.get(key := (id(times), num_able))
        if trajectory is None:
            if len(self._trajectories) >= MAX_CLASSES:
                self._trajectories.clear()
            trajectory = self._trajectories[key] = _Trajectory(times, useful_degrees(times.step_s, num_able))
        if not trajectory.specs:
            return None
        num_steps, after_s = request.tasks_left.get(TaskKind.DENOISE, 0), times.around_s(request)
        free_s, num_held = -math.inf, 0
        if request.running and request.last_layout:
            free_s, num_held = _free_s(request.last_layout, view), len(request.last_layout.ranks)
            part = _next_part(request)
            if part in times.other_s:
                after_s -= times.other_s[part]
            else:
                num_steps -= 1
        left_s, left_rank_s = trajectory.left(num_steps, after_s)
        return Prospect(
            request=request,
            times=times,
            degrees=trajectory.degrees,
            specs=trajectory.specs,
            num_steps=num_steps,
            after_s=after_s,
            left_s=left_s,
            left_rank_s=left_rank_s,
            weight=_weight(request.priority) if self._weights else 1.0,
            deadline_s=request.deadline_s if self._deadlines and request.deadline_s is not None else math.inf,
            free_s=free_s,
            num_held=num_held,
        )


class _Trajectory:
    """What requests of one class have left, by how far they are: the same for all of them."""

    def __init__(self, times: ServiceTimes, degrees: tuple[Degree, ...]) -> None:
        self.times = times
        self.degrees = degrees
        self.specs = tuple([spec for spec, _ in degrees])
        self._left: dict[tuple[int, float], tuple[tuple[float, ...], tuple[float, ...]]] = {}

    def left(self, num_steps: int, after_s: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds and rank-seconds at each degree: of so many steps, and of ``after_s`` on one rank."""
        left = self._left.get(key := (num_steps, after_s))
        if left is None:
            left = self._left[key] = (
                tuple([after_s + num_steps * step_s for _, step_s in self.degrees]),
                tuple([after_s + num_steps * spec.size * step_s for spec, step_s in self.degrees]),
            )
        return left


def _next_part(request: RequestView) -> TaskKind | tuple[str, TaskKind]:
    """What it runs now, or one of several."""
    if request.parts is not None:
        return next(part for part, count in request.parts.items() if count)
    return next(kind for kind in TaskKind if request.tasks_left.get(kind))


def _weight(priority: int) -> float:
    """Priorities beyond this say nothing more, and clients choose them."""
    return 2.0 ** max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))


def _free_s(layout: ExecutionLayout, view: SchedulerView) -> float:
    """When the first rank of ``layout`` should be free; minus infinity if it is."""
    index = bisect_left(view.ranks, layout.ranks[0], key=lambda rank: rank.id)
    for rank in view.ranks[index : index + 1]:
        if rank.id == layout.ranks[0] and rank.busy_until_s is not None:
            return rank.busy_until_s
    return -math.inf
