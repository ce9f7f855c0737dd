"""Cost models: over a table of measured or published times, and a nominal one for serving without a table."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from types import MappingProxyType
from typing import Any

from gfdit.core.bounded import AnswerCache
from gfdit.core.cost import UnknownCostError
from gfdit.core.cost.calibrated import MAX_ANSWERS, UNMASKED_SHARE, CalibratedCostModel, CostKey
from gfdit.core.cost.file import ArtifactSize, CostEntry, CostTable, MaskedSteps
from gfdit.core.cost.shape_points import ShapePoints
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.policy import TaskView
from gfdit.core.tasks import Shape, TaskKind, artifact_kind

__all__ = [
    "ArtifactSize",
    "CostEntry",
    "CostKey",
    "CostTable",
    "MaskedSteps",
    "NominalCostModel",
    "TableCostModel",
]


class TableCostModel(CalibratedCostModel):
    """Times from a :class:`CostTable`. A shape it lacks is interpolated in tokens; nothing else is guessed.

    Beyond the largest shape times go on as they rose, except those of batches, which are then unknown.
    """

    def __init__(self, table: CostTable, *, skips_steps: bool = False) -> None:
        super().__init__(skips_steps=skips_steps)
        self.table = table
        self._times = ShapePoints(
            ((e.model, e.task, e.cfg, e.parallel, e.batch), e.shape, e.seconds) for e in table.entries
        )
        self._sizes = ShapePoints(((a.model, a.artifact, a.cfg), a.shape, a.num_bytes) for a in table.artifacts)
        self._unmasked_shares = {steps.model: steps.unmasked_share for steps in table.masked_steps}
        self._copies_s: AnswerCache[tuple[Any, ...], float] = AnswerCache(MAX_ANSWERS)

    @property
    def num_entries(self) -> int:
        return super().num_entries + len(self._copies_s)

    def migration_s(self, task: TaskView, layout: ExecutionLayout) -> float:
        """What the copies take one after the other: each its latency, and its bytes once a rank that lacks it."""
        total_s = 0.0
        for name, holders in task.artifacts:
            if num_copies := len(set(layout.ranks).difference(holders)):
                kind = artifact_kind(task.request_id, name)
                total_s += self.copy_s(task.model, task.shape, task.cfg, kind, num_copies)
        return total_s

    def copy_s(self, model: str, shape: Shape, cfg: bool, artifact: str, num_copies: int) -> float:
        """Time to copy one artifact of the kind ``artifact`` to ``num_copies`` ranks.

        The latency alone if the table has no size for such an artifact of the model.
        """
        key = (model, shape, cfg, artifact, num_copies)
        if (seconds := self._copies_s.get(key)) is None:
            num_bytes = self._sizes.at((model, artifact, cfg), shape) or 0.0
            seconds = self.table.migration_latency_s + num_bytes * num_copies / self.table.migration_bytes_per_s
            self._copies_s[key] = seconds
        return seconds

    def _unmasked_share(self, model: str) -> float:
        return self._unmasked_shares.get(model, UNMASKED_SHARE)

    def _has_time(self, key: CostKey) -> bool:
        return (key.model, key.kind, key.cfg, key.parallel, key.batch) in self._times

    def _reference_s(self, key: CostKey) -> float:
        group = (key.model, key.kind, key.cfg, key.parallel, key.batch)
        seconds = self._times.at(group, key.shape)
        if seconds is None:
            raise UnknownCostError(self._unknown(key))
        # What a batch saves gets less with size. Small ones carried on would make large ones faster than they are.
        if key.batch > 1 and not self._times.reach(group, key.shape):
            raise UnknownCostError(f"{self._unknown(key)}, of smaller shapes only")
        return seconds

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
    {
        TaskKind.ENCODE: 0.1,
        TaskKind.PREPARE: 0.1,
        TaskKind.CONTROL: 0.4,
        TaskKind.DENOISE: 1.0,
        TaskKind.DECODE: 2.0,
        TaskKind.REQUEST: 50.0,
    }
)


def _setting(parallel: ParallelSpec, cfg: bool, batch: int) -> str:
    return f"{parallel}{' with cfg' if cfg else ''}{f' batch {batch}' if batch > 1 else ''}"


def _names(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
