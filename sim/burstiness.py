"""How bursty arrivals are: what a renewal process cannot imitate shows in the counts of longer and longer windows.

The index of dispersion of counts is their variance over their mean (Cox and Lewis, "The Statistical Analysis of
Series of Events", 1966). It is 1 at all windows for Poisson arrivals, and grows with the window as long as a busy
time is followed by another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOWS_S = (1, 10, 60, 300, 600, 1800, 3600)
LAGS = (1, 5, 10, 30)
COUNT_WINDOW_S = 60


@dataclass(frozen=True, slots=True)
class Burstiness:
    """``dispersions`` are by window (:data:`WINDOWS_S`), ``correlations`` of counts per minute by lag in minutes.

    ``peak_to_mean`` is that of requests a minute.
    """

    gap_cv: float
    dispersions: dict[int, float]
    correlations: dict[int, float]
    peak_to_mean: float

    def numbers(self) -> dict[str, float]:
        """All of them by name, in one order."""
        return {
            "gap CV": self.gap_cv,
            **{f"dispersion, {window_s} s": value for window_s, value in self.dispersions.items()},
            **{f"correlation, {lag} min": value for lag, value in self.correlations.items()},
            "peak / mean a minute": self.peak_to_mean,
        }


def burstiness(arrivals_s: Sequence[float]) -> Burstiness:
    """Of arrivals in order, at least two at different times, that span some hours."""
    times_s = np.asarray(arrivals_s, dtype=np.float64)
    times_s = times_s - times_s[0]
    gaps_s = np.diff(times_s)
    per_minute = _counts(times_s, COUNT_WINDOW_S)
    return Burstiness(
        float(gaps_s.std() / gaps_s.mean()),
        {window_s: _dispersion(_counts(times_s, window_s)) for window_s in WINDOWS_S},
        {lag: _correlation(per_minute, lag) for lag in LAGS},
        float(per_minute.max() / per_minute.mean()),
    )


def _counts(times_s: np.ndarray, window_s: float) -> np.ndarray:
    """In windows one after the other; what the last one that is whole does not reach is left out."""
    num_windows = max(2, int(times_s[-1] // window_s))
    places = (times_s // window_s).astype(np.int64)
    return np.bincount(places[places < num_windows], minlength=num_windows)


def _dispersion(counts: np.ndarray) -> float:
    return float(counts.var() / counts.mean())


def _correlation(counts: np.ndarray, lag: int) -> float:
    """0 for counts that are too few to tell, or all the same."""
    if len(counts) <= lag or counts.min() == counts.max():
        return 0.0
    around = counts - counts.mean()
    return float((around[:-lag] * around[lag:]).mean() / counts.var())
