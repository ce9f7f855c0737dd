"""Times of tasks and copies, taken from a recording, and what their scatter says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gfdit.core.commands import CompleteRequest, Migrate, RunTask
from gfdit.core.cost.table import CostKey
from gfdit.core.events import MigrationFinished, RequestArrived, TaskFinished
from gfdit.core.tasks import Request, Shape, TaskKind, artifact_kind
from gfdit.observe.recording import TimedEvent

UNLIMITED = 1e12  # bytes per second
# Of a normal distribution: standard deviations in a median absolute deviation, and the error of a median in
# standard deviations / sqrt(n).
_SIGMAS_PER_MAD = 1.4826
_MEDIAN_ERROR = 1.2533


@dataclass(frozen=True, slots=True)
class CopySample:
    """One copy of an artifact of ``request``, the slowest rank's time; ``kind`` is ``"latents"``, for example."""

    request: Request
    kind: str
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class _OpenDispatch:
    command: RunTask
    decided_s: float
    waiting_for: set[int]
    seconds: float = 0.0


@dataclass(slots=True)
class _OpenCopy:
    command: Migrate
    waiting_for: set[int]
    seconds: float = 0.0
    num_bytes: int = 0


@dataclass(slots=True)
class Samples:
    """``task_s`` are execution times by what they depend on, the slowest rank's of each dispatch; ``steps_s`` are
    those of denoising steps by request, in their order.

    ``overhead_s`` is what a dispatch that waited for no copy and for no other task took besides: from its decision
    until the control plane knew its end.
    """

    task_s: dict[CostKey, list[float]] = field(default_factory=dict)
    steps_s: dict[str, list[float]] = field(default_factory=dict)
    overhead_s: list[float] = field(default_factory=list)
    copies: list[CopySample] = field(default_factory=list)
    arrived: dict[str, RequestArrived] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    _now_s: float = 0.0
    _dispatches: dict[int, _OpenDispatch] = field(default_factory=dict)
    _open_copies: dict[int, _OpenCopy] = field(default_factory=dict)

    def add(self, entries: Iterable[object]) -> None:
        """Entries of a recording, in order: events and commands. What fails leaves no sample."""
        for entry in entries:
            if isinstance(entry, TimedEvent):
                self._now_s = entry.now_s
                entry = entry.event
            match entry:
                case RequestArrived(request):
                    self.arrived[request.id] = entry
                case RunTask(dispatch_id, _, layout):
                    self._dispatches[dispatch_id] = _OpenDispatch(entry, self._now_s, set(layout.ranks))
                case Migrate(migration_id):
                    self._open_copies[migration_id] = _OpenCopy(entry, set(entry.ranks))
                case TaskFinished():
                    self._task_finished(entry)
                case MigrationFinished():
                    self._copy_finished(entry)
                case CompleteRequest(request_id):
                    self.completed.add(request_id)

    def _task_finished(self, event: TaskFinished) -> None:
        dispatch = self._dispatches[event.dispatch_id]
        dispatch.waiting_for.discard(event.rank)
        dispatch.seconds = max(dispatch.seconds, event.seconds)
        if dispatch.waiting_for:
            return
        del self._dispatches[event.dispatch_id]
        command = dispatch.command
        task = command.tasks[0]
        request = self.arrived[task.request_id].request
        parallel, batch = command.layout.parallel, len(command.tasks)
        key = CostKey(request.model, task.kind, request.shape, request.cfg, parallel, batch)
        self.task_s.setdefault(key, []).append(dispatch.seconds)
        if task.kind is TaskKind.DENOISE:
            for member in command.tasks:
                self.steps_s.setdefault(member.request_id, []).append(dispatch.seconds)
        if not command.migrations and command.after is None:
            self.overhead_s.append(self._now_s - dispatch.decided_s - dispatch.seconds)

    def _copy_finished(self, event: MigrationFinished) -> None:
        copy = self._open_copies[event.migration_id]
        copy.waiting_for.discard(event.rank)
        copy.seconds, copy.num_bytes = max(copy.seconds, event.seconds), max(copy.num_bytes, event.num_bytes)
        if copy.waiting_for:
            return
        del self._open_copies[event.migration_id]
        request = self.arrived[copy.command.request_id].request
        kind = artifact_kind(request.id, copy.command.artifact)
        self.copies.append(CopySample(request, kind, copy.num_bytes, copy.seconds))

    def dispatch_latency_s(self) -> float:
        """Median overhead of a dispatch: what the simulator calls dispatch latency. 0 without samples."""
        return statistics.median(self.overhead_s) if self.overhead_s else 0.0

    def copy_cost(self) -> tuple[float, float]:
        """(seconds, bytes per second) of a copy to one rank: a line through the median of each kind of artifact.

        Where large ones do not take measurably longer than small ones, the rate is :data:`UNLIMITED`.
        """
        kinds: dict[tuple[str, Shape, bool], list[CopySample]] = {}
        for copy in self.copies:
            kinds.setdefault((copy.kind, copy.request.shape, copy.request.cfg), []).append(copy)
        sizes = [statistics.median(copy.num_bytes for copy in group) for group in kinds.values()]
        times_s = [[copy.seconds for copy in group] for group in kinds.values()]
        medians_s = [statistics.median(values) for values in times_s]
        if len(set(sizes)) > 1:
            slope, latency_s = statistics.linear_regression(sizes, medians_s)
            rise_s = slope * (max(sizes) - min(sizes))
            noise_s = max(median_error(values) * statistics.median(values) for values in times_s)
            if latency_s > 0 and rise_s > 2 * noise_s:
                return latency_s, 1 / slope
        return statistics.median(medians_s), UNLIMITED

    def jitter(self) -> float:
        """Relative spread of a denoising step's time around its median, over all keys. 0 without samples."""
        ratios = [
            math.log(seconds / statistics.median(values))
            for key, values in self.task_s.items()
            if key.kind is TaskKind.DENOISE
            for seconds in values
        ]
        return _SIGMAS_PER_MAD * statistics.median(map(abs, ratios)) if ratios else 0.0


def typical(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest twentieth.

    Times of tasks add up in a request, so their mean counts; single stalls of a machine do not.
    """
    cut = len(values) // 20
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median relative to it, robust to outliers; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    median = statistics.median(values)
    deviation = _SIGMAS_PER_MAD * statistics.median(abs(value - median) for value in values)
    return _MEDIAN_ERROR * deviation / math.sqrt(len(values)) / median
