"""Arrivals as a production service of images has them: people come in sessions, and more of them at some hours.

A cluster process on a Cox process. Sessions begin at a rate that wanders: its logarithm is an Ornstein-Uhlenbeck
process (a log-Gaussian Cox process: Møller, Syversveen and Waagepetersen, "Log Gaussian Cox processes", 1998). A
session is a number of requests with a heavy tail, at log-normal gaps (Bartlett, "The spectral analysis of point
processes", 1963; Lewis, "A branching Poisson process model", 1964). A few sessions are of a script, which asks for
much at once.

Only random() and the quantiles of the normal distribution are used: a seed gives the same times on every version
of Python.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from gfdit.sim.arrivals import normal

CELL_S = 300.0  # the rate is constant for so long: far less than it takes to change
MAX_SESSION = 1000
NUM_SKIPPED = 5000


@dataclass(frozen=True, slots=True)
class Sessions:
    """``per_hour`` sessions begin on average; the logarithm of the rate has the deviation ``rate_sigma``.

    Its correlation over a time t is ``exp(-t / rate_memory_s)``. A session has more than k requests with
    probability ``(1 + k / size_scale) ** -size_shape`` (a Lomax distribution, in whole numbers). Gaps in it have
    the median ``gap_s``, their logarithm has the deviation ``gap_sigma``. The share ``script_share`` of
    sessions is of scripts: of ``script_size`` requests on average (geometric), at gaps of their own.
    """

    per_hour: float
    rate_sigma: float
    rate_memory_s: float
    size_shape: float
    size_scale: float
    gap_s: float
    gap_sigma: float
    script_share: float
    script_size: float
    script_gap_s: float
    script_gap_sigma: float

    def arrival_times(self, draw: random.Random) -> Iterator[float]:
        """Times in seconds, without end, from one request on that is picked at random: busy hours are likelier."""
        skipped = int(NUM_SKIPPED * draw.random())
        return islice(self._arrivals(draw), skipped, None)

    def _arrivals(self, draw: random.Random) -> Iterator[float]:
        ahead: list[float] = []  # requests of sessions that have begun
        for start_s in self._starts(draw):
            while ahead and ahead[0] <= start_s:
                yield heapq.heappop(ahead)
            for at_s in self._session(start_s, draw):
                heapq.heappush(ahead, at_s)

    def _starts(self, draw: random.Random) -> Iterator[float]:
        """A time is passed at the rate of its cell, until as much is used up as was drawn."""
        keeps = math.exp(-CELL_S / self.rate_memory_s)
        level, cell, left = normal(draw), 0, _exponential(draw)
        while True:
            logarithm = self.rate_sigma * level - self.rate_sigma**2 / 2  # so that the mean rate is per_hour
            per_s = self.per_hour / 3600 * math.exp(logarithm)
            passed_s = 0.0
            while left < per_s * (CELL_S - passed_s):
                passed_s += left / per_s
                yield cell * CELL_S + passed_s
                left = _exponential(draw)
            left -= per_s * (CELL_S - passed_s)
            level = keeps * level + math.sqrt(1 - keeps**2) * normal(draw)
            cell += 1

    def _session(self, start_s: float, draw: random.Random) -> Iterator[float]:
        if draw.random() < self.script_share:
            size = 1 + int(math.log(1.0 - draw.random()) / math.log(1 - 1 / self.script_size))
            gap_s, sigma = self.script_gap_s, self.script_gap_sigma
        else:
            size = 1 + int(self.size_scale * ((1.0 - draw.random()) ** (-1 / self.size_shape) - 1))
            gap_s, sigma = self.gap_s, self.gap_sigma
        yield start_s
        for _ in range(min(size, MAX_SESSION) - 1):
            start_s += gap_s * math.exp(sigma * normal(draw))
            yield start_s


def _exponential(draw: random.Random) -> float:
    return -math.log(1.0 - draw.random())
