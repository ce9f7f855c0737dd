"""Requests of a trace as task graphs: a task may run in every way the cost table has a time for."""

from __future__ import annotations

from gfdit.core import (
    ExecutionLayout,
    ParallelSpec,
    Request,
    TaskGraph,
    TaskKind,
    TaskView,
    UnknownCostError,
    trajectory,
)
from gfdit.core.cost.table import CostTable, TableCostModel
from gfdit.core.layouts import SINGLE
from gfdit.core.tasks import with_encoder

_OF_EVERY_MODEL = frozenset({"conditioning", "latents"})


class GraphBuilder:
    """Graphs as the server makes them: denoising and decoding are parallel where the table has times for it.

    A decode is shared only by ranks for which the table has a time of that shape or a smaller one: a server offers
    no more ranks than there are tiles, and so measures none. Of a layout that no node has the ranks for, only what
    the table has times of is offered.

    A model for which the table has no ``prepare`` at all makes its initial latents while encoding. An artifact in
    the table that not every model has is made by an encode task of its own.
    """

    def __init__(self, cost: TableCostModel, num_ranks: int) -> None:
        self._cost = cost
        self._num_ranks = num_ranks
        self._specs: dict[tuple[str, bool], tuple[ParallelSpec, ...]] = {}
        self._prepared = {entry.model for entry in cost.table.entries if entry.task is TaskKind.PREPARE}
        self._inputs: dict[str, list[str]] = {}  # by model
        for size in cost.table.artifacts:
            known = self._inputs.setdefault(size.model, [])
            if size.artifact not in _OF_EVERY_MODEL and size.artifact not in known:
                known.append(size.artifact)
        self._smallest_decodes = _smallest_decodes(cost.table)

    def check(self, request: Request) -> None:
        """Raises ``ValueError`` naming the request if the table lacks a task or no degree fits the ranks."""
        if (request.model, request.cfg) not in self._specs:
            self._specs[request.model, request.cfg] = self._feasible(request)

    def build(self, request: Request) -> TaskGraph:
        """Raises what :meth:`check` raises."""
        self.check(request)
        specs = self._specs[request.model, request.cfg]
        graph = trajectory(
            request.id,
            request.num_steps,
            specs,
            prepare=request.model in self._prepared,
            decode_candidates=self._decode_candidates(request),
        )
        for name in self._inputs.get(request.model, ()):
            graph = with_encoder(graph, name, {TaskKind.DENOISE})
        return graph

    def service_s(self, request: Request) -> float:
        """Time of the request alone on one rank."""
        alone = ExecutionLayout((0,), SINGLE)
        return sum(self._cost.task_s(TaskView.of(request, task), alone) for task in self.build(request).tasks)

    def _decode_candidates(self, request: Request) -> tuple[ParallelSpec, ...]:
        smallest = self._smallest_decodes.get((request.model, request.cfg), {})
        num_tokens = request.shape.num_tokens
        return tuple(
            spec
            for spec in sorted(smallest, key=lambda spec: spec.size)
            if spec == SINGLE
            or (smallest[spec] <= num_tokens and spec.size <= self._num_ranks and self._cost.offers(spec))
        )

    def _feasible(self, request: Request) -> tuple[ParallelSpec, ...]:
        """The feasible specifications of a denoising step, narrowest first."""
        entries = self._cost.table.entries
        known = {e.parallel for e in entries if (e.model, e.task) == (request.model, TaskKind.DENOISE)}
        graph = trajectory(request.id, 1, tuple(known) or (SINGLE,), prepare=request.model in self._prepared)
        try:
            specs = {task.kind: self._cost.candidates(TaskView.of(request, task)) for task in graph.tasks}
        except UnknownCostError as error:
            raise ValueError(f"request {request.id!r}: {error}") from error
        fitting = tuple(
            spec for spec in specs[TaskKind.DENOISE] if spec.size <= self._num_ranks and self._cost.offers(spec)
        )
        if not fitting:
            needed = specs[TaskKind.DENOISE][0].size
            raise ValueError(
                f"request {request.id!r}: the cost table runs {request.model!r} on {needed} ranks or more, "
                f"there are {self._num_ranks}"
            )
        return fitting


def _smallest_decodes(table: CostTable) -> dict[tuple[str, bool], dict[ParallelSpec, int]]:
    """By model and guidance: tokens of the smallest shape that has a decode time at each specification."""
    smallest: dict[tuple[str, bool], dict[ParallelSpec, int]] = {}
    for entry in table.entries:
        if entry.task is TaskKind.DECODE and entry.batch == 1:
            of_model = smallest.setdefault((entry.model, entry.cfg), {})
            num_tokens = entry.shape.num_tokens
            of_model[entry.parallel] = min(num_tokens, of_model.get(entry.parallel, num_tokens))
    return smallest
