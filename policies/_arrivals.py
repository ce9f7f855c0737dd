"""How much work arrives, learnt as it does: what promises made now must leave room for."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

SIZES_PER_DOUBLING = 4
"""Sizes nearer to each other than that are one class: requests of one shape differ a little in their steps."""


@dataclass
class ArrivalRates:
    """The rank-seconds that arrive in a second, by size of request; the past is forgotten exponentially.

    The mean age of what is remembered is ``memory`` times what requests have on average until their deadline:
    a burst matters to promises that end while it goes on.
    """

    memory: float = 0.5
    max_averaged: int = 100
    _allowed_s: float = 0.0  # on average until the deadline
    _num_averaged: int = 0
    _classes: list[int] = field(default_factory=list)  # in ascending order of size
    _bounds: list[float] = field(default_factory=list)  # the largest size of each
    _rates: dict[int, float] = field(default_factory=dict)  # by class, as of _until_s
    _until_s: float = 0.0

    def note(self, arrival_s: float, size: float, rank_s: float, allowed_s: float) -> None:
        """A request of ``size`` (rank-seconds for each unit of weight) has arrived."""
        if allowed_s < math.inf:
            self._num_averaged = min(self._num_averaged + 1, self.max_averaged)
            self._allowed_s += (allowed_s - self._allowed_s) / self._num_averaged
        if not self._allowed_s or size <= 0:
            return
        faded = self._faded(arrival_s)
        self._rates = {one: rate * faded for one, rate in self._rates.items()}
        self._until_s = max(self._until_s, arrival_s)
        if (one := _class_of(size)) not in self._rates:
            insort(self._classes, one)
            self._bounds = [2 ** ((one + 0.5) / SIZES_PER_DOUBLING) for one in self._classes]
        self._rates[one] = self._rates.get(one, 0.0) + rank_s / (self.memory * self._allowed_s)

    def smaller(self, now_s: float) -> SmallerRates:
        faded = self._faded(now_s)
        rates = [faded * self._rates[one] for one in self._classes]
        return SmallerRates(self._bounds, list(accumulate(rates, initial=0.0)))

    def _faded(self, now_s: float) -> float:
        age_s = max(0.0, now_s - self._until_s)
        return math.exp(-age_s / (self.memory * self._allowed_s)) if self._allowed_s else 0.0


class SmallerRates(NamedTuple):
    """The rank-seconds a second of all that is smaller than a size: ``below`` the first bound that is not."""

    bounds: Sequence[float]
    below: Sequence[float]

    def of(self, size: float) -> float:
        return self.below[bisect_left(self.bounds, size)]


def _class_of(size: float) -> int:
    return round(SIZES_PER_DOUBLING * math.log2(size))
