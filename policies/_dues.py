"""By when each request should be over: its deadline if it is kept, else before it has waited for too long."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter

from gfdit.policies._allocation import ROUNDING_S
from gfdit.policies._prospects import Prospect


@dataclass
class ShadowQueue:
    """How long first come first served on single ranks would let requests wait, the work flowing like a fluid.

    ``longest_s`` is the longest time from arrival to end since no request was alive.
    """

    longest_s: float = 0.0
    _backlog_rank_s: float = 0.0
    _until_s: float = 0.0
    _alive: set[str] = field(default_factory=set)

    def follow(self, prospects: Mapping[str, Prospect], num_ranks: int) -> None:
        """``prospects`` by request, in order of arrival."""
        if prospects.keys() == self._alive:
            return
        self._alive &= prospects.keys()
        for name, prospect in prospects.items():
            if name in self._alive:
                continue
            if not self._alive:
                self.longest_s = self._backlog_rank_s = 0.0
            arrival_s = prospect.arrival_s
            self._backlog_rank_s = max(0.0, self._backlog_rank_s - num_ranks * (arrival_s - self._until_s))
            self._until_s = arrival_s
            self.longest_s = max(self.longest_s, self._backlog_rank_s / num_ranks + prospect.left_s[0])
            self._backlog_rank_s += prospect.left_rank_s[0]
            self._alive.add(name)


def set_dues(
    prospects: Collection[Prospect], patience_s: float, *, capacity: float, max_waste: float, now_s: float
) -> None:
    """Decide which requests are kept, as many as possible, and set everyone's ``due_s``.

    ``capacity`` is the number of ranks that count. A kept request is due at its deadline, any other ``patience_s``
    after its arrival. Moore and Hodgson's rule, for work that does not vanish when it is given up: in order of due
    times, while more is due than the ranks can do until then, the kept request with the most work per weight is
    given up, if that makes it due later.
    """
    for prospect in prospects:
        if prospect.settled_until_s < now_s:
            prospect.settle(now_s, max_waste)
        prospect.work_rank_s = prospect.rest_rank_s
        if prospect.free_s > now_s:
            prospect.work_rank_s += prospect.num_held * (prospect.free_s - now_s)
        prospect.due_s = prospect.deadline_s if prospect.kept else prospect.arrival_s + patience_s
    kept: list[Prospect] = []  # and due so far
    largest: list[tuple[float, int, Prospect]] = []  # of those, what was looked at when too much was due
    returning: list[tuple[float, int, Prospect]] = []  # given up, by the time when it falls due again
    demand_rank_s = 0.0
    number = 0
    for prospect in sorted(prospects, key=attrgetter("due_s")):
        due_s = prospect.due_s
        if due_s == math.inf:
            break
        while returning and returning[0][0] <= due_s:
            demand_rank_s += heappop(returning)[-1].work_rank_s
        demand_rank_s += prospect.work_rank_s
        if prospect.kept:
            kept.append(prospect)
        if demand_rank_s <= (allowed_rank_s := capacity * (due_s - now_s)):
            continue
        for each in kept:
            number += 1
            heappush(largest, (-each.work_rank_s / each.weight, number, each))
        kept.clear()
        while largest and demand_rank_s > allowed_rank_s:
            if demand_rank_s <= largest[0][-1].work_rank_s + ROUNDING_S:
                break  # nothing else is due by then, and alone it is in time
            _, rank, lost = heappop(largest)
            if (later_s := lost.arrival_s + patience_s) > due_s:
                demand_rank_s -= lost.work_rank_s
                lost.work_rank_s -= lost.rest_rank_s
                lost.give_up()
                lost.work_rank_s += lost.rest_rank_s
                lost.due_s = later_s
                heappush(returning, (later_s, rank, lost))


class Slack:
    """Rank-seconds that can be spent on something else before each due time, all that is due still being done.

    Of the time until a deadline that is kept only the share ``lending`` counts: what is done early makes room for
    requests yet to come.
    """

    def __init__(self, prospects: Collection[Prospect], num_ranks: int, lending: float, now_s: float) -> None:
        due = [prospect for prospect in prospects if prospect.due_s < math.inf]
        due.sort(key=attrgetter("due_s"))
        demands_rank_s = accumulate([prospect.work_rank_s for prospect in due])
        self._dues_s = [prospect.due_s for prospect in due]
        spare = [
            (lending if prospect.kept else 1.0) * num_ranks * (prospect.due_s - now_s) - demand_rank_s
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
