"""`gfdit workload NAME`: a trace of one of the known arrival patterns, at a load or a rate."""

import argparse
import math
from collections import Counter
from pathlib import Path

from gfdit.cli import workload_import
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.edit_workloads import EDITS, EditTimes, generate_edits
from gfdit.sim.flux_edits import NUM_STEPS, flux_edits
from gfdit.sim.shares import Shares
from gfdit.sim.trace import write_trace
from gfdit.sim.workflow_mixes import DEFAULT_SLO_SCALE, MIXES, mix_of
from gfdit.sim.workloads import PATTERNS, generate, offered_load, workload_classes


def configure(parser: argparse.ArgumentParser) -> None:
    """One sub-command per pattern, so that each has its own options and no others."""
    names = parser.add_subparsers(
        dest="name",
        metavar="NAME",
        required=True,
        help=f"one of: {', '.join(PATTERNS)}; of edits: {', '.join(EDITS)}; of workflows: {', '.join(MIXES)}; "
        "import: from a log; from-recording: what a server recorded",
    )
    for name in (*PATTERNS, *EDITS, *MIXES):
        _configure_pattern(names.add_parser(name, allow_abbrev=False))
    about = "requests as a log of a production service has them"
    recording = names.add_parser(
        "from-recording", description="what a server with --record was asked for", allow_abbrev=False
    )
    workload_import.configure_recording(recording)
    workload_import.configure(names.add_parser("import", description=about, allow_abbrev=False))


def _configure_pattern(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--costs", nargs="+", metavar="C.json", help="cost tables: files or shipped names; workflows need none"
    )
    parser.add_argument("--ranks", type=int, metavar="N", required=True, help="ranks the load is relative to")
    parser.add_argument(
        "--load",
        type=float,
        help="work offered / capacity, counted on one rank per request; tetriserve-*, production-images need none",
    )
    parser.add_argument("--per-min", type=float, metavar="R", help="mean arrivals a minute, instead of a load")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same trace")
    parser.add_argument("--out", metavar="T.jsonl", type=Path, required=True, help="write the trace there")
    parser.add_argument(
        "--models",
        "--model",
        metavar="M:SHARE,…",
        help="which model of the cost tables, where they have several, or which share of requests is of which",
    )
    parser.add_argument("--steps", type=int, help="denoising steps of every request, not the workload's")
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
    if args.name == "import":
        return workload_import.run(args)
    if args.name == "from-recording":
        return workload_import.from_recording(args)
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
    models = None if args.models is None else Shares.parse(args.models, str, "--models")
    classes = workload_classes(
        workload,
        cost,
        models=models,
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
    shapes = {kind.name: kind.shape for kind in classes}
    sizes = ", ".join(f"{counts[name]} {name} ({shape})" for name, shape in shapes.items())
    counted = args.num_requests or workload.sessions is not None
    over_s = trace[-1].arrival_s if counted else args.duration_s or workload.duration_s
    load = offered_load(trace, classes, num_ranks=args.ranks, over_s=over_s)
    print(f"{args.out}: {len(trace)} requests in {over_s:.0f} s, load {load:.2f}: {sizes}")
    return 0


def _edits(args: argparse.Namespace, cost: TableCostModel) -> int:
    for name in ("models", "deadline_factors"):
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
    for name in ("costs", "models", "steps", "deadline_factors"):
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
