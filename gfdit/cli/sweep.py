"""`gfdit sweep`: policies x workloads x loads x SLO scales x seeds, with means, intervals and pictures."""

import argparse
from pathlib import Path
from typing import Any

from gfdit.cli.policy_options import chosen_policies
from gfdit.cli.sim import add_simulation_options, num_processes, progress, simulation_options, write_json
from gfdit.sim.compare import in_processes, simulate_spans
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.edit_workloads import EDITS
from gfdit.sim.sweep import Grid, Point, Sweep, num_cases, run_sweep
from gfdit.sim.workloads import PATTERNS


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        action="append",
        required=True,
        metavar="NAME",
        help=f"repeat: {', '.join((*PATTERNS, *EDITS))}",
    )
    parser.add_argument("--load", metavar="X,Y,…", help="work offered / capacity, several with commas")
    parser.add_argument("--per-min", metavar="X,Y,…", help="instead of a load: requests a minute")
    parser.add_argument("--slo-scale", metavar="X,Y,…", default="1", help="what deadlines are multiplied by")
    parser.add_argument("--seeds", type=int, metavar="N", default=5, help="traces of each point")
    add_simulation_options(parser)
    parser.add_argument("--model", help="which model of the cost table, where it has several")
    parser.add_argument("--steps", type=int, help="denoising steps of every request (default: the workload's)")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write means and single runs there")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write attainment.png and latency.png there")
    parser.add_argument(
        "--lanes",
        metavar="POINT",
        help="with --plots: lanes.png, what ran where at that point, such as 'short, load 0.9', first seed",
    )


def run(args: argparse.Namespace) -> int:
    """The results are written in any case; policies that made mistakes are then reported as an error."""
    if args.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {args.seeds}")
    if args.lanes is not None and args.plots is None:
        raise ValueError("--lanes needs --plots DIR")
    grid = Grid(
        load_cost_table(args.costs),
        chosen_policies(args),
        workloads=tuple(args.workload),
        loads=_values(args.load, "--load"),
        per_min=_values(args.per_min, "--per-min"),
        slo_scales=_values(args.slo_scale, "--slo-scale"),
        seeds=tuple(range(args.seeds)),
        options=simulation_options(args),
        grace_s=args.grace_s,
        model=args.model,
        num_steps=args.steps,
        bound=args.bound,
    )
    lanes = _point(args.lanes, grid) if args.lanes is not None else None
    with progress("sweep", num_cases(grid)) as step:
        sweep = run_sweep(grid, num_processes=num_processes(args), on_done=step)
    print(describe(sweep))
    if args.json is not None:
        write_json(args.json, sweep.as_json())
    if args.plots is not None:
        _plot(sweep, grid, args.plots, lanes, num_processes(args))
    if wrong := [cell for cell in sweep.cells if cell.complaint]:
        more = f" (and {len(wrong) - 1} more runs)" if len(wrong) > 1 else ""
        cell = wrong[0]
        raise ValueError(f"{cell.point}, seed {cell.seed}: {cell.policy}: {cell.complaint}{more}")
    return 0


def describe(sweep: Sweep) -> str:
    """Share of requests in time, grace included: a block for what points have in common, a row per policy."""
    width = max(map(len, [*sweep.policies, sweep.axis]))
    lines = []
    for common, points in sweep.groups().items():
        lines.append(f"{common}: requests in time, mean over seeds and 95 % interval")
        values = [getattr(point, sweep.axis) for point in points]
        columns = ["own rates" if value is None else f"{value:g}" for value in values]
        lines.append(" ".join([f"{sweep.axis:<{width}}", *(f"{column:>14}" for column in columns)]))
        for policy in sweep.policies:
            cells = [_cell(sweep, point, policy) for point in points]
            lines.append(" ".join([f"{policy:<{width}}", *(f"{cell:>14}" for cell in cells)]))
    return "\n".join(lines)


def _cell(sweep: Sweep, point: Point, policy: str) -> str:
    found = sweep.estimate(point, policy, "slo_attainment_grace")
    assert found is not None
    interval = "" if found.ci95 is None else f" ± {100 * found.ci95:.1f}"
    return f"{100 * found.mean:.1f}{interval} %"


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
            num_ranks=grid.options.num_ranks,
        )
