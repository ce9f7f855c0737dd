"""`gfdit sim`: run a trace through a policy, or several to compare, under a virtual clock."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gfdit.cli.policy_options import add_policy_options, chosen_policies
from gfdit.core.cost.nodes import Nodes
from gfdit.observe.timeline import Span, read_timeline
from gfdit.sim.bounds.fluid import check_bounded
from gfdit.sim.bounds.possible import KNOWN, ROLLING, UPPER, possible
from gfdit.sim.compare import Job, Outcome, in_processes, simulate, simulate_spans
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.costs.flux_edits import flux_edits
from gfdit.sim.costs.workflow_costs import GIB
from gfdit.sim.device_memory import DeviceMemory
from gfdit.sim.edit_workloads import template_names
from gfdit.sim.fleet import ROUTERS, FleetOptions
from gfdit.sim.options import SimulationOptions
from gfdit.sim.rank_faults import RankFailure, SlowRank
from gfdit.sim.results import as_table, describe, write_requests_csv
from gfdit.sim.trace import far_outside, read_trace
from gfdit.sim.workflow_mixes import MIXES
from gfdit.sim.workflow_source import WorkflowSource

# Of --bound: the key in the result file, what it is, and how it is told.
_SIDES = (
    ("upper_bound", UPPER, "no schedule exceeds"),
    ("best_known", KNOWN, "one that knows the future meets"),
    ("rolling", ROLLING, "one planned anew at each arrival meets"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="T.jsonl", type=Path, required=True, help="requests and their arrivals")
    parser.add_argument(
        "--workflows",
        metavar="MIX|FILE.py",
        help=f"which requests ask for: {', '.join(MIXES)}, or those of a file",
    )
    parser.add_argument(
        "--rank-gib", type=float, metavar="GIB", help="of a rank, for components of workflows; default: all fit"
    )
    add_simulation_options(parser, costs_required=False)
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="so many servers of --ranks each, and a router (docs/fleet.md)",
    )
    parser.add_argument("--router", choices=ROUTERS, help="of --replicas (default: least-connections)")
    parser.add_argument(
        "--router-interval-s",
        type=float,
        metavar="S",
        help="how often it asks for their load (default: 1)",
    )
    parser.add_argument("--json", metavar="OUT", type=Path, help="write the result there, by policy if several")
    parser.add_argument("--csv", metavar="OUT.csv", type=Path, help="write a row per policy and request there")
    parser.add_argument("--timeline", metavar="FILE", type=Path, help="write what ran where, for Perfetto")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        type=Path,
        help="draw what ran where, with several policies the latencies too",
    )


def add_simulation_options(
    parser: argparse.ArgumentParser, *, costs_required: bool = True, several_ranks: bool = False
) -> None:
    """What a single trace and a sweep have in common."""
    parser.add_argument(
        "--costs", nargs="+", metavar="C.json", required=costs_required, help="cost tables: files or shipped names"
    )
    if several_ranks:
        parser.add_argument("--ranks", metavar="N,N,…", required=True, help="devices, one full replica on each")
    else:
        parser.add_argument(
            "--ranks", type=int, metavar="N", required=True, help="devices, one full replica on each"
        )
    add_policy_options(parser)
    parser.add_argument("--grace-s", type=float, default=0.0, help="how late still counts as nearly in time")
    parser.add_argument(
        "--bound",
        action="store_true",
        help="also what no schedule can exceed, and what those meet that know the future or plan at each arrival",
    )
    parser.add_argument("--jitter", type=float, default=0.0, help="relative spread of task times, e.g. 0.01")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument(
        "--dispatch-latency-s", type=float, default=0.0, help="from a decision to its task's start"
    )
    parser.add_argument(
        "--run-ahead",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: the next step is queued behind the running one",
    )
    parser.add_argument(
        "--fail-rank", action="append", default=[], metavar="RANK@TIME_S[+DOWN_S]", help="lose a rank; repeat"
    )
    parser.add_argument(
        "--slow-rank",
        action="append",
        default=[],
        metavar="RANK@FACTOR[:FROM_S-TO_S]",
        help="slow one down; repeat",
    )
    parser.add_argument(
        "--memory",
        metavar="GIB,WEIGHTS_GIB,MIB_PER_TOKEN",
        help="of every rank; of it the model takes; and a step, for each nominal token of a rank",
    )
    parser.add_argument(
        "--template-gib",
        type=float,
        metavar="GIB",
        help="of the host, for templates of edits, all of them recorded: steps take what masks leave (FLUX)",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="nodes of so many ranks (default: all on one)"
    )
    parser.add_argument(
        "--link-gbps",
        metavar="[WITHIN,]BETWEEN",
        help="gigabits a second of one rank's links within a node (default: the cost table's) and between nodes "
        "(default: 320)",
    )
    add_steps_per_task(parser)
    parser.add_argument("--check", action="store_true", help="check all bookkeeping after every event (slow)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes to simulate in (default: one per core)")


def add_steps_per_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps-per-task",
        type=int,
        metavar="N",
        default=1,
        help="decide after every N steps only: faster in proportion, less exact (default: 1)",
    )


def simulation_options(args: argparse.Namespace, num_ranks: int) -> SimulationOptions:
    if not args.grace_s >= 0:
        raise ValueError(f"--grace-s must be a non-negative number, got {args.grace_s}")
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    if args.template_gib is not None and not args.template_gib >= 0:
        raise ValueError(f"--template-gib must be a non-negative number, got {args.template_gib}")
    options = SimulationOptions(
        num_ranks,
        dispatch_latency_s=args.dispatch_latency_s,
        jitter=args.jitter,
        seed=args.seed,
        check_every_event=args.check,
        run_ahead=args.run_ahead,
        failures=tuple(map(RankFailure.parse, args.fail_rank)),
        slow_ranks=tuple(map(SlowRank.parse, args.slow_rank)),
        memory=None if args.memory is None else DeviceMemory.parse(args.memory),
        edits=None if args.template_gib is None else flux_edits(args.template_gib * GIB, template_names()),
        nodes=_nodes(args),
        steps_per_task=args.steps_per_task,
    )
    if args.bound:
        check_bounded(options)
    return options


def _nodes(args: argparse.Namespace) -> Nodes | None:
    if args.ranks_per_node is None:
        if args.link_gbps is not None:
            raise ValueError("--link-gbps is of nodes: --ranks-per-node says how large they are")
        return None
    return Nodes.of_links(args.ranks_per_node, args.link_gbps)


def num_processes(args: argparse.Namespace) -> int:
    return args.jobs or len(os.sched_getaffinity(0))


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, a count if ``total`` is unknown; nothing where nobody looks, or for a single step."""
    if total == 1:
        yield lambda: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, desc=title, unit="run", disable=None) as bar:
        yield bar.update


def run(args: argparse.Namespace) -> int:
    """The results are written in any case; policies that made mistakes are then reported as an error."""
    options = simulation_options(args, args.ranks)
    policies = chosen_policies(args)
    if args.timeline is not None and len(policies) > 1:
        raise ValueError("--timeline is of a single --policy; --plot draws several")
    workflows, options = _workflows(args, options)
    table = None if workflows is None else workflows.costs
    if args.costs is not None:
        table = load_cost_table(args.costs)
    if table is None:
        raise ValueError("--costs is needed; only a mix of --workflows has costs of its own")
    trace = tuple(read_trace(args.trace))
    if not trace:
        raise ValueError(f"{args.trace}: the trace has no requests")
    if workflows is None and (doubt := far_outside(trace, table)):
        print(f"gfdit sim: warning: {doubt}", file=sys.stderr)
    fleet = _fleet(args)
    jobs = [Job(policy, trace, table, options, args.grace_s, workflows, fleet) for policy in policies]
    runs = dict(zip((policy.label for policy in policies), _simulate(jobs, args), strict=True))
    results = {name: outcome.result for name, (outcome, _) in runs.items()}
    if args.bound:
        with progress("what is possible", len(_SIDES)) as step:
            for key, side, _ in _SIDES:
                found = possible(side, trace, table, num_ranks=options.num_ranks, grace_s=args.grace_s)
                for result in results.values():
                    result[key] = found
                step()
    _report(results, args)
    if args.plot is not None:
        from gfdit.sim.plots import plot_runs

        spans = {name: found for name, (_, found) in runs.items()}
        plot_runs(trace, results, spans, args.plot, num_ranks=options.num_ranks)
    if complaints := [outcome.complaint for outcome, _ in runs.values() if outcome.complaint]:
        raise ValueError("; ".join(complaints))
    return 0


def _workflows(
    args: argparse.Namespace, options: SimulationOptions
) -> tuple[WorkflowSource | None, SimulationOptions]:
    if args.workflows is None:
        if args.rank_gib is not None:
            raise ValueError("--rank-gib is for components of --workflows; for anything else there is --memory")
        return None, options
    if args.bound:
        raise ValueError("--bound knows no workflows")
    if args.rank_gib is not None and not args.rank_gib > 0:
        raise ValueError(f"--rank-gib must be a positive number, got {args.rank_gib}")
    source = WorkflowSource(args.workflows)
    num_bytes = None if args.rank_gib is None else int(args.rank_gib * GIB)
    return source, replace(options, components=source.components, component_bytes=num_bytes)


def _fleet(args: argparse.Namespace) -> FleetOptions | None:
    """Raises ``ValueError`` for what is not simulated of several servers."""
    if args.replicas is None:
        if args.router is not None or args.router_interval_s is not None:
            raise ValueError("--router and --router-interval-s are of several servers: --replicas says how many")
        return None
    for option, given in (
        ("--workflows", args.workflows),
        ("--bound", args.bound),
        ("--timeline", args.timeline),
        ("--plot", args.plot),
    ):
        if given:
            raise ValueError(f"{option} is of one server: leave out --replicas")
    chosen = FleetOptions(args.replicas)
    if args.router is not None:
        chosen = replace(chosen, router=args.router)
    if args.router_interval_s is not None:
        chosen = replace(chosen, interval_s=args.router_interval_s)
    return chosen


def _simulate(jobs: Sequence[Job], args: argparse.Namespace) -> list[tuple[Outcome, list[Span]]]:
    """Outcomes, with what ran where if it is to be drawn."""
    if args.timeline is not None:
        outcome = simulate(jobs[0], args.timeline)
        return [(outcome, read_timeline(args.timeline) if args.plot is not None else [])]
    with progress("simulate", len(jobs)) as step:
        if args.plot is not None:
            return in_processes(simulate_spans, jobs, num_processes=num_processes(args), on_done=step)
        outcomes = in_processes(simulate, jobs, num_processes=num_processes(args), on_done=step)
        return [(outcome, []) for outcome in outcomes]


def _report(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    (first, *others) = results.values()
    print(as_table("policy", results) if others else describe(first))
    for key, _, says in _SIDES:
        if found := first.get(key):
            in_time, with_grace = found["slo_attainment"], found["slo_attainment_grace"]
            print(f"{says} {in_time:.1%} in time, {with_grace:.1%} with grace")
    if args.csv is not None:
        write_requests_csv(args.csv, results)
    if args.json is not None:
        write_json(args.json, {"version": 1, "results": results} if others else first)


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
