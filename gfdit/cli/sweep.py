"""`gfdit sweep`: policies x workloads x loads x SLO scales x ranks x seeds: means, intervals and pictures."""

import argparse
import csv
import sys
from dataclasses import astuple, fields
from itertools import product
from pathlib import Path
from typing import Any

from gfdit.cli.policy_options import chosen_policies
from gfdit.cli.sim import add_simulation_options, num_processes, progress, simulation_options, write_json
from gfdit.sim.bounds.possible import SIDES
from gfdit.sim.compare import in_processes, simulate_spans
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.edit_workloads import EDITS
from gfdit.sim.estimates import Estimate
from gfdit.sim.sweep import CLASS_METRICS, METRICS, Grid, Point, Sweep, num_cases, run_sweep
from gfdit.sim.trace import far_outside, read_trace
from gfdit.sim.workloads import PATTERNS

#: What ``--show`` takes: the metric, its unit, and what it is multiplied by.
SHOWN: dict[str, tuple[str, str, float]] = {
    "in-time": ("slo_attainment_grace", "requests in time, %", 100.0),
    "mean-s": ("mean_latency_s", "mean latency, s", 1.0),
    "p50-s": ("p50_latency_s", "median latency, s", 1.0),
    "p95-s": ("p95_latency_s", "95th percentile of the latency, s", 1.0),
    "p99-s": ("p99_latency_s", "99th percentile of the latency, s", 1.0),
    "busy": ("rank_busy_ratio", "ranks busy, %", 100.0),
    "widening": ("rank_widening_ratio", "ranks busy with what widening costs, %", 100.0),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME",
        help=f"repeat: {', '.join((*PATTERNS, *EDITS))}",
    )
    parser.add_argument("--trace", action="append", default=[], metavar="T.jsonl", help="a trace as it is; repeat")
    parser.add_argument("--load", metavar="X,Y,…", help="work offered / capacity, several with commas")
    parser.add_argument("--per-min", metavar="X,Y,…", help="instead of a load: requests a minute")
    parser.add_argument("--slo-scale", metavar="X,Y,…", default="1", help="what deadlines are multiplied by")
    parser.add_argument("--seeds", type=int, metavar="N", default=5, help="traces of each point of a workload")
    parser.add_argument("--first-seed", type=int, metavar="S", default=0)
    add_simulation_options(parser, several_ranks=True)
    parser.add_argument("--model", help="which model of the cost table, where it has several")
    parser.add_argument("--steps", type=int, help="denoising steps of every request (default: the workload's)")
    parser.add_argument(
        "--cv", type=float, help="burstiness of the workload: coefficient of variation of the gaps"
    )
    parser.add_argument("--duration-s", type=float, metavar="T", help="of every trace; the pattern repeats")
    parser.add_argument("--num-requests", type=int, metavar="N", help="of every trace; the pattern repeats")
    parser.add_argument(
        "--deadline-factors",
        type=float,
        nargs=3,
        metavar=("S", "M", "L"),
        help="deadlines as multiples of the time alone on one rank",
    )
    parser.add_argument(
        "--show", metavar="A,B,…", default="in-time", help=f"tables to print, of: {', '.join(SHOWN)}"
    )
    parser.add_argument("--per-class", action="store_true", help="print a row for each class of requests, too")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write means and single runs there")
    parser.add_argument(
        "--csv", metavar="OUT.csv", type=Path, help="write means and intervals there, by class too"
    )
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write attainment.png and latency.png there")
    parser.add_argument(
        "--lanes",
        metavar="POINT",
        help="with --plots: lanes.png, what ran where at that point, such as 'short, load 0.9', first seed",
    )


def run(args: argparse.Namespace) -> int:
    """The results are written in any case; policies that made mistakes are then reported as an error."""
    grid, shown = _grid(args), _shown(args.show)
    lanes = _point(args.lanes, grid) if args.lanes is not None else None
    for path in grid.traces:
        if doubt := far_outside(read_trace(path), grid.table):
            print(f"gfdit sweep: warning: {path}: {doubt}", file=sys.stderr)
    with progress("sweep", num_cases(grid)) as step:
        sweep = run_sweep(grid, num_processes=num_processes(args), on_done=step)
    print("\n".join(describe(sweep, name, per_class=args.per_class) for name in shown))
    if args.json is not None:
        write_json(args.json, sweep.as_json())
    if args.csv is not None:
        _write_csv(args.csv, sweep)
    if args.plots is not None:
        _plot(sweep, grid, args.plots, lanes, num_processes(args))
    if wrong := [cell for cell in sweep.cells if cell.complaint]:
        more = f" (and {len(wrong) - 1} more runs)" if len(wrong) > 1 else ""
        cell = wrong[0]
        raise ValueError(f"{cell.point}, seed {cell.seed}: {cell.policy}: {cell.complaint}{more}")
    return 0


def _grid(args: argparse.Namespace) -> Grid:
    if args.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {args.seeds}")
    if args.lanes is not None and args.plots is None:
        raise ValueError("--lanes needs --plots DIR")
    if not (args.workload or args.trace):
        raise ValueError("a sweep needs a --workload or a --trace")
    if not args.workload:
        for name in ("load", "per_min", "cv", "duration_s", "num_requests", "steps", "model", "deadline_factors"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is of --workload; a trace has its own")
    ranks = args.ranks.split(",")
    if not all(number.isdecimal() and int(number) for number in ranks):
        raise ValueError(f"--ranks takes positive whole numbers with commas between them, got {args.ranks!r}")
    num_ranks = tuple(dict.fromkeys(map(int, ranks)))
    return Grid(
        load_cost_table(args.costs),
        chosen_policies(args),
        workloads=tuple(args.workload),
        traces=tuple(args.trace),
        loads=_values(args.load, "--load"),
        per_min=_values(args.per_min, "--per-min"),
        slo_scales=_values(args.slo_scale, "--slo-scale"),
        num_ranks=num_ranks if len(num_ranks) > 1 else (None,),
        seeds=tuple(range(args.first_seed, args.first_seed + args.seeds)),
        options=simulation_options(args, num_ranks[0]),
        grace_s=args.grace_s,
        model=args.model,
        num_steps=args.steps,
        duration_s=args.duration_s,
        num_requests=args.num_requests,
        cv=args.cv,
        deadline_factors=None if args.deadline_factors is None else tuple(args.deadline_factors),
        bound=args.bound,
    )


def _shown(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SHOWN]:
        raise ValueError(f"--show {unknown[0]!r} is unknown, known: {', '.join(SHOWN)}")
    return names


def describe(sweep: Sweep, shown: str = "in-time", *, per_class: bool = False) -> str:
    """A block for what points have in common, a row per policy; grace counts as in time."""
    metric, title, scale = SHOWN[shown]
    rows = [(policy, metric) for policy in sweep.policies]
    if per_class and metric in CLASS_METRICS:
        rows = [
            (row, f"per_class.{kind}.{metric}" if kind else metric)
            for row, _ in rows
            for kind in ("", *(sweep.classes if row not in SIDES else ()))
        ]
    names = [f"  {metric.split('.')[1]}" if "." in metric else policy for policy, metric in rows]
    width = max(map(len, [*names, sweep.axis]))
    lines = []
    for common, points in sweep.groups().items():
        lines.append(f"{common}: {title}, mean over seeds and 95 % interval")
        values = [getattr(point, sweep.axis) for point in points]
        table = [["own rates" if value is None else f"{value:g}" for value in values]]
        table += [[_cell(sweep, point, policy, metric, scale) for point in points] for policy, metric in rows]
        wide = [max(14, *(len(row[column]) for row in table)) for column in range(len(points))]
        for name, row in zip([sweep.axis, *names], table, strict=True):
            if set(row) != {"-"}:  # what is possible has no latencies
                cells = (f"{cell:>{size}}" for cell, size in zip(row, wide, strict=True))
                lines.append(" ".join([f"{name:<{width}}", *cells]))
    return "\n".join(lines)


def _cell(sweep: Sweep, point: Point, policy: str, metric: str, scale: float) -> str:
    found = sweep.estimate(point, policy, metric)
    return "-" if found is None else found.shown(scale)


def _write_csv(path: Path, sweep: Sweep) -> None:
    """A row per point, policy and class; an empty class is all of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        ends = [f"{metric}{end}" for metric in METRICS for end in ("", "_low", "_high")]
        writer.writerow([*(field.name for field in fields(Point)), "policy", "class", "num_seeds", *ends])
        for point, policy, kind in product(sweep.points, sweep.policies, ("", *sweep.classes)):
            prefix = f"per_class.{kind}." if kind else ""
            found = [sweep.estimate(point, policy, prefix + metric) for metric in METRICS]
            if not any(found):
                continue
            numbers: list[object] = []
            for value in found:
                numbers += ["", "", ""] if value is None else [value.mean, *_ends(value)]
            num_seeds = len(sweep.values(point, policy, "num_requests"))
            writer.writerow([*astuple(point), policy, kind, num_seeds, *numbers])


def _ends(value: Estimate) -> list[object]:
    return ["", ""] if value.ci95 is None else [value.low, value.high]


def _values(text: str | None, option: str) -> tuple[Any, ...]:
    """Numbers, or only None where the option is not given."""
    if text is None:
        return (None,)
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas between them, got {text!r}") from None


def _point(text: str, grid: Grid) -> Point:
    points = {str(point): point for point in grid.points()}
    if text not in points:
        raise ValueError(f"--lanes {text!r} is not in this sweep, which has: {'; '.join(points)}")
    return points[text]


def _plot(sweep: Sweep, grid: Grid, folder: Path, lanes: Point | None, processes: int) -> None:
    from gfdit.sim.plots import plot_attainment, plot_latencies, plot_runs, pooled_latencies

    folder.mkdir(parents=True, exist_ok=True)
    plot_attainment(sweep, folder / "attainment.png", grace_s=grid.grace_s)
    plot_latencies({str(point): pooled_latencies(sweep, point) for point in sweep.points}, folder / "latency.png")
    if lanes is not None:
        jobs = [grid.job(lanes, grid.seeds[0], policy) for policy in grid.policies]
        runs = in_processes(simulate_spans, jobs, num_processes=processes)
        found = {job.policy.label: run for job, run in zip(jobs, runs, strict=True)}
        plot_runs(
            jobs[0].trace,
            {name: outcome.result for name, (outcome, _) in found.items()},
            {name: spans for name, (_, spans) in found.items()},
            folder / "lanes.png",
            num_ranks=jobs[0].options.num_ranks,
        )
