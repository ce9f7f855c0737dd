"""Means over seeds, with what is not known about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and half the width of its 95 % confidence interval; None from a single value."""

    mean: float
    ci95: float | None

    @property
    def low(self) -> float:
        return self.mean - (self.ci95 or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.ci95 or 0.0)


def estimate(values: Sequence[float]) -> Estimate:
    """Of values of independent seeds, by Student's t distribution. Raises ``ValueError`` without values."""
    if not values:
        raise ValueError("no mean without values")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, None)
    from scipy.stats import t  # type: ignore[import-untyped]

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return Estimate(mean, quantile * statistics.stdev(values) / math.sqrt(len(values)))
