"""The work of a request as the bound on attainment sees it: parts, and the ways to do them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gfdit.core import ExecutionLayout, Request, TaskView, UnknownCostError
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run a task: seconds, and ranks held meanwhile (a fraction for a task of a batch)."""

    seconds: float
    num_ranks: float


@dataclass(frozen=True, slots=True)
class Part:
    """Tasks with the same modes."""

    num_tasks: int
    modes: tuple[Mode, ...]


def parts_of(request: Request, graphs: GraphBuilder, cost: TableCostModel) -> tuple[Part, ...]:
    """Raises ``ValueError`` for a request that cannot be served."""
    parts: dict[tuple[Mode, ...], int] = {}
    batches = sorted({entry.batch for entry in cost.table.entries if entry.model == request.model})
    for task in graphs.build(request).tasks:
        modes = efficient(modes_of(TaskView.of(request, task), batches, cost))
        parts[modes] = parts.get(modes, 0) + 1
    return tuple(Part(count, modes) for modes, count in parts.items())


def narrowest_rank_s(
    trace: Iterable[TraceRequest], cost: TableCostModel, graphs: GraphBuilder
) -> dict[str, float]:
    """By request, rank-seconds of all its tasks one by one, each at its narrowest degree.

    Raises ``ValueError`` for a request that cannot be served.
    """
    known: dict[tuple[object, ...], float] = {}
    found = {}
    for line in trace:
        request = line.request()
        key = (request.model, request.shape, request.cfg, request.num_steps)
        if key not in known:
            known[key] = sum(
                _narrowest_s(TaskView.of(request, task), cost) for task in graphs.build(request).tasks
            )
        found[line.id] = known[key]
    return found


def _narrowest_s(task: TaskView, cost: TableCostModel) -> float:
    spec = cost.candidates(task)[0]
    return spec.size * cost.task_s(task, ExecutionLayout(tuple(range(spec.size)), spec))


def modes_of(task: TaskView, batches: Sequence[int], cost: TableCostModel) -> list[Mode]:
    modes = []
    for spec in cost.candidates(task):
        layout = ExecutionLayout(tuple(range(spec.size)), spec)
        for batch in batches:
            try:
                modes.append(Mode(cost.task_s(task, layout, batch), spec.size / batch))
            except UnknownCostError:
                assert batch > 1, "a candidate has a time of its own"
    return modes


def efficient(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    """Those that no mixture of other modes and idling beats, from the fewest ranks to the most.

    They are the upper concave hull of speed over ranks, from the origin to the fastest.
    """
    hull: list[tuple[float, float, Mode | None]] = [(0.0, 0.0, None)]  # (ranks, tasks/s)
    for mode in sorted(modes, key=lambda mode: (mode.num_ranks, mode.seconds)):
        ranks, speed = mode.num_ranks, 1.0 / mode.seconds
        if speed <= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (ranks, speed, mode)):
            hull.pop()
        hull.append((ranks, speed, mode))
    return tuple(mode for _, _, mode in hull if mode is not None)


def _slope(left: tuple[float, float, Mode | None], right: tuple[float, float, Mode | None]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])
