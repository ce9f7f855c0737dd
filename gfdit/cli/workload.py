"""`gfdit workload NAME`: a trace of one of the known arrival patterns, at a load or a rate."""

import argparse
import math
from collections import Counter
from pathlib import Path

from gfdit.core.cost.table import TableCostModel
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.costs.flux_edits import NUM_STEPS, flux_edits
from gfdit.sim.edit_workloads import EDITS, EditTimes, generate_edits
from gfdit.sim.trace import write_trace
from gfdit.sim.workflow_mixes import DEFAULT_SLO_SCALE, MIXES, mix_of
from gfdit.sim.workloads import PATTERNS, generate, offered_load, workload_classes


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        choices=(*PATTERNS, *EDITS, *MIXES),
        help=f"one of: {', '.join(PATTERNS)}; of edits: {', '.join(EDITS)}; of workflows: {', '.join(MIXES)}",
    )
    parser.add_argument(
        "--costs", metavar="C.json", help="cost table: a file or a shipped name; workflows need none"
    )
    parser.add_argument("--ranks", type=int, metavar="N", required=True, help="ranks the load is relative to")
    parser.add_argument(
        "--load",
        type=float,
        help="work offered / capacity, counted on one rank per request; tetriserve-* need none",
    )
    parser.add_argument("--per-min", type=float, metavar="R", help="mean arrivals a minute, instead of a load")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same trace")
    parser.add_argument("--out", metavar="T.jsonl", type=Path, required=True, help="write the trace there")
    parser.add_argument("--model", help="which model of the cost table, where it has several")
    parser.add_argument("--steps", type=int, help="denoising steps of every request; tetriserve-*: 20, others: 50")
    parser.add_argument(
        "--cv",
        type=float,
        help="burstiness: coefficient of variation of the gaps; 1 is Poisson; gamma: 2, others: 1",
    )
    parser.add_argument("--duration-s", type=float, metavar="T", help="so long; the pattern repeats")
    parser.add_argument("--num-requests", type=int, metavar="N", help="so many; the pattern repeats")
    parser.add_argument(
        "--deadline-factors",
        type=float,
        nargs=3,
        metavar=("S", "M", "L"),
        help="deadlines as multiples of the time alone on one rank",
    )
    parser.add_argument("--slo-scale", type=float, default=1.0, help="all deadlines times this")


def run(args: argparse.Namespace) -> int:
    if args.name in MIXES:
        return _workflows(args)
    if args.costs is None:
        raise ValueError(f"{args.name} needs --costs")
    cost = TableCostModel(load_cost_table(args.costs))
    if args.name in EDITS:
        return _edits(args, cost)
    workload = PATTERNS[args.name]
    if args.load is None and args.per_min is None and not workload.has_rate:
        raise ValueError(f"{args.name} needs --load or --per-min")
    classes = workload_classes(
        workload,
        cost,
        model=args.model,
        num_steps=args.steps,
        deadline_factors=args.deadline_factors,
        slo_scale=args.slo_scale,
    )
    trace = generate(
        workload,
        classes,
        num_ranks=args.ranks,
        seed=args.seed,
        load=args.load,
        per_min=args.per_min,
        cv=args.cv,
        duration_s=args.duration_s,
        num_requests=args.num_requests,
    )
    write_trace(args.out, trace)
    counts = Counter(request.slo_class for request in trace)
    sizes = ", ".join(f"{counts[kind.name]} {kind.name} ({kind.shape})" for kind in classes)
    over_s = args.duration_s or (trace[-1].arrival_s if args.num_requests else workload.duration_s)
    load = offered_load(trace, classes, num_ranks=args.ranks, over_s=over_s)
    print(f"{args.out}: {len(trace)} requests in {over_s:.0f} s, load {load:.2f}: {sizes}")
    return 0


def _edits(args: argparse.Namespace, cost: TableCostModel) -> int:
    for name in ("model", "deadline_factors"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not for edits, which have theirs")
    workload, times = EDITS[args.name], EditTimes(cost, flux_edits(), args.steps or NUM_STEPS)
    trace = generate_edits(
        workload,
        times,
        num_ranks=args.ranks,
        seed=args.seed,
        load=args.load,
        per_min=args.per_min,
        cv=1.0 if args.cv is None else args.cv,
        duration_s=args.duration_s,
        num_requests=args.num_requests,
        slo_scale=args.slo_scale,
    )
    write_trace(args.out, trace)
    ratios = [request.mask_ratio or 0.0 for request in trace]
    templates = {request.template for request in trace}
    over_s = args.duration_s or trace[-1].arrival_s
    load = sum(map(times.alone_s, ratios)) / (args.ranks * over_s)
    print(
        f"{args.out}: {len(trace)} edits in {over_s:.0f} s, load {load:.2f}: of {len(templates)} templates, "
        f"mean mask ratio {sum(ratios) / len(ratios):.2f}"
    )
    return 0


def _workflows(args: argparse.Namespace) -> int:
    """Requests whose ``model`` is a workflow, and whose deadline is twice its time alone on one rank."""
    for name in ("costs", "model", "steps", "deadline_factors"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not for workflows, which have theirs")
    if args.num_requests is None and args.duration_s is None:
        raise ValueError(f"{args.name} needs --num-requests or --duration-s")
    trace = mix_of(args.name).trace(
        args.num_requests,
        load=args.load,
        per_min=args.per_min,
        num_ranks=args.ranks,
        cv=1.0 if args.cv is None else args.cv,
        slo_scale=DEFAULT_SLO_SCALE * args.slo_scale,
        seed=args.seed,
        until_s=math.inf if args.duration_s is None else args.duration_s,
    )
    write_trace(args.out, trace)
    counts = Counter(request.model for request in trace)
    most = ", ".join(f"{count} {name}" for name, count in counts.most_common(6))
    print(f"{args.out}: {len(trace)} requests in {trace[-1].arrival_s:.0f} s, of {len(counts)} workflows: {most}")
    return 0
