"""Routers in front of 2 to 64 servers, simulated: what it gains to know the work that is left, and the deadlines.

Every server has a control plane and a policy of its own (:mod:`gfdit.sim.fleet`); arrivals are those of a service
of images. ``pool`` is no router but all ranks under one policy, in layouts no wider than a server's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.compare import Job, PolicyChoice, in_processes, simulate
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.estimates import Estimate, estimate
from gfdit.sim.fleet import FleetOptions
from gfdit.sim.options import SimulationOptions
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS, generate, workload_classes

WORKLOAD = "production-images"
COSTS = "qwen-image-h20"  # no layout is wider than four ranks
ROUTERS = ("round-robin", "least-connections", "least-backlog", "deadline-aware")
POOL = "pool"
BASELINE = "least-connections"
METRICS = ("slo_attainment", "mean_latency_s", "p99_latency_s")


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation."""

    num_servers: int
    router: str
    seed: int
    num_ranks: int  # of each server
    load: float
    slo_scale: float
    num_requests: int
    policy: str
    interval_s: float
    num_short: int  # servers that have lost half of their ranks

    @property
    def total_ranks(self) -> int:
        return self.num_servers * self.num_ranks - self.num_short * (self.num_ranks // 2)

    def trace(self) -> list[TraceRequest]:
        pattern = PATTERNS[WORKLOAD]
        classes = workload_classes(pattern, TableCostModel(load_cost_table(COSTS)), slo_scale=self.slo_scale)
        return generate(
            pattern,
            classes,
            num_ranks=self.total_ranks,
            seed=self.seed,
            load=self.load,
            num_requests=self.num_requests,
        )


def run(case: Case) -> dict[str, Any]:
    started_s = time.monotonic()
    pooled = case.router == POOL
    job = Job(
        PolicyChoice(case.policy),
        tuple(case.trace()),
        load_cost_table(COSTS),
        SimulationOptions(case.total_ranks if pooled else case.num_ranks),
        others=(SimulationOptions(case.num_ranks - case.num_ranks // 2),) * (0 if pooled else case.num_short),
        fleet=None if pooled else FleetOptions(case.num_servers, case.router, case.interval_s),
    )
    outcome = simulate(job)
    assert not outcome.complaint, outcome.complaint
    numbers = {name: round(outcome.result[name], 4) for name in METRICS}
    found = {"servers": case.num_servers, "router": case.router, "seed": case.seed, **numbers}
    print(found, f"{time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", default="2,4,8,16,32,64")
    parser.add_argument("--ranks", type=int, default=4, help="of each server (default 4)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--slo-scale", type=float, default=0.7)
    parser.add_argument("--requests-per-server", type=int, default=100)
    parser.add_argument("--short", type=float, default=0.0, help="share of servers without half of their ranks")
    parser.add_argument("--policy", default="triage")
    parser.add_argument("--interval-s", type=float, default=1.0, help="how old loads get (default 1)")
    parser.add_argument("--pool-up-to", type=int, default=8, help="servers (default 8): it takes long")
    parser.add_argument("--router", action="append", choices=(*ROUTERS, POOL), help="repeat; default: all")
    parser.add_argument("--keep", type=Path, metavar="JSON", help="takes the cases of other routers from it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    report["options"] = vars(args) | {"out": str(args.out), "keep": args.keep and str(args.keep)}
    report["cases"] = []
    if args.keep is not None:
        kept = json.loads(args.keep.read_text())
        report["kept"] = {name: kept[name] for name in ("date", "commit", "command")}
        report["cases"] = [case for case in kept["cases"] if case["router"] not in (args.router or ())]
    for number in map(int, args.servers.split(",")):
        routers = args.router or (*ROUTERS, *([POOL] if number <= args.pool_up_to else []))
        cases = [
            Case(
                number,
                router,
                seed,
                args.ranks,
                args.load,
                args.slo_scale,
                args.requests_per_server * number,
                args.policy,
                args.interval_s,
                round(number * args.short),
            )
            for seed in range(1, args.seeds + 1)
            for router in routers
        ]
        report["cases"] += in_processes(run, cases, num_processes=args.jobs)
        name = "routing_short" if args.short else "routing"
        paths = write_report(args.out, name, report, markdown(report))  # as far as it has got
    print(*paths, sep="\n")
    return 0


def markdown(report: dict[str, Any]) -> str:
    options, cases = report["options"], report["cases"]
    lines = [
        "# Routers in front of several servers, simulated",
        "",
        *source_lines(report),
        f"- `{WORKLOAD}` with the costs `{COSTS}`, {options['ranks']} ranks a server, load {options['load']:g}, "
        f"deadlines times {options['slo_scale']:g}, {options['requests_per_server']} requests a server,",
        f"  {options['seeds']} seeds, policy `{options['policy']}`; loads get {options['interval_s']:g} s old.",
        f"- Gain: attainment less that of `{BASELINE}`, by seed; means with 95 % confidence intervals.",
        f"- `{POOL}`: all ranks under one policy, no router.",
        *(
            [
                f"- Other routers than {', '.join(options['router'])}: {kept['date']}, commit {kept['commit']}, "
                f"`{kept['command']}`"
            ]
            if (kept := report.get("kept"))
            else []
        ),
        *([f"- {options['short']:.0%} of the servers have lost half of their ranks."] if options["short"] else []),
        "",
        "| servers | router | attainment, % | gain, points | mean latency, s | p99 latency, s |",
        "|---|---|---|---|---|---|",
    ]
    for number in sorted({case["servers"] for case in cases}):
        here = [case for case in cases if case["servers"] == number]
        base = _by_seed(here, BASELINE)
        for router in (*ROUTERS, POOL):
            if not (found := _by_seed(here, router)):
                continue
            gains = [
                found[seed]["slo_attainment"] - base[seed]["slo_attainment"] for seed in found if seed in base
            ]
            lines.append(
                f"| {number} | {router} | {_of(found.values(), 'slo_attainment').shown(100)} | "
                f"{'' if router == BASELINE or not gains else estimate(gains).shown(100)} | "
                f"{statistics.fmean(one['mean_latency_s'] for one in found.values()):.1f} | "
                f"{statistics.fmean(one['p99_latency_s'] for one in found.values()):.0f} |"
            )
    return "\n".join([*lines, ""])


def _by_seed(cases: Sequence[dict[str, Any]], router: str) -> dict[int, dict[str, Any]]:
    return {case["seed"]: case for case in cases if case["router"] == router}


def _of(found: Any, name: str) -> Estimate:
    return estimate([one[name] for one in found], least=0.0, most=1.0)


if __name__ == "__main__":
    sys.exit(main())
