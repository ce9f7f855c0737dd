"""Measuring on a shared machine: how much of it other programs take, and waiting until that is little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")
WINDOW_S = 5.0  # how long the machine must have been quiet


class Watch:
    """Since it was made: what share of all cores' time went to processes that are not this one or its own."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._start = _others_s()

    def others_share(self) -> float:
        elapsed_s = time.monotonic() - self._start_s
        return max(0.0, (_others_s() - self._start) / (elapsed_s * (os.cpu_count() or 1)))


@dataclass(frozen=True, slots=True)
class Quiet:
    """Measures while others take at most ``max_share``; after ``give_up_s`` (monotonic) in any case."""

    max_share: float
    give_up_s: float

    def run(self, measure: Callable[[], T]) -> tuple[T, float]:
        """What ``measure`` returns, and the others' share meanwhile; disturbed measurements are repeated."""
        while True:
            self._wait()
            watch = Watch()
            result = measure()
            share = watch.others_share()
            if share <= self.max_share or time.monotonic() > self.give_up_s:
                return result, share

    def _wait(self) -> None:
        while time.monotonic() < self.give_up_s:
            watch = Watch()
            time.sleep(WINDOW_S)
            if watch.others_share() <= self.max_share:
                return


def _others_s() -> float:
    """Processor time, ever, of everybody else. What processes of ours that have ended took counts for others."""
    times = psutil.cpu_times()
    busy_s = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    me = psutil.Process()
    own_s = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own_s += used.user + used.system
    return busy_s - own_s
