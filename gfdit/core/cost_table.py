"""Cost models: over a table of measured or published times, and a nominal one for serving without a table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from gfdit.core.calibrated_cost import CalibratedCostModel, CostKey
from gfdit.core.cost import UnknownCostError
from gfdit.core.cost_file import CostEntry, CostTable
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.policy import TaskView
from gfdit.core.tasks import Shape, TaskKind

__all__ = ["CostEntry", "CostKey", "CostTable", "NominalCostModel", "TableCostModel"]


class TableCostModel(CalibratedCostModel):
    """Times from a :class:`CostTable`. A shape it lacks is interpolated in tokens; nothing else is guessed."""

    def __init__(self, table: CostTable) -> None:
        super().__init__()
        self.table = table
        points: dict[tuple[Any, ...], dict[Shape, float]] = {}
        for entry in table.entries:
            group = (entry.model, entry.task, entry.cfg, entry.parallel, entry.batch)
            points.setdefault(group, {})[entry.shape] = entry.seconds
        self._points = points
        self._curves = {group: _curve(shapes) for group, shapes in points.items()}

    def migration_s(self, task: TaskView, layout: ExecutionLayout) -> float:
        wanted = set(layout.ranks)
        moves = any(not wanted <= set(holders) for _, holders in task.artifacts)
        return self.table.migration_latency_s if moves else 0.0

    def _known_candidates(self, task: TaskView) -> tuple[ParallelSpec, ...]:
        """Those of the task's that the table has times for."""
        specs = super()._known_candidates(task)
        known = [spec for spec in specs if (task.model, task.kind, task.cfg, spec, 1) in self._points]
        if not known:
            key = CostKey(task.model, task.kind, task.shape, task.cfg, task.candidates[0], 1)
            raise UnknownCostError(self._unknown(key), task.request_id)
        return tuple(known)

    def _reference_s(self, key: CostKey) -> float:
        group = (key.model, key.kind, key.cfg, key.parallel, key.batch)
        shapes = self._points.get(group)
        if shapes is None:
            raise UnknownCostError(self._unknown(key))
        seconds = shapes.get(key.shape)
        return seconds if seconds is not None else _interpolate(self._curves[group], key.shape.num_tokens)

    def _unknown(self, key: CostKey) -> str:
        entries = self.table.entries
        if not (of_model := [entry for entry in entries if entry.model == key.model]):
            return f"no cost for model {key.model!r}, known: {_names(entry.model for entry in entries)}"
        if not (of_task := [entry for entry in of_model if entry.task is key.kind]):
            known = _names(str(entry.task) for entry in of_model)
            return f"no cost for task {key.kind} of model {key.model!r}, known: {known}"
        known = _names(_setting(entry.parallel, entry.cfg, entry.batch) for entry in of_task)
        wanted = _setting(key.parallel, key.cfg, key.batch)
        return f"no cost for {key.kind} of model {key.model!r} at {wanted}, known: {known}"


class NominalCostModel(CalibratedCostModel):
    """Costs for serving without a table: a scale in tokens, corrected by what is measured. Never raises.

    A denoising step takes 0.1 ms a token, twice that with guidance, divided by a speed-up of ``sp ** 0.86``
    (1.8, 3.3 and 6.0 on 2, 4 and 8 ranks, near the published ones of a Wan-like model) and of
    ``cfg_parallel ** 0.95``. Other tasks take a fixed number of such steps on one rank. Every measurement
    corrects its own key at once, failing that its model and task, failing that everything.
    """

    trusted_count = 1  # any measurement beats a guess

    def _reference_s(self, key: CostKey) -> float:
        branches = 2 if key.cfg and key.kind is TaskKind.DENOISE else 1
        work_s = _SECONDS_PER_TOKEN * key.shape.num_tokens * key.batch * branches * _STEPS_WORTH[key.kind]
        return work_s / (key.parallel.sp**0.86 * key.parallel.cfg**0.95)

    def _levels(self, key: CostKey) -> tuple[Hashable, ...]:
        return (key, (key.model, key.kind), ())


_SECONDS_PER_TOKEN = 1e-4
_STEPS_WORTH = MappingProxyType(
    {TaskKind.ENCODE: 0.1, TaskKind.PREPARE: 0.1, TaskKind.DENOISE: 1.0, TaskKind.DECODE: 2.0}
)


def _interpolate(curve: tuple[tuple[int, float], ...], num_tokens: int) -> float:
    """Seconds at ``num_tokens`` from points sorted by tokens: linear between them.

    Outside, the nearest segment goes on, never falling with size; below the smallest point never under its
    line through the origin's height, so that a cost stays positive. One point alone scales with tokens.
    """
    if len(curve) == 1:
        return curve[0][1] * num_tokens / curve[0][0]
    index = bisect_left(curve, (num_tokens, 0.0))
    right = min(max(index, 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    slope = (y1 - y0) / (x1 - x0)
    if num_tokens > curve[-1][0]:
        return y1 + max(0.0, slope) * (num_tokens - x1)
    seconds = y0 + slope * (num_tokens - x0)
    return max(seconds, y0 * num_tokens / x0) if num_tokens < x0 else seconds


def _curve(shapes: Mapping[Shape, float]) -> tuple[tuple[int, float], ...]:
    """(tokens, seconds) sorted by tokens; shapes of one length count as their mean."""
    by_tokens: dict[int, list[float]] = {}
    for shape, seconds in shapes.items():
        by_tokens.setdefault(shape.num_tokens, []).append(seconds)
    return tuple((tokens, sum(values) / len(values)) for tokens, values in sorted(by_tokens.items()))


def _setting(parallel: ParallelSpec, cfg: bool, batch: int) -> str:
    return f"{parallel}{' with cfg' if cfg else ''}{f' batch {batch}' if batch > 1 else ''}"


def _names(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
