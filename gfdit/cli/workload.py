"""`gfdit workload NAME`: a trace of one of the known arrival patterns, at a load relative to capacity."""

import argparse
from collections import Counter
from pathlib import Path

from gfdit.core.cost_table import TableCostModel
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.trace import write_trace
from gfdit.sim.workloads import DEFAULT_STEPS, PATTERNS, generate, offered_load, request_classes, window_s


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", choices=PATTERNS, help=f"one of: {', '.join(PATTERNS)}")
    parser.add_argument("--costs", metavar="C.json", required=True, help="cost table: a file or a shipped name")
    parser.add_argument("--ranks", type=int, metavar="N", required=True, help="ranks the load is relative to")
    parser.add_argument(
        "--load", type=float, required=True, help="work offered / capacity, counted on one rank per request"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same trace")
    parser.add_argument("--out", metavar="T.jsonl", type=Path, required=True, help="write the trace there")
    parser.add_argument("--model", help="which model of the cost table, where it has several")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="denoising steps of every request")
    parser.add_argument(
        "--deadline-factors",
        type=float,
        nargs=3,
        metavar=("S", "M", "L"),
        help="deadlines as multiples of the time alone on one rank",
    )


def run(args: argparse.Namespace) -> int:
    cost = TableCostModel(load_cost_table(args.costs))
    classes = request_classes(cost, model=args.model, num_steps=args.steps, deadline_factors=args.deadline_factors)
    phases = PATTERNS[args.name]
    trace = generate(phases, classes, num_ranks=args.ranks, load=args.load, seed=args.seed)
    write_trace(args.out, trace)
    counts = Counter(request.slo_class for request in trace)
    load = offered_load(trace, classes, num_ranks=args.ranks, over_s=window_s(phases))
    sizes = ", ".join(f"{counts[kind.name]} {kind.name} ({kind.shape})" for kind in classes)
    print(f"{args.out}: {len(trace)} requests in {window_s(phases):.0f} s, load {load:.2f}: {sizes}")
    return 0
