"""What fits into the memory of a device: what tasks took there, what others will take, and what did not fit.

The rules:

1. A task takes the weights, and beside them working memory, which is measured (:class:`MemoryUse`). It depends on
   model, kind, guidance and *load*: the tokens that a rank has at a time, nominal tokens times batch over
   ``sp``. Guidance branches take turns on a rank, so guidance parallelism takes nothing away.
2. A load that was measured takes the most that was. Any other takes what the nearest smaller one took, in
   proportion, else what the nearest larger one took, in proportion; and never more than a larger one did. Memory
   grows with the load at most in proportion, so that is on the safe side. Only denoising and decoding are
   predicted, since text does not grow with the image.
3. What is more than the smallest capacity of a rank does not fit. Of these two kinds what ran out of memory does
   not fit either, nor does anything larger on no more ranks: for ``BELIEVED_S``, since what else was there then
   may be gone.

Artifacts of other requests come on top, if they are not bounded; then tasks run out of memory and teach rule 3.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

from gfdit.core.bounded import RecentDict
from gfdit.core.events import MemoryUse
from gfdit.core.layouts import ParallelSpec, not_wider
from gfdit.core.policy import TaskView
from gfdit.core.tasks import TaskKind

BELIEVED_S = 600.0
MAX_LOADS = 1024  # of one model, kind and guidance
MAX_FAILURES = 1024
_GROWING = (TaskKind.DENOISE, TaskKind.DECODE)
GIB = 2**30

_Setting = tuple[str, TaskKind, bool]


class WorkingBytes:
    """The most working memory that tasks of one setting took, by load; rule 2 says what others will take."""

    def __init__(self) -> None:
        self._by_load: dict[float, int] = {}
        self._loads: list[float] = []  # in order

    def add(self, load: float, num_bytes: int) -> None:
        if load not in self._by_load:
            if len(self._loads) >= MAX_LOADS:  # every second one says nearly as much
                self._loads = self._loads[1::2]
                self._by_load = {known: self._by_load[known] for known in self._loads}
            insort(self._loads, load)
        self._by_load[load] = max(num_bytes, self._by_load.get(load, 0))

    def expected(self, load: float) -> float:
        """0 where nothing is known."""
        index = bisect_left(self._loads, load)
        larger = self._loads[index] if index < len(self._loads) else None
        if larger == load:
            return self._by_load[load]
        if index == 0:
            return 0.0 if larger is None else self._by_load[larger] * (load / larger)
        smaller = self._loads[index - 1]
        scaled = self._by_load[smaller] * (load / smaller)
        return scaled if larger is None else min(scaled, self._by_load[larger])


class DeviceMemory:
    """Learns by rule 3 of tasks that failed, and by rules 1 and 2 of those that did not.

    ``limit_bytes`` takes the place of the capacity that the ranks report.
    """

    def __init__(self, limit_bytes: int | None = None, artifact_bytes: int | None = None) -> None:
        """``artifact_bytes`` of the capacity are kept for artifacts. Raises ``ValueError`` for a limit below 1."""
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"device_memory_bytes must be at least 1, got {limit_bytes}")
        self._limit_bytes = limit_bytes
        self._artifact_bytes = artifact_bytes or 0
        self._weights: dict[int, int] = {}  # by rank
        self._capacities: dict[int, int] = {}  # by rank
        self._working: dict[_Setting, WorkingBytes] = {}
        # When tasks ran out of memory, by what they were, their tokens and their specification.
        self._failures: RecentDict[tuple[_Setting, int, ParallelSpec], float] = RecentDict(MAX_FAILURES)

    @property
    def knows_anything(self) -> bool:
        return bool(self._weights or len(self._failures))

    @property
    def capacity_bytes(self) -> float:
        """What tasks may take of every rank's memory, weights included."""
        least = min(self._capacities.values(), default=math.inf)
        return (least if self._limit_bytes is None else self._limit_bytes) - self._artifact_bytes

    def observe(self, rank: int, task: TaskView, spec: ParallelSpec, batch: int, use: MemoryUse) -> None:
        self._weights[rank], self._capacities[rank] = use.weights_bytes, use.capacity_bytes
        if task.kind in _GROWING:
            known = self._working.setdefault(_setting(task), WorkingBytes())
            known.add(_tokens(task, batch) / spec.sp, use.working_bytes)

    def note_failure(self, task: TaskView, spec: ParallelSpec, batch: int, now_s: float) -> None:
        """``batch`` tasks like ``task`` ran out of memory at ``spec``."""
        if task.kind in _GROWING:
            self._failures[_setting(task), _tokens(task, batch), spec] = now_s

    def peak_bytes(self, task: TaskView, spec: ParallelSpec, batch: int = 1) -> float:
        """What such a task takes of every rank's memory, weights included; 0 where nothing is known."""
        known = self._working.get(_setting(task))
        working = 0.0 if known is None else known.expected(_tokens(task, batch) / spec.sp)
        return max(self._weights.values(), default=0) + working if working else 0.0

    def excluded(
        self, task: TaskView, specs: Iterable[ParallelSpec], now_s: float, batch: int = 1
    ) -> frozenset[ParallelSpec]:
        """Those of ``specs`` at which such a task does not fit."""
        if not self.knows_anything:
            return frozenset()
        capacity, failed = self.capacity_bytes, self._failed(task, batch, now_s)
        return frozenset(
            spec
            for spec in specs
            if self.peak_bytes(task, spec, batch) > capacity or any(not_wider(spec, other) for other in failed)
        )

    def describe(self, task: TaskView, widest: ParallelSpec) -> str:
        """Why ``task`` fits nowhere; ``widest`` is the last specification that it could take."""
        needed, capacity = self.peak_bytes(task, widest), self.capacity_bytes
        what = f"{task.kind} of {task.shape}"
        if needed > capacity:
            return (
                f"{what} takes about {needed / GIB:.2f} GiB of device memory at {widest}, "
                f"the widest layout offered, and there are {capacity / GIB:.2f} GiB"
            )
        there = "" if math.isinf(capacity) else f", and there are {capacity / GIB:.2f} GiB"
        return f"{what} takes more device memory than there is at {widest}, the widest layout offered{there}"

    def _failed(self, task: TaskView, batch: int, now_s: float) -> list[ParallelSpec]:
        """At which specifications no more than that has run out of memory lately."""
        setting, num_tokens = _setting(task), _tokens(task, batch)
        return [
            spec
            for (other, tokens, spec), at_s in self._failures.items()
            if other == setting and tokens <= num_tokens and now_s - at_s < BELIEVED_S
        ]


def _setting(task: TaskView) -> _Setting:
    return task.model, task.kind, task.cfg


def _tokens(task: TaskView, batch: int) -> int:
    return task.shape.num_tokens * batch
