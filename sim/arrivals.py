"""When requests arrive: a renewal process under a rate that changes in phases.

Everything is drawn from ``random()`` alone, the one method of :class:`random.Random` whose sequence Python
promises to keep for a seed; so a seed gives the same times whatever the version.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

EVEN_CV = 1e-6  # below, gaps are as good as even
_NORMAL = NormalDist()


def arrival_times(phases: Sequence[tuple[float, float]], draw: random.Random, cv: float = 1.0) -> Iterator[float]:
    """Times in seconds, without end: the phases, each a duration in seconds and a rate per second, repeat.

    Gaps are gamma distributed with ``cv`` their coefficient of variation: 1 is Poisson, more is burstier, 0 is
    even. Gaps stretch with the rate: one that begins in a quiet phase is cut short by a busy one. The process is
    stationary from the start, so the expected number of arrivals is exactly that of the rates.
    """
    turn_s = sum(duration_s for duration_s, _ in phases)
    per_turn = sum(duration_s * per_s for duration_s, per_s in phases)
    assert per_turn > 0, "nothing ever arrives"
    gap = _unit_gaps(draw, cv)
    phase_start_s, ahead = 0.0, _first_gap(draw, cv)  # ``ahead`` counts in expected arrivals
    while True:
        num_empty = ahead // per_turn
        phase_start_s += num_empty * turn_s
        ahead -= num_empty * per_turn
        for duration_s, per_s in phases:
            expected, passed = duration_s * per_s, 0.0
            while ahead < expected - passed:
                passed += ahead
                yield phase_start_s + passed / per_s
                ahead = gap()
            ahead -= expected - passed
            phase_start_s += duration_s


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a log's requests arrive: at a load, so many a minute, or all its times multiplied by a factor.

    At most one is given; without, times are the log's. ``load`` is the time that all requests take on one rank
    each, divided by what ``num_ranks`` have to give from the first arrival to the last.
    """

    load: float | None = None
    num_ranks: int | None = None
    per_min: float | None = None
    time_factor: float | None = None

    def __post_init__(self) -> None:
        named = (
            ("a load", self.load),
            ("a number of requests a minute", self.per_min),
            ("a factor of time", self.time_factor),
        )
        given = {name: value for name, value in named if value is not None}
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}")
        for name, value in given.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, got {value}")
        if self.load is not None and self.num_ranks is None:
            raise ValueError("a load needs the number of ranks it is relative to")
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {self.num_ranks}")

    def span_s(self, num_requests: int, work_s: float) -> float | None:
        """From the first of them to the last if they take ``work_s`` on one rank each; None: as it is."""
        if self.load is not None:
            return work_s / (self.load * (self.num_ranks or 1))
        return None if self.per_min is None else 60 * num_requests / self.per_min

    def times_s(self, arrivals_s: Sequence[float], work_s: float) -> list[float]:
        """``arrivals_s`` squeezed or stretched evenly, the first at 0 s, in whole microseconds.

        Raises ``ValueError`` if all arrive at one time, which no factor can change.
        """
        first_s, factor = arrivals_s[0], self.time_factor or 1.0
        if (span_s := self.span_s(len(arrivals_s), work_s)) is not None and len(arrivals_s) > 1:
            if arrivals_s[-1] == first_s:
                raise ValueError("all requests arrive at one time: no factor of time gives them a rate")
            factor = span_s / (arrivals_s[-1] - first_s)
        return [round((at_s - first_s) * factor, 6) for at_s in arrivals_s]


def pick(shares: Sequence[float], draw: random.Random) -> int:
    """An index, with probabilities in proportion to ``shares``."""
    return place(shares, draw.random())


def place(shares: Sequence[float], position: float) -> int:
    """The index at ``position``, from 0 to 1, of a line that ``shares`` divide."""
    left = position * sum(shares)
    for index, share in enumerate(shares):
        left -= share
        if left < 0:
            return index
    return max(index for index, share in enumerate(shares) if share > 0)  # rounding


def _unit_gaps(draw: random.Random, cv: float) -> Callable[[], float]:
    """Draws gaps of mean 1."""
    if cv < EVEN_CV:
        return lambda: 1.0
    if cv == 1:
        return lambda: -math.log(1.0 - draw.random())
    shape = 1 / cv**2
    return lambda: gamma(draw, shape) / shape


def _first_gap(draw: random.Random, cv: float) -> float:
    """From a moment chosen without looking to the next arrival: part of a gap, long ones being hit more often."""
    if cv < EVEN_CV:
        return draw.random()
    shape = 1 / cv**2
    return draw.random() * gamma(draw, shape + 1) / shape


def normal(draw: random.Random) -> float:
    """Of mean 0 and standard deviation 1."""
    return _NORMAL.inv_cdf(draw.random() or 0.5)


def gamma(draw: random.Random, shape: float) -> float:
    """Gamma with scale 1: Marsaglia and Tsang, "A simple method for generating gamma variables" (2000)."""
    if shape < 1:
        return gamma(draw, shape + 1) * (1.0 - draw.random()) ** (1 / shape)
    d = shape - 1 / 3
    while True:
        x = normal(draw)
        v = (1 + x / math.sqrt(9 * d)) ** 3
        if v > 0 and math.log(1.0 - draw.random()) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v
