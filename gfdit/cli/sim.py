"""`gfdit sim`: run a trace through a policy under a virtual clock."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from gfdit.cli.serve import parse_policy_args
from gfdit.core.policy_loading import load_policy
from gfdit.observe.timeline import TimelineWriter
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.results import describe, summarize
from gfdit.sim.simulator import SimulatedRequest, SimulationOptions, SimulationRun, Simulator, Status
from gfdit.sim.trace import read_trace

NAMED = 5  # requests named in an error; more are counted


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="T.jsonl", type=Path, required=True, help="requests and their arrivals")
    parser.add_argument("--costs", metavar="C.json", required=True, help="cost table: a file or a shipped name")
    parser.add_argument("--ranks", type=int, metavar="N", required=True, help="devices, one full replica on each")
    parser.add_argument(
        "--policy", required=True, help="a name (see `gfdit policies`), module:Class or file.py:Class"
    )
    parser.add_argument(
        "--policy-arg", action="append", default=[], metavar="KEY=VALUE", help="an argument of the policy; repeat"
    )
    parser.add_argument("--grace-s", type=float, default=0.0, help="how late still counts as nearly in time")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write the result there")
    parser.add_argument("--timeline", metavar="FILE", type=Path, help="write what ran where, for Perfetto")
    parser.add_argument("--jitter", type=float, default=0.0, help="relative spread of task times, e.g. 0.01")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument(
        "--dispatch-latency-s", type=float, default=0.0, help="from a decision to its task's start"
    )
    parser.add_argument("--check", action="store_true", help="check all bookkeeping after every event (slow)")


def run(args: argparse.Namespace) -> int:
    """The result is written in any case; a policy that made mistakes is then reported as an error."""
    if not args.grace_s >= 0:
        raise ValueError(f"--grace-s must be a non-negative number, got {args.grace_s}")
    options = SimulationOptions(args.ranks, args.dispatch_latency_s, args.jitter, args.seed, args.check)
    policy = load_policy(args.policy, parse_policy_args(args.policy_arg))
    table = load_cost_table(args.costs)
    trace = read_trace(args.trace)
    if not trace:
        raise ValueError(f"{args.trace}: the trace has no requests")
    simulator = Simulator(policy, table, trace, options)
    if args.timeline is None:
        done = simulator.run()
    else:
        with TimelineWriter(args.timeline, args.ranks, base_s=0.0) as timeline:
            done = simulator.run(timeline)
    result = summarize(done, grace_s=args.grace_s)
    print(describe(result), flush=True)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if complaint := _complaint(done):
        raise ValueError(complaint)
    return 0


def _complaint(done: SimulationRun) -> str:
    """What went wrong, in one line; empty if nothing did."""
    starved = [request for request in done.requests if request.status is Status.STARVED]
    failed = [request for request in done.requests if request.status is Status.FAILED]
    parts = []
    if starved:
        parts.append(f"starvation: policy {done.policy!r} never finished {_names(starved, done)}")
    if failed:
        parts.append(f"failed: {_names(failed, done)}: {failed[0].detail}")
    elif done.faults:
        parts.append(f"faults of the policy: {len(done.faults)}, the first: {done.faults[0]}")
    return "; ".join(parts)


def _names(requests: Sequence[SimulatedRequest], done: SimulationRun) -> str:
    names = [request.trace.id for request in requests[:NAMED]]
    if len(requests) > NAMED:
        names.append(f"{len(requests) - NAMED} more")
    return f"{len(requests)} of {len(done.requests)} requests ({', '.join(names)})"
