"""How much a request pays for ranks while few are free: the fewer it can do without, the dearer they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gfdit.sim.bounds.profile import Leg
from gfdit.sim.bounds.work import Mode, efficient

Choices = tuple[tuple[tuple[int, int], ...], ...]

_SLOPES = ((0.0, 1), (0.1, 1), (1.0, 1), (0.1, 2), (0.5, 2), (2.0, 2))  # how much dearer the last rank is, and how
NUM_PRICINGS = len(_SLOPES)


def _prices(pricing: int, num_ranks: int) -> list[float]:
    """Of a rank for a while, by how many are free then: 1 if all are, more the fewer are left."""
    slope, power = _SLOPES[pricing]
    return [1.0 + slope * (1 - (free - 1) / num_ranks) ** power for free in range(num_ranks + 1)]


class Plans:
    """Those of requests with the same tasks, ``(count, modes)`` in order, for each of the ``NUM_PRICINGS``.

    A plan has a limit. A task takes the widest mode whose last rank-second more, for what it gains, costs at most
    the limit at the price of the moment, and pauses where even the narrowest costs more. So a low limit means
    narrow modes and times when many ranks are free; the highest takes every rank that helps at all.
    ``least_rank_ns`` is the work at the narrowest.
    """

    def __init__(self, tasks: Sequence[tuple[int, tuple[Mode, ...]]], num_ranks: int) -> None:
        self._tasks, self._num_ranks = tasks, num_ranks
        self.num_tasks = sum(count for count, _ in tasks)
        self.least_rank_ns = sum(count * min(_rank_ns(mode) for mode in modes) for count, modes in tasks)
        ladders = [[_ladder(modes, free) for free in range(num_ranks + 1)] for _, modes in tasks]
        self._plans = [_plans(ladders, _prices(pricing, num_ranks)) for pricing in range(NUM_PRICINGS)]
        self.legs = lru_cache(maxsize=None)(self._legs)
        self.behind = lru_cache(maxsize=None)(self._behind)

    def num_plans(self, pricing: int) -> int:
        """From the cheapest to the dearest."""
        return len(self._plans[pricing])

    def _behind(self, num_tasks: int) -> Plans:
        """Those of what is left behind the first ``num_tasks``."""
        left: list[tuple[int, tuple[Mode, ...]]] = []
        for count, modes in self._tasks:
            if count > num_tasks:
                left.append((count - num_tasks, modes))
            num_tasks = max(0, num_tasks - count)
        return Plans(left, self._num_ranks)

    def _legs(self, pricing: int, first: int, then: int, num_first: int) -> tuple[Leg, ...]:
        """The first ``num_first`` tasks by plan ``first``, all others by plan ``then``."""
        parts: list[tuple[int, Choices]] = []
        for index, (count, _) in enumerate(self._tasks):
            num_here = min(num_first, count)
            parts.append((num_here, self._plans[pricing][first][index]))
            parts.append((count - num_here, self._plans[pricing][then][index]))
            num_first -= num_here
        legs: list[Leg] = []
        after_ns = 0
        for count, choices in reversed(parts):
            if count:
                fastest_ns = min(ns for tried in choices for _, ns in tried)
                legs.append(Leg(count, choices, fastest_ns, after_ns))
                after_ns += count * fastest_ns
        return tuple(reversed(legs))


def _rank_ns(mode: Mode) -> int:
    return round(mode.num_ranks * mode.seconds)


def _ladder(modes: Sequence[Mode], num_free: int) -> list[tuple[float, tuple[int, int]]]:
    """Modes that fit, narrowest first, with the rank-seconds of the step to each by those of the best mode."""
    ladder: list[tuple[float, tuple[int, int]]] = []
    ranks, speed = 0.0, 0.0
    least = min(mode.num_ranks * mode.seconds for mode in modes)
    for mode in efficient(mode for mode in modes if mode.num_ranks <= num_free):
        cost = (mode.num_ranks - ranks) / (1 / mode.seconds - speed) / least
        ladder.append((cost, (round(mode.num_ranks), round(mode.seconds))))
        ranks, speed = mode.num_ranks, 1 / mode.seconds
    return ladder


def _plans(
    ladders: Sequence[Sequence[list[tuple[float, tuple[int, int]]]]], prices: Sequence[float]
) -> list[tuple[Choices, ...]]:
    """For each limit that changes anything: the choices of every kind of task."""
    limits = {
        round(prices[free] * cost, 9) for each in ladders for free, ladder in enumerate(each) for cost, _ in ladder
    }
    plans: list[tuple[Choices, ...]] = []
    for limit in sorted(limits):
        plan = tuple(_choices(each, prices, limit + 1e-9) for each in ladders)
        # Below the limit at which every task can run somewhere there is no plan.
        if all(map(any, plan)) and (not plans or plans[-1] != plan):
            plans.append(plan)
    return plans


def _choices(
    ladders: Sequence[list[tuple[float, tuple[int, int]]]], prices: Sequence[float], limit: float
) -> Choices:
    same: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}
    found = []
    for free, ladder in enumerate(ladders):
        tried = tuple(mode for cost, mode in reversed(ladder) if prices[free] * cost <= limit)
        found.append(same.setdefault(tried, tried))
    return tuple(found)
