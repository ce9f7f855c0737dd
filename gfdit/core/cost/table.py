"""Cost models: over a table of measured or published times, and a nominal one for serving without a table."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from types import MappingProxyType
from typing import Any

from gfdit.core.bounded import AnswerCache
from gfdit.core.cost import UnknownCostError
from gfdit.core.cost.calibrated import MAX_ANSWERS, UNMASKED_SHARE, CalibratedCostModel, CostKey
from gfdit.core.cost.file import ArtifactSize, CostEntry, CostTable, MaskedSteps, StepExchanges
from gfdit.core.cost.nodes import Nodes
from gfdit.core.cost.shape_points import ShapePoints
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.policy import TaskView
from gfdit.core.tasks import Shape, TaskKind, artifact_kind

__all__ = [
    "NOMINAL",
    "ArtifactSize",
    "CostEntry",
    "CostKey",
    "CostTable",
    "MaskedSteps",
    "NominalCostModel",
    "StepExchanges",
    "TableCostModel",
    "cost_model",
]


NOMINAL = CostTable("none", "times are nominal", 0.0, 1.0, ())
"""What stands for no table where one has to be named."""


def cost_model(table: CostTable | None, *, skips_steps: bool = False) -> CalibratedCostModel:
    """Of ``table``; times are nominal without one, or with one that has no entries."""
    if table is None or not table.entries:
        return NominalCostModel(skips_steps=skips_steps)
    return TableCostModel(table, skips_steps=skips_steps)


class TableCostModel(CalibratedCostModel):
    """Times from a :class:`CostTable`. A shape it lacks is interpolated in tokens; nothing else is guessed.

    Beyond the largest shape times go on as they rose, except those of batches, which are then unknown.

    With ``nodes`` a layout and a copy cost more where they cross them; without, all ranks are on one.
    """

    def __init__(self, table: CostTable, *, skips_steps: bool = False, nodes: Nodes | None = None) -> None:
        super().__init__(skips_steps=skips_steps)
        self.table = table
        self._nodes = nodes
        self._exchanges = {exchanges.model: exchanges for exchanges in table.exchanges}
        self._more_s: AnswerCache[tuple[Any, ...], float] = AnswerCache(MAX_ANSWERS)
        self._times = ShapePoints(
            ((e.model, e.task, e.cfg, e.parallel, e.batch), e.shape, e.seconds) for e in table.entries
        )
        self._sizes = ShapePoints(((a.model, a.artifact, a.cfg), a.shape, a.num_bytes) for a in table.artifacts)
        self._unmasked_shares = {steps.model: steps.unmasked_share for steps in table.masked_steps}
        self._copies_s: AnswerCache[tuple[Any, ...], float] = AnswerCache(MAX_ANSWERS)

    @property
    def num_entries(self) -> int:
        return super().num_entries + len(self._copies_s) + len(self._more_s)

    def task_s(self, task: TaskView, layout: ExecutionLayout, batch: int = 1) -> float:
        seconds = super().task_s(task, layout, batch)
        return seconds if self._nodes is None else seconds + self._across_s(task, layout, batch)

    def observe(self, task: TaskView, layout: ExecutionLayout, seconds: float, batch: int = 1) -> None:
        """What nodes add to ``seconds`` is not the task's: the same task on other ranks does not have it."""
        if self._nodes is not None:
            seconds -= self._across_s(task, layout, batch)
        super().observe(task, layout, seconds, batch)

    def _across_s(self, task: TaskView, layout: ExecutionLayout, batch: int) -> float:
        """What a step takes longer because of the nodes its ranks are on."""
        nodes = self._nodes
        if nodes is None or len(layout.ranks) == 1 or task.kind is not TaskKind.DENOISE:
            return 0.0
        if self._is_of_nodes(layout.parallel):
            return 0.0  # it is in the time
        key = (task.model, task.shape, task.cfg, batch, layout)
        if (seconds := self._more_s.get(key)) is None:
            spec = layout.parallel
            seconds = self._more_s[key] = nodes.more_s(
                nodes.crossing(layout),
                spec,
                task.shape,
                self._exchanges.get(task.model),
                branches=batch * (2 if task.cfg and spec.cfg == 1 else 1),
                made_bytes=batch * (self._sizes.at((task.model, "latents", task.cfg), task.shape) or 0.0),
                table_bytes_per_s=self.table.migration_bytes_per_s,
            )
        return seconds

    def offers(self, spec: ParallelSpec) -> bool:
        """Whether a step may run at ``spec``: a branch fits a node, or the table has times across nodes."""
        return self._nodes is None or spec.sp <= self._nodes.ranks_per_node or self._is_of_nodes(spec)

    def _is_of_nodes(self, spec: ParallelSpec) -> bool:
        """Whether times at ``spec`` are of ranks of several nodes."""
        return self.table.ranks_per_node is not None and spec.size > self.table.ranks_per_node

    def migration_s(self, task: TaskView, layout: ExecutionLayout) -> float:
        """What the copies take one after the other: each its latency, and its bytes once a rank that lacks it."""
        total_s = 0.0
        for name, holders in task.artifacts:
            if lacking := set(layout.ranks).difference(holders):
                num_between = 0
                if self._nodes is not None:
                    near = {self._nodes.of(rank) for rank in holders}
                    num_between = sum([self._nodes.of(rank) not in near for rank in lacking])
                kind = artifact_kind(task.request_id, name)
                total_s += self.copy_s(task.model, task.shape, task.cfg, kind, len(lacking), num_between)
        return total_s

    def copy_s(
        self, model: str, shape: Shape, cfg: bool, artifact: str, num_copies: int, num_between: int = 0
    ) -> float:
        """Time to copy one artifact of the kind ``artifact`` to ``num_copies`` ranks, so many on other nodes.

        The latency alone if the table has no size for such an artifact of the model.
        """
        key = (model, shape, cfg, artifact, num_copies, num_between)
        if (seconds := self._copies_s.get(key)) is None:
            num_bytes = self._sizes.at((model, artifact, cfg), shape) or 0.0
            within_bytes_per_s = self.table.migration_bytes_per_s
            seconds = self.table.migration_latency_s
            if self._nodes is not None:
                within_bytes_per_s = self._nodes.within_bytes_per_s or within_bytes_per_s
                if num_between:
                    seconds += self._nodes.between_latency_s
                    seconds += num_bytes * num_between / self._nodes.between_bytes_per_s
            else:
                num_between = 0
            seconds += num_bytes * (num_copies - num_between) / within_bytes_per_s
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
