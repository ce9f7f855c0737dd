"""Measured times against expected ones: a running ratio per key that a few outliers cannot move.

Of most tasks that is a median. Where a cache skips some steps, times are of two kinds, and the median is one of
them, which one depending on chance: there it is a mean over more of them, outliers apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field

from gfdit.core.bounded import RecentDict

WINDOW = 15  # measurements remembered per key: a median over them ignores up to seven outliers
MEAN_WINDOW = 60  # for a mean: the steps of one or several requests, which begin with full ones
MAX_KEYS = 8192
"""Keys with measurements: about 1000 sizes at four degrees each, in 9 MB. Of more, those used last are kept."""


def _lower_median(ascending: list[float]) -> float:
    """Of two measurements the first, slow one (warm-up) does not count."""
    return ascending[(len(ascending) - 1) // 2]


def _mean_but_for_the_slowest(ascending: list[float]) -> float:
    """One in fifteen, and one of few, counts as the slowest of the others: a pause, or a warm-up."""
    num_slowest = min(max(1, len(ascending) // WINDOW), len(ascending) - 1)
    others = ascending[: len(ascending) - num_slowest]
    return (sum(others) + num_slowest * others[-1]) / len(ascending)


@dataclass(slots=True)
class Measured:
    """What was measured under one key. ``ratio`` is the median of measured / expected seconds, or their mean."""

    count: int = 0
    ratio: float = 1.0
    recent: list[float] = field(default_factory=list)
    _ascending: list[float] = field(default_factory=list, repr=False)  # ``recent`` in order of size
    takes_mean: bool = False

    @property
    def spread(self) -> float:
        """Median distance of the recent ratios from ``ratio``, as a fraction of it."""
        if not self.recent:
            return 0.0
        return _lower_median(sorted(abs(value - self.ratio) for value in self.recent)) / self.ratio

    def add(self, ratio: float) -> None:
        self.count += 1
        if len(self.recent) == (MEAN_WINDOW if self.takes_mean else WINDOW):
            if self.recent[0] == ratio:  # the same values stay, as they always do where times are known
                self.recent.append(self.recent.pop(0))
                return
            del self._ascending[bisect_left(self._ascending, self.recent.pop(0))]
        self.recent.append(ratio)
        insort(self._ascending, ratio)
        self.ratio = (_mean_but_for_the_slowest if self.takes_mean else _lower_median)(self._ascending)


class Calibration:
    """Running ratios by key, of the :data:`MAX_KEYS` keys used last: others are as if never measured."""

    def __init__(self, takes_mean: bool = False) -> None:
        self._takes_mean = takes_mean
        self._measured: RecentDict[Hashable, Measured] = RecentDict(MAX_KEYS)

    def __len__(self) -> int:
        return len(self._measured)

    @property
    def measured(self) -> dict[Hashable, Measured]:
        return dict(self._measured.items())

    def add(self, key: Hashable, ratio: float, at_least: int = 1) -> bool:
        """Take ``ratio`` = measured / expected in; one that is not positive and finite is dropped.

        Says whether ``self.ratio(key, at_least)`` has changed.
        """
        if not (math.isfinite(ratio) and ratio > 0):
            return False
        if (entry := self._measured.get(key)) is None:
            entry = self._measured[key] = Measured(takes_mean=self._takes_mean)
        before = entry.ratio
        entry.add(ratio)
        return entry.count == at_least or (entry.count > at_least and entry.ratio != before)

    def ratio(self, key: Hashable, at_least: int = 1) -> float | None:
        """The ratio under ``key`` once it rests on ``at_least`` measurements."""
        entry = self._measured.get(key)
        return entry.ratio if entry is not None and entry.count >= at_least else None
