"""Whose deadlines are kept, and at what price to the others."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter

from gfdit.policies._allocation import ROUNDING_S
from gfdit.policies._arrivals import ArrivalRates
from gfdit.policies._aside import Aside
from gfdit.policies._prospects import Prospect

MEMORY = 100
"""Requests that the mean of their work goes back."""


@dataclass
class ShadowQueue:
    """How long first come first served on single ranks would let requests wait, the work flowing like a fluid.

    ``longest_s`` is the longest time from arrival to end since no request was alive. Of the last requests, about a
    hundred, ``mean_rank_s`` is what they took on one rank each, and ``tight_share`` how many of them came with a
    deadline that only several ranks can meet. ``arrivals`` are told of each request.
    """

    arrivals: ArrivalRates = field(default_factory=ArrivalRates)
    longest_s: float = 0.0
    mean_rank_s: float = 0.0
    tight_share: float = 0.0
    _tight_spare_s: float = 0.0
    _num_seen: int = 0
    _backlog_rank_s: float = 0.0
    _until_s: float = 0.0
    _alive: set[str] = field(default_factory=set)

    @property
    def tight_spare_s(self) -> float:
        """How long those that need several ranks could wait when they came, on average."""
        return self._tight_spare_s / self.tight_share if self.tight_share else math.inf

    def has_followed(self, requests: Mapping[str, object]) -> bool:
        """Whether nobody has come or gone since."""
        return requests.keys() == self._alive

    def follow(self, prospects: Mapping[str, Prospect], changed: Collection[str] | None, num_ranks: int) -> None:
        """``prospects`` by request; who came, in this order, or went is among ``changed``, if that is known."""
        if changed is None:
            changed = (*self._alive, *prospects)
        self._alive.difference_update([name for name in changed if name not in prospects])
        for name in changed:
            if name in self._alive or (prospect := prospects.get(name)) is None:
                continue
            if not self._alive:
                self.longest_s = self._backlog_rank_s = 0.0
            arrival_s = prospect.arrival_s
            self._backlog_rank_s = max(0.0, self._backlog_rank_s - num_ranks * (arrival_s - self._until_s))
            self._until_s = arrival_s
            self.longest_s = max(self.longest_s, self._backlog_rank_s / num_ranks + prospect.left_s[0])
            self._backlog_rank_s += prospect.left_rank_s[0]
            self._num_seen = min(self._num_seen + 1, MEMORY)
            self.mean_rank_s += (prospect.left_rank_s[0] - self.mean_rank_s) / self._num_seen
            allowed_s = prospect.deadline_s - arrival_s
            is_tight = prospect.left_s[-1] < allowed_s < prospect.left_s[0]
            spare_s = allowed_s - prospect.left_s[-1] if is_tight else 0.0
            self.tight_share += (is_tight - self.tight_share) / self._num_seen
            self._tight_spare_s += (spare_s - self._tight_spare_s) / self._num_seen
            self.arrivals.note(arrival_s, prospect.shortness, prospect.left_rank_s[0], allowed_s)
            self._alive.add(name)


def keep(
    prospects: Collection[Prospect],
    *,
    capacity: float,
    max_waste: float,
    now_s: float,
    reserved: Callable[[float], float] = lambda size: 0.0,
) -> None:
    """Decide which deadlines are kept, as many as possible; all others are due never.

    ``capacity`` is the number of ranks that count. Moore and Hodgson's rule, for work that can be spread over
    ranks: in order of deadlines, while more is due than the ranks can do until then, the kept request with the
    most work per weight is given up. Of the ranks ``reserved(size)`` do not count while the largest has that much
    work per weight: they are for those yet to come who would be kept before it.
    """
    kept: list[Prospect] = []
    for prospect in prospects:
        if prospect.settled_until_s < now_s:
            prospect.settle(now_s, max_waste)
        else:
            prospect.kept = prospect.settled_until_s < math.inf
        held_rank_s = prospect.num_held * (prospect.free_s - now_s) if prospect.free_s > now_s else 0.0
        prospect.work_rank_s = prospect.rest_rank_s + held_rank_s
        if prospect.kept:
            prospect.due_s = prospect.deadline_s
            kept.append(prospect)
        else:
            prospect.due_s = math.inf
    kept.sort(key=attrgetter("due_s", "number"))
    dearest: list[tuple[float, int, Prospect]] = []  # most work per weight first
    first = 0  # of those due so far that are not among them yet
    demand_rank_s = largest = 0.0
    num_open = capacity
    for number, prospect in enumerate(kept):
        demand_rank_s += prospect.work_rank_s
        if (size := prospect.work_rank_s / prospect.weight) > largest:
            largest, num_open = size, capacity - reserved(size)
        left_s = prospect.due_s - now_s
        if demand_rank_s <= (allowed_rank_s := num_open * left_s):
            continue
        for index in range(first, number + 1):
            heappush(dearest, (-kept[index].work_rank_s / kept[index].weight, index, kept[index]))
        first = number + 1
        while demand_rank_s > allowed_rank_s:
            lost = dearest[0][-1]
            if demand_rank_s <= lost.work_rank_s + ROUNDING_S:
                break  # nothing else is due by then, and alone it is in time
            heappop(dearest)
            demand_rank_s -= lost.work_rank_s
            _give_up(lost)
            largest = -dearest[0][0] if dearest else 0.0
            num_open = capacity - reserved(largest)
            allowed_rank_s = num_open * left_s


def give_up_dear(prospects: Collection[Prospect], aside: Aside, price_rank_s: float, num_ranks: int) -> None:
    """Give up, the largest first, who would make others wait for more than ``price_rank_s`` a unit of weight.

    Those are the late ones that are shorter, ``aside`` among them: each would go before it if it was late as well,
    and now waits for as long as all ranks take for its work.
    """
    late = sorted([prospect.shortness for prospect in prospects if not prospect.kept])
    if not late and not aside.queues:
        return
    kept = [prospect for prospect in prospects if prospect.kept]
    num_aside = sum(map(len, aside.queues.values()))
    for prospect in sorted(kept, key=attrgetter("work_rank_s"), reverse=True):
        if (len(late) + num_aside) * prospect.work_rank_s <= price_rank_s * prospect.weight * num_ranks:
            continue
        num_waiting = bisect_left(late, prospect.shortness) + aside.num_shorter(prospect.shortness)
        if num_waiting * prospect.work_rank_s > price_rank_s * prospect.weight * num_ranks:
            _give_up(prospect)
            insort(late, prospect.shortness)


def _give_up(prospect: Prospect) -> None:
    if prospect.needed:
        prospect.work_rank_s += prospect.left_rank_s[0] - prospect.rest_rank_s
        prospect.give_up()
    prospect.kept, prospect.due_s = False, math.inf


class Slack:
    """Rank-seconds that can be spent on something else before each due time, all that is due still being done.

    Of the time until a deadline only the share ``lending`` counts: what is done early makes room for requests yet
    to come.
    """

    def __init__(self, prospects: Collection[Prospect], num_ranks: int, lending: float, now_s: float) -> None:
        due = [prospect for prospect in prospects if prospect.due_s < math.inf]
        due.sort(key=attrgetter("due_s"))
        demands_rank_s = accumulate([prospect.work_rank_s for prospect in due])
        self._dues_s = [prospect.due_s for prospect in due]
        spare = [
            lending * num_ranks * (prospect.due_s - now_s) - demand_rank_s
            for prospect, demand_rank_s in zip(due, demands_rank_s, strict=True)
        ]
        self._least_rank_s = list(accumulate(spare, min))
        self._spent_rank_s = 0.0

    def spend(self, rank_s: float, due_s: float) -> bool:
        """Spend ``rank_s`` on a request due at ``due_s``; False if that cannot be spared at some earlier time."""
        index = bisect_left(self._dues_s, due_s)
        if index and self._least_rank_s[index - 1] < self._spent_rank_s + rank_s:
            return False
        self._spent_rank_s += rank_s
        return True
