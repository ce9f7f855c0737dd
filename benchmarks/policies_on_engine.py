"""The policies on the real engine: published workloads, scaled to two CPU ranks, under each of them.

Profiles a tiny model, makes traces of each workload from its times, one per seed, and replays them over HTTP with
a server per policy. The upper bound on attainment of each trace stands beside. Run with
``python -m benchmarks.policies_on_engine``.
"""

import argparse
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.quiet import Quiet
from benchmarks.sim_vs_engine import (
    DEMO,
    MODEL,
    NUM_RANKS,
    VLLM_FLAGS,
    one_of_each,
    play,
    profile_server,
    profile_trace,
)
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.replay import Outcome
from gfdit.cli.server_process import ServerError, free_port, start_server
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.loading import DEFAULT_POLICY, load_policy
from gfdit.sim.bounds.fluid import attainment_bound
from gfdit.sim.estimates import Estimate, estimate
from gfdit.sim.sweep import BOUND
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS, generate, workload_classes

POLICIES = (DEFAULT_POLICY, "edf", "srtf", "tetriserve", "rssp", "fcfs", "static", "equipartition")
WORKLOADS = ("poisson", "foreground-burst", "five-phase")
SIDES = (64, 128, 192)  # small, medium and large images of the tiny model


def main() -> int:
    args = parse_args()
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    demo = runpy.run_path(str(DEMO), run_name="demo")
    quiet = Quiet(args.max_others, time.monotonic() + args.patience_s)
    shapes = [TraceRequest(f"s{side}", 0.0, MODEL, side, side, 1, args.steps) for side in SIDES]
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            model = demo["build_model"](folder)
            with profile_server(model, folder) as server:
                profile_trace(server, shapes, folder / "costs.json")
            table = CostTable.load(folder / "costs.json")
            traces = {
                workload: [make_trace(table, workload, seed, args) for seed in range(args.seeds)]
                for workload in args.workloads
            }
            runs = {name: replay_all(name, model, traces, folder, args, quiet) for name in args.policies}
        except (ServerError, subprocess.CalledProcessError) as error:
            print(f"policies_on_engine: {error}", file=sys.stderr)
            return 1
    report = source | {
        "settings": {
            "load": args.load,
            "seeds": args.seeds,
            "requests": args.requests,
            "steps": args.steps,
            "slo_scale": args.slo_scale,
            "profile": table.source,
        },
        "workloads": {
            workload: {
                "policies": {name: summary(by_workload[workload]) for name, by_workload in runs.items()},
                BOUND: [attainment_bound(trace, table, num_ranks=NUM_RANKS).attainment for trace in seeds],
            }
            for workload, seeds in traces.items()
        },
    }
    for path in write_report(args.out, "policies_on_engine", report, markdown(report)):
        print(path)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="default: all")
    scalable = sorted(name for name, workload in PATTERNS.items() if not workload.sides)
    parser.add_argument("--workloads", nargs="+", choices=scalable, default=list(WORKLOADS))
    parser.add_argument("--load", type=float, default=1.1)
    parser.add_argument("--seeds", type=int, default=3, help="traces")
    parser.add_argument("--requests", type=int, default=40, help="of a trace")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps of a request")
    parser.add_argument("--slo-scale", type=float, default=1.5, help="deadlines: HTTP takes its time, too")
    parser.add_argument("--max-others", type=float, default=0.1, help="share of the machine others may take")
    parser.add_argument("--patience-s", type=float, default=0.0, help="how long to wait and repeat for that")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--logs", type=Path, help="keep the cost table and the servers' logs there")
    args = parser.parse_args()
    for name in args.policies:
        load_policy(name, {})
    return args


def make_trace(table: CostTable, name: str, seed: int, args: argparse.Namespace) -> list[TraceRequest]:
    workload = PATTERNS[name]
    classes = workload_classes(workload, TableCostModel(table), num_steps=args.steps, slo_scale=args.slo_scale)
    return generate(workload, classes, num_ranks=NUM_RANKS, seed=seed, load=args.load, num_requests=args.requests)


def replay_all(
    policy: str,
    model: Path,
    traces: dict[str, list[list[TraceRequest]]],
    folder: Path,
    args: argparse.Namespace,
    quiet: Quiet,
) -> dict[str, list[list[Outcome]]]:
    """Every trace on one server, which is warmed up before; by workload and seed."""
    command = ["gfdit", "serve", str(model), "--ranks", str(NUM_RANKS), "--model-name", MODEL, "--policy", policy]
    command += ["--costs", str(folder / "costs.json"), "--", *VLLM_FLAGS]
    with start_server(command, free_port(), folder / f"{policy}.log") as server:
        first = next(iter(traces.values()))[0]
        play(server, policy, [replace(request, num_steps=2) for request in one_of_each(first)])
        return {
            workload: [quiet.run(partial(play, server, f"{policy}, {workload}", trace))[0] for trace in seeds]
            for workload, seeds in traces.items()
        }


def summary(runs: list[list[Outcome]]) -> dict[str, Any]:
    """By seed."""
    return {
        "slo_attainment": [statistics.fmean(outcome.met_deadline() for outcome in run) for run in runs],
        "mean_latency_s": [statistics.fmean(outcome.latency_s for outcome in run) for run in runs],
        "max_latency_s": [max(outcome.latency_s for outcome in run) for run in runs],
    }


def markdown(report: dict[str, Any]) -> str:
    settings = report["settings"]
    lines = [
        "# The policies on the real engine",
        "",
        *source_lines(report),
        f"- Load {settings['load']:g} on {NUM_RANKS} ranks; {settings['seeds']} traces of {settings['requests']} "
        f"requests with {settings['steps']} steps, deadlines {settings['slo_scale']:g} x the usual; "
        "± is a 95 % confidence interval",
    ]
    for workload, numbers in report["workloads"].items():
        lines += [
            "",
            f"## {workload}",
            "",
            "| policy | in time, % | mean latency, s | longest, s |",
            "|---|---|---|---|",
        ]
        for name, by_seed in numbers["policies"].items():
            met, mean_s, longest_s = (estimate(values) for values in by_seed.values())
            lines.append(f"| {name} | {cell(met, 100)} | {cell(mean_s)} | {cell(longest_s)} |")
        lines.append(f"| {BOUND} | {cell(estimate(numbers[BOUND]), 100)} | | |")
    return "\n".join(lines) + "\n"


def cell(value: Estimate, scale: float = 1.0) -> str:
    return f"{scale * value.mean:.2f}" + ("" if value.ci95 is None else f" ± {scale * value.ci95:.2f}")


if __name__ == "__main__":
    sys.exit(main())
