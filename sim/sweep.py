"""Policies x workloads x loads x SLO scales x ranks x seeds: every combination simulated, means over seeds."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.bounds.fluid import check_bounded
from gfdit.sim.bounds.possible import SIDES, UPPER, possible
from gfdit.sim.compare import Job, PolicyChoice, in_processes, simulate
from gfdit.sim.costs.flux_edits import NUM_STEPS, flux_edits
from gfdit.sim.edit_workloads import EDITS, EditTimes, generate_edits
from gfdit.sim.estimates import Estimate, estimate
from gfdit.sim.options import SimulationOptions
from gfdit.sim.trace import TraceRequest, read_trace
from gfdit.sim.workloads import PATTERNS, generate, workload_classes

VERSION = 1
BOUND = UPPER
"""Takes the place of a policy's name."""

AXES = ("load", "per_min", "slo_scale", "num_ranks")
SHARES = ("slo_attainment", "slo_attainment_grace", "rank_busy_ratio", "rank_widening_ratio")
METRICS = (
    "slo_attainment",
    "slo_attainment_grace",
    "mean_latency_s",
    "p50_latency_s",
    "p95_latency_s",
    "p99_latency_s",
    "throughput_rps",
    "rank_busy_ratio",
    "rank_widening_ratio",
    "rank_s_per_request",
    "num_completed",
    "num_rejected",
    "migrations",
)
#: Those that a class has, too.
CLASS_METRICS = tuple(name for name in METRICS if name.partition("_")[0] in ("slo", "mean", "p50", "p95", "p99"))


@dataclass(frozen=True, slots=True)
class Point:
    """What is offered: a workload at a load, or at so many requests a minute, or (neither) at its own rates.

    ``workload`` may be the path of a trace. ``slo_scale`` multiplies the deadlines. ``num_ranks`` None is as many
    as the options say.
    """

    workload: str
    load: float | None = None
    per_min: float | None = None
    slo_scale: float = 1.0
    num_ranks: int | None = None

    def __str__(self) -> str:
        parts = [self.workload]
        parts += [] if self.load is None else [f"load {self.load:g}"]
        parts += [] if self.per_min is None else [f"{self.per_min:g} a minute"]
        parts += [] if self.slo_scale == 1 else [f"SLO scale {self.slo_scale:g}"]
        parts += [] if self.num_ranks is None else [f"{self.num_ranks} ranks"]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Grid:
    """All combinations of the tuples. ``num_steps`` None is the workload's own number of denoising steps.

    ``duration_s`` and ``num_requests`` cut or repeat a workload, ``cv`` and ``deadline_factors`` change it.
    ``traces`` are files, simulated once each, as they are but for the SLO scale. ``bound`` adds the upper bound on
    attainment to every trace.
    """

    table: CostTable
    policies: tuple[PolicyChoice, ...]
    workloads: tuple[str, ...]
    seeds: tuple[int, ...]
    options: SimulationOptions
    loads: tuple[float | None, ...] = (None,)
    per_min: tuple[float | None, ...] = (None,)
    slo_scales: tuple[float, ...] = (1.0,)
    grace_s: float = 0.0
    model: str | None = None
    num_steps: int | None = None
    duration_s: float | None = None
    bound: bool = False
    num_ranks: tuple[int | None, ...] = (None,)
    traces: tuple[str, ...] = ()
    num_requests: int | None = None
    cv: float | None = None
    deadline_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.workloads if name not in PATTERNS and name not in EDITS]:
            raise ValueError(f"unknown workload {unknown[0]!r}, known: {', '.join((*PATTERNS, *EDITS))}")
        labels = [policy.label for policy in self.policies]
        if again := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"policy {again[0]!r} is there twice")
        if self.bound:
            check_bounded(self.options)

    def points(self) -> list[Point]:
        offered = list(product(self.workloads, self.loads, self.per_min))
        offered += [(path, None, None) for path in self.traces]
        return [Point(*offer, *how) for offer, how in product(offered, product(self.slo_scales, self.num_ranks))]

    def cases(self) -> list[tuple[Point, int]]:
        """Points and seeds; a trace from a file has a single one."""
        return [
            (point, seed)
            for point in self.points()
            for seed in (self.seeds[:1] if point.workload in self.traces else self.seeds)
        ]

    def options_at(self, point: Point) -> SimulationOptions:
        return self.options if point.num_ranks is None else replace(self.options, num_ranks=point.num_ranks)

    def trace(self, point: Point, seed: int) -> tuple[TraceRequest, ...]:
        """Raises what ``workload_classes``, ``generate``, ``generate_edits`` and ``read_trace`` raise."""
        if point.workload in self.traces:
            return tuple(_scaled(request, point.slo_scale) for request in read_trace(Path(point.workload)))
        cost = TableCostModel(self.table)
        if point.workload in EDITS:
            return self._edits(point, seed, cost)
        workload = PATTERNS[point.workload]
        classes = workload_classes(
            workload,
            cost,
            model=self.model,
            num_steps=self.num_steps,
            deadline_factors=self.deadline_factors,
            slo_scale=point.slo_scale,
        )
        return tuple(
            generate(
                workload,
                classes,
                num_ranks=self.options_at(point).num_ranks,
                seed=seed,
                load=point.load,
                per_min=point.per_min,
                cv=self.cv,
                duration_s=self.duration_s,
                num_requests=self.num_requests,
            )
        )

    def _edits(self, point: Point, seed: int, cost: TableCostModel) -> tuple[TraceRequest, ...]:
        times = EditTimes(cost, self.options.edits or flux_edits(), self.num_steps or NUM_STEPS)
        edits = generate_edits(
            EDITS[point.workload],
            times,
            num_ranks=self.options_at(point).num_ranks,
            seed=seed,
            load=point.load,
            per_min=point.per_min,
            duration_s=self.duration_s,
            slo_scale=point.slo_scale,
        )
        return tuple(edits)

    def job(self, point: Point, seed: int, policy: PolicyChoice) -> Job:
        return Job(policy, self.trace(point, seed), self.table, self.options_at(point), self.grace_s)


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. ``numbers`` are those of the result file; of its requests there are ``latencies_s`` and the
    mean ``rank_s_per_request``.

    ``complaint`` is what the policy did wrong, in one line; what it did not complete is missed.
    """

    point: Point
    seed: int
    policy: str
    numbers: dict[str, Any]
    complaint: str = ""


@dataclass(frozen=True)
class Sweep:
    """Cells in the order of points, seeds and policies, what is possible last; the same whatever ran them."""

    cells: tuple[Cell, ...]

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(cell.policy for cell in self.cells))

    @property
    def points(self) -> list[Point]:
        return list(dict.fromkeys(cell.point for cell in self.cells))

    @property
    def classes(self) -> list[str]:
        """Of all requests, if there is more than one."""
        found = sorted({name for cell in self.cells for name in cell.numbers.get("per_class", ())})
        return found if len(found) > 1 else []

    @property
    def axis(self) -> str:
        """The field of the points with most values: what a picture or a table has along its horizontal axis."""
        return max(AXES, key=lambda name: len({getattr(point, name) for point in self.points}))

    def groups(self) -> dict[Point, list[Point]]:
        """Points that differ along the axis only, by what they have in common."""
        groups: dict[Point, list[Point]] = {}
        neutral: dict[str, Any] = {self.axis: getattr(Point(""), self.axis)}
        for point in self.points:
            groups.setdefault(replace(point, **neutral), []).append(point)
        return groups

    @cached_property
    def _at(self) -> dict[tuple[Point, str], list[Cell]]:
        found: dict[tuple[Point, str], list[Cell]] = {}
        for cell in self.cells:
            found.setdefault((cell.point, cell.policy), []).append(cell)
        return found

    def values(self, point: Point, policy: str, metric: str) -> list[Any]:
        """By seed; a dot in ``metric`` goes down one level, as in ``per_class.S.slo_attainment``."""
        return [_lookup(cell.numbers, metric) for cell in self._at.get((point, policy), ())]

    def estimate(self, point: Point, policy: str, metric: str) -> Estimate | None:
        """Mean over the seeds that have the metric; None if none has."""
        values = [value for value in self.values(point, policy, metric) if value is not None]
        if not values:
            return None
        return estimate(values, least=0, most=1) if metric.rpartition(".")[2] in SHARES else estimate(values)

    def mean(self, point: Point, policy: str, metric: str) -> float:
        """Raises ``ValueError`` if no seed has the metric."""
        found = self.estimate(point, policy, metric)
        if found is None:
            raise ValueError(f"{point}: {policy} has no {metric}")
        return found.mean

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
                **{metric: value.as_json() for metric, value in found.items() if value is not None},
            }


def run_sweep(
    grid: Grid,
    *,
    num_processes: int = 1,
    on_done: Callable[[], object] = lambda: None,
    kept: Path | None = None,
) -> Sweep:
    """Raises ``ValueError`` for a policy that cannot be loaded or a workload that the table cannot serve.

    Cells are kept in the folder ``kept`` and taken from there, so that a run goes on where one before has ended.
    They are known by what is simulated, not by the code of the policy: delete those of what has changed.
    """
    cases = [
        (point, seed, policy)
        for point, seed in grid.cases()
        for policy in (*grid.policies, *(SIDES if grid.bound else ()))
    ]
    call = partial(_cell, grid) if kept is None else partial(_kept_cell, grid, kept)
    cells = in_processes(call, cases, num_processes=num_processes, on_done=on_done)
    return Sweep(tuple(cells))


def num_cases(grid: Grid) -> int:
    return len(grid.cases()) * (len(grid.policies) + len(SIDES) * grid.bound)


def _cell(grid: Grid, case: tuple[Point, int, PolicyChoice | str]) -> Cell:
    point, seed, policy = case
    if isinstance(policy, str):
        trace, num_ranks = grid.trace(point, seed), grid.options_at(point).num_ranks
        found = possible(policy, trace, grid.table, num_ranks=num_ranks, grace_s=grid.grace_s)
        return Cell(point, seed, policy, {"num_requests": len(trace), **found})
    outcome = simulate(grid.job(point, seed, policy))
    numbers = {key: value for key, value in outcome.result.items() if key not in ("policy", "ranks", "requests")}
    latencies_s = [request["latency_s"] for request in outcome.result["requests"]]
    numbers["rank_s_per_request"] = fmean([request["rank_seconds"] for request in outcome.result["requests"]])
    numbers["latencies_s"] = sorted(round(latency_s, 6) for latency_s in latencies_s if latency_s is not None)
    return Cell(point, seed, policy.label, numbers, outcome.complaint)


def _kept_cell(grid: Grid, folder: Path, case: tuple[Point, int, PolicyChoice | str]) -> Cell:
    """From ``folder``, in whose file names are the policy and a hash of all that the cell depends on."""
    point, seed, policy = case
    label = policy if isinstance(policy, str) else policy.label
    alike = replace(
        grid,
        policies=(),
        workloads=(),
        seeds=(),
        loads=(),
        per_min=(),
        slo_scales=(),
        num_ranks=(),
        bound=False,
    )
    chosen = policy if isinstance(policy, str) else (policy.spec, policy.args, policy.admission)
    what = hashlib.sha256(repr((point, seed, chosen, alike)).encode())
    path = folder / f"{re.sub('[^a-z0-9]+', '-', label.lower())}.{what.hexdigest()[:32]}.json"
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Cell(point, seed, label, kept["numbers"], kept["complaint"])
    cell = _cell(grid, case)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"numbers": cell.numbers, "complaint": cell.complaint}), encoding="utf-8")
    unfinished.replace(path)
    return cell


def _scaled(request: TraceRequest, slo_scale: float) -> TraceRequest:
    if request.deadline_s is None or slo_scale == 1:
        return request
    return replace(request, deadline_s=request.deadline_s * slo_scale)


def _lookup(numbers: dict[str, Any], metric: str) -> Any:
    value: Any = numbers
    for key in metric.split("."):
        value = value.get(key) if value is not None else None
    return value
