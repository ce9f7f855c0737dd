"""Policies x workloads x loads x deadlines x seeds: every combination simulated, means over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from gfdit.core.cost_file import CostTable
from gfdit.core.cost_table import TableCostModel
from gfdit.sim.bound import attainment_bound
from gfdit.sim.compare import Job, PolicyChoice, in_processes, simulate
from gfdit.sim.estimates import Estimate, estimate
from gfdit.sim.simulator import SimulationOptions
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import DEFAULT_STEPS, PATTERNS, generate, request_classes

VERSION = 1
BOUND = "upper bound"
"""Takes the place of a policy's name."""

METRICS = (
    "slo_attainment",
    "slo_attainment_grace",
    "mean_latency_s",
    "p50_latency_s",
    "p95_latency_s",
    "p99_latency_s",
    "throughput_rps",
    "rank_busy_ratio",
    "num_completed",
    "num_rejected",
    "migrations",
)


@dataclass(frozen=True, slots=True)
class Point:
    """What is offered: a workload at a load, its deadlines multiplied by ``deadline_scale``."""

    workload: str
    load: float
    deadline_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Grid:
    """All combinations of the tuples. ``bound`` adds the upper bound on attainment to every trace."""

    table: CostTable
    policies: tuple[PolicyChoice, ...]
    workloads: tuple[str, ...]
    loads: tuple[float, ...]
    seeds: tuple[int, ...]
    options: SimulationOptions
    deadline_scales: tuple[float, ...] = (1.0,)
    grace_s: float = 0.0
    model: str | None = None
    num_steps: int = DEFAULT_STEPS
    bound: bool = False

    def __post_init__(self) -> None:
        if unknown := [name for name in self.workloads if name not in PATTERNS]:
            raise ValueError(f"unknown workload {unknown[0]!r}, known: {', '.join(PATTERNS)}")
        if bad := [scale for scale in self.deadline_scales if not (math.isfinite(scale) and scale > 0)]:
            raise ValueError(f"a deadline scale must be a positive number, got {bad[0]}")
        labels = [policy.label for policy in self.policies]
        if again := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"policy {again[0]!r} is there twice")
        if self.bound and self.options.jitter:
            raise ValueError("there is no upper bound with jitter: tasks may be faster than the cost table says")

    def points(self) -> list[Point]:
        return [Point(*values) for values in product(self.workloads, self.loads, self.deadline_scales)]

    def trace(self, point: Point, seed: int) -> tuple[TraceRequest, ...]:
        classes = request_classes(TableCostModel(self.table), model=self.model, num_steps=self.num_steps)
        phases, num_ranks = PATTERNS[point.workload], self.options.num_ranks
        trace = generate(phases, classes, num_ranks=num_ranks, load=point.load, seed=seed)
        return tuple(_scaled(request, point.deadline_scale) for request in trace)

    def job(self, point: Point, seed: int, policy: PolicyChoice) -> Job:
        return Job(policy, self.trace(point, seed), self.table, self.options, self.grace_s)


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. ``numbers`` are those of the result file, with ``latencies_s`` instead of its requests.

    ``complaint`` is what the policy did wrong, in one line; what it did not complete is missed.
    """

    point: Point
    seed: int
    policy: str
    numbers: dict[str, Any]
    complaint: str = ""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Cells in the order of points, seeds and policies, the bound last; the same whatever ran them."""

    cells: tuple[Cell, ...]

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(cell.policy for cell in self.cells))

    @property
    def points(self) -> list[Point]:
        return list(dict.fromkeys(cell.point for cell in self.cells))

    def values(self, point: Point, policy: str, metric: str) -> list[Any]:
        """By seed; a dot in ``metric`` goes down one level, as in ``per_class.S.slo_attainment``."""
        return [
            _lookup(cell.numbers, metric) for cell in self.cells if (cell.point, cell.policy) == (point, policy)
        ]

    def estimate(self, point: Point, policy: str, metric: str) -> Estimate | None:
        """Mean over the seeds that have the metric; None if none has."""
        values = [value for value in self.values(point, policy, metric) if value is not None]
        return estimate(values) if values else None

    def difference(self, point: Point, policy: str, other: str, metric: str) -> Estimate:
        """``policy`` - ``other`` on the same traces: seeds that are hard for both do not widen it."""
        pairs = zip(self.values(point, policy, metric), self.values(point, other, metric), strict=True)
        return estimate([mine - theirs for mine, theirs in pairs])

    def as_json(self, *, cells: bool = True) -> dict[str, Any]:
        """Means over seeds of every point and policy, and the single simulations with ``cells``."""
        data: dict[str, Any] = {"version": VERSION, "points": list(self._means())}
        if cells:
            data["cells"] = [
                {**asdict(cell.point), "seed": cell.seed, "policy": cell.policy, **cell.numbers}
                for cell in self.cells
            ]
        return data

    def _means(self) -> Iterator[dict[str, Any]]:
        for point, policy in product(self.points, self.policies):
            found = {metric: self.estimate(point, policy, metric) for metric in METRICS}
            yield {
                **asdict(point),
                "policy": policy,
                "num_seeds": len(self.values(point, policy, "num_requests")),
                **{metric: asdict(value) for metric, value in found.items() if value is not None},
            }


def run_sweep(grid: Grid, *, num_processes: int = 1, on_done: Callable[[], object] = lambda: None) -> Sweep:
    """Raises ``ValueError`` for a policy that cannot be loaded or a workload that the table cannot serve."""
    cases = [
        (point, seed, policy)
        for point, seed in product(grid.points(), grid.seeds)
        for policy in (*grid.policies, *([None] if grid.bound else []))
    ]
    cells = in_processes(partial(_cell, grid), cases, num_processes=num_processes, on_done=on_done)
    return Sweep(tuple(cells))


def num_cases(grid: Grid) -> int:
    return len(grid.points()) * len(grid.seeds) * (len(grid.policies) + grid.bound)


def _cell(grid: Grid, case: tuple[Point, int, PolicyChoice | None]) -> Cell:
    point, seed, policy = case
    if policy is None:
        return Cell(point, seed, BOUND, _bound_numbers(grid, grid.trace(point, seed)))
    outcome = simulate(grid.job(point, seed, policy))
    numbers = {key: value for key, value in outcome.result.items() if key not in ("policy", "ranks", "requests")}
    latencies_s = [request["latency_s"] for request in outcome.result["requests"]]
    numbers["latencies_s"] = sorted(round(latency_s, 6) for latency_s in latencies_s if latency_s is not None)
    return Cell(point, seed, policy.label, numbers, outcome.complaint)


def _bound_numbers(grid: Grid, trace: Sequence[TraceRequest]) -> dict[str, Any]:
    bound = partial(attainment_bound, trace, grid.table, num_ranks=grid.options.num_ranks)
    in_time = bound().attainment
    with_grace = bound(grace_s=grid.grace_s).attainment if grid.grace_s else in_time
    return {"num_requests": len(trace), "slo_attainment": in_time, "slo_attainment_grace": with_grace}


def _scaled(request: TraceRequest, scale: float) -> TraceRequest:
    if request.deadline_s is None or scale == 1.0:
        return request
    return replace(request, deadline_s=round(request.deadline_s * scale, 6))


def _lookup(numbers: dict[str, Any], metric: str) -> Any:
    value: Any = numbers
    for key in metric.split("."):
        value = value.get(key) if value is not None else None
    return value
