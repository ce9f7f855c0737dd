"""`gfdit sweep`: policies x workloads x loads x deadlines x seeds, with means, intervals and pictures."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gfdit.cli.policy_options import chosen_policies
from gfdit.cli.sim import add_simulation_options, num_processes, progress, simulation_options, write_json
from gfdit.sim.compare import in_processes, simulate_spans
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.sweep import BOUND, Grid, Point, Sweep, num_cases, run_sweep
from gfdit.sim.workloads import DEFAULT_STEPS, PATTERNS

T = TypeVar("T")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", action="append", required=True, metavar="NAME", help=f"repeat: {', '.join(PATTERNS)}"
    )
    parser.add_argument(
        "--load", metavar="X,Y,…", required=True, help="work offered / capacity, several with commas"
    )
    parser.add_argument("--seeds", type=int, metavar="N", default=5, help="traces of each workload and load")
    parser.add_argument(
        "--deadline-scale", metavar="X,Y,…", default="1", help="multiples of the standard deadlines, with commas"
    )
    add_simulation_options(parser)
    parser.add_argument("--model", help="which model of the cost table, where it has several")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="denoising steps of every request")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write means and single runs there")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write attainment.png and latency.png there")
    parser.add_argument(
        "--lanes",
        nargs=3,
        metavar=("WORKLOAD", "LOAD", "SEED"),
        help="with --plots: lanes.png, what ran where in that run of every policy",
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
        loads=_values(args.load, "--load", float),
        seeds=tuple(range(args.seeds)),
        options=simulation_options(args),
        deadline_scales=_values(args.deadline_scale, "--deadline-scale", float),
        grace_s=args.grace_s,
        model=args.model,
        num_steps=args.steps,
        bound=args.bound,
    )
    lanes = _lanes(args.lanes, grid) if args.lanes is not None else None
    with progress("sweep", num_cases(grid)) as step:
        sweep = run_sweep(grid, num_processes=num_processes(args), on_done=step)
    print(describe(sweep))
    if args.json is not None:
        write_json(args.json, sweep.as_json())
    if args.plots is not None:
        _plot(sweep, grid, args.plots, lanes, num_processes(args))
    if wrong := [cell for cell in sweep.cells if cell.complaint]:
        more = f" (and {len(wrong) - 1} more runs)" if len(wrong) > 1 else ""
        where = f"{wrong[0].point.workload}, load {wrong[0].point.load:g}, seed {wrong[0].seed}"
        raise ValueError(f"{where}: {wrong[0].policy}: {wrong[0].complaint}{more}")
    return 0


def describe(sweep: Sweep) -> str:
    """Share of requests in time, grace included: a block per workload and deadline scale, a column per load."""
    width = max(map(len, sweep.policies))
    lines = []
    for workload, scale in dict.fromkeys((point.workload, point.deadline_scale) for point in sweep.points):
        points = [point for point in sweep.points if (point.workload, point.deadline_scale) == (workload, scale)]
        scaled = f", deadlines x {scale:g}" if scale != 1 else ""
        lines.append(f"{workload}{scaled}: requests in time, mean over seeds and 95 % interval")
        lines.append(" ".join([f"{'load':<{width}}", *(f"{point.load:>14g}" for point in points)]))
        for policy in sweep.policies:
            cells = [_cell(sweep, point, policy) for point in points]
            lines.append(" ".join([f"{policy:<{width}}", *(f"{cell:>14}" for cell in cells)]))
    return "\n".join(lines)


def _cell(sweep: Sweep, point: Point, policy: str) -> str:
    found = sweep.estimate(point, policy, "slo_attainment_grace")
    assert found is not None
    interval = "" if found.ci95 is None else f" ± {100 * found.ci95:.1f}"
    return f"{100 * found.mean:.1f}{interval} %"


def _values(text: str, option: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas between them, got {text!r}") from None


def _lanes(wanted: list[str], grid: Grid) -> tuple[Point, int]:
    workload, load_text, seed_text = wanted
    (load,), (seed,) = _values(load_text, "--lanes", float), _values(seed_text, "--lanes", int)
    point = Point(workload, load, grid.deadline_scales[0])
    if point not in grid.points() or seed not in grid.seeds:
        raise ValueError(f"--lanes {' '.join(wanted)} is not one of the runs of this sweep")
    return point, seed


def _plot(sweep: Sweep, grid: Grid, folder: Path, lanes: tuple[Point, int] | None, processes: int) -> None:
    from gfdit.sim.plots import plot_attainment, plot_latencies, plot_runs, pooled_latencies

    folder.mkdir(parents=True, exist_ok=True)
    plot_attainment(sweep, folder / "attainment.png", grace_s=grid.grace_s)
    panels = {_title(point): pooled_latencies(sweep, point) for point in sweep.points}
    plot_latencies(panels, folder / "latency.png")
    if lanes is not None:
        jobs = [grid.job(*lanes, policy) for policy in grid.policies]
        runs = in_processes(simulate_spans, jobs, num_processes=processes)
        names = [name for name in sweep.policies if name != BOUND]
        results = {name: outcome.result for name, (outcome, _) in zip(names, runs, strict=True)}
        spans = {name: found for name, (_, found) in zip(names, runs, strict=True)}
        plot_runs(jobs[0].trace, results, spans, folder / "lanes.png", num_ranks=grid.options.num_ranks)


def _title(point: Point) -> str:
    scaled = f", deadlines x {point.deadline_scale:g}" if point.deadline_scale != 1 else ""
    return f"{point.workload}, load {point.load:g}{scaled}"
