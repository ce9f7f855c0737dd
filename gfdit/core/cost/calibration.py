"""Measured times against expected ones: a running ratio per key that a few outliers cannot move."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field

from gfdit.core.bounded import RecentDict

WINDOW = 15  # measurements remembered per key: a median over them ignores up to seven outliers
MAX_KEYS = 8192
"""Keys with measurements: about 1000 sizes at four degrees each, in 9 MB. Of more, those used last are kept."""


def _lower_median(ascending: list[float]) -> float:
    """Of two measurements the first, slow one (warm-up) does not count."""
    return ascending[(len(ascending) - 1) // 2]


@dataclass(slots=True)
class Measured:
    """What was measured under one key. ``ratio`` is the median of measured / expected seconds."""

    count: int = 0
    ratio: float = 1.0
    recent: list[float] = field(default_factory=list)
    _ascending: list[float] = field(default_factory=list, repr=False)  # ``recent`` in order of size

    @property
    def spread(self) -> float:
        """Median distance of the recent ratios from ``ratio``, as a fraction of it."""
        if not self.recent:
            return 0.0
        return _lower_median(sorted(abs(value - self.ratio) for value in self.recent)) / self.ratio

    def add(self, ratio: float) -> None:
        self.count += 1
        if len(self.recent) == WINDOW:
            if self.recent[0] == ratio:  # the same values stay, as they always do where times are known
                self.recent.append(self.recent.pop(0))
                return
            del self._ascending[bisect_left(self._ascending, self.recent.pop(0))]
        self.recent.append(ratio)
        insort(self._ascending, ratio)
        self.ratio = _lower_median(self._ascending)


class Calibration:
    """Running ratios by key, of the :data:`MAX_KEYS` keys used last: others are as if never measured."""

    def __init__(self) -> None:
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
            entry = self._measured[key] = Measured()
        before = entry.ratio
        entry.add(ratio)
        return entry.count == at_least or (entry.count > at_least and entry.ratio != before)

    def ratio(self, key: Hashable, at_least: int = 1) -> float | None:
        """The ratio under ``key`` once it rests on ``at_least`` measurements."""
        entry = self._measured.get(key)
        return entry.ratio if entry is not None and entry.count >= at_least else None
