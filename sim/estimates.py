"""Means over seeds, with what is not known about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and half the width of its 95 % confidence interval; None from a single value.

    The interval ends where values do: at ``least`` and ``most``.
    """

    mean: float
    ci95: float | None
    least: float = -math.inf
    most: float = math.inf

    @property
    def low(self) -> float:
        return max(self.least, self.mean - (self.ci95 or 0.0))

    @property
    def high(self) -> float:
        return min(self.most, self.mean + (self.ci95 or 0.0))

    def shown(self, scale: float = 1.0, digits: int = 1) -> str:
        """Such as ``97.0 ± 1.2``; with both ends, ``99.0 (97.1 to 100.0)``, where one of them is cut off."""
        mean = f"{scale * self.mean:.{digits}f}"
        if self.ci95 is None:
            return mean
        if self.mean - self.ci95 < self.least or self.mean + self.ci95 > self.most:
            return f"{mean} ({scale * self.low:.{digits}f} to {scale * self.high:.{digits}f})"
        return f"{mean} ± {scale * self.ci95:.{digits}f}"

    def as_json(self) -> dict[str, float | None]:
        low, high = (None, None) if self.ci95 is None else (self.low, self.high)
        return {"mean": self.mean, "ci95": self.ci95, "low": low, "high": high}


def estimate(values: Sequence[float], *, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """Of values of independent seeds, by Student's t distribution; no value is below ``least`` or above ``most``.

    Raises ``ValueError`` without values.
    """
    if not values:
        raise ValueError("no mean without values")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, least, most)
    from scipy.stats import t  # type: ignore[import-untyped]

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return Estimate(mean, quantile * statistics.stdev(values) / math.sqrt(len(values)), least, most)
