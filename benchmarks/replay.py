"""The whole of a production log, replayed by every policy: how long that takes, and what it would have met.

    python -m benchmarks.replay lora_request_trace.csv --out benchmarks/results
    python -m benchmarks.replay lora_request_trace.csv --steps-per-task 5 --exact replay_2026-11-26.json

The log is GenTD26's, which is not part of this repository, with the sizes and deadlines of
:mod:`benchmarks.production_windows`. One process, one policy after the other. The second is the coarse simulation,
beside the first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.production_windows import POLICIES, Window
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.sim.compare import PolicyChoice
from gfdit.sim.control_speed import additions_per_s
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.results import summarize
from gfdit.sim.simulator import Simulator
from gfdit.sim.trace import TraceRequest, read_trace

TARGET_S = 120.0
WHOLE = Window("qwen-image-h20", 8, 0.8, "0:")


def replay(choice: PolicyChoice, trace: Sequence[TraceRequest], steps_per_task: int) -> dict[str, Any]:
    options = SimulationOptions(WHOLE.num_ranks, steps_per_task=steps_per_task)
    simulator = Simulator(choice.load(), load_cost_table(WHOLE.costs), trace, options)
    started_s = time.perf_counter()
    run = simulator.run()
    elapsed_s = time.perf_counter() - started_s
    assert not run.faults, run.faults[0]
    kept = ("slo_attainment", "mean_latency_s", "p99_latency_s")
    numbers = {key: summarize(run)[key] for key in kept}
    return numbers | {"num_tasks": run.num_tasks, "elapsed_s": elapsed_s, "additions_per_s": additions_per_s()}


SHOWN = (("slo_attainment", 100, ".1f"), ("mean_latency_s", 1, ".1f"), ("p99_latency_s", 1, ".0f"))


def as_markdown(report: dict[str, Any]) -> str:
    found, exact = report["policies"], report["exact"]
    longest_s = max(row["elapsed_s"] for row in found.values())
    lines = [
        "# A production log, replayed",
        "",
        *source_lines(report, f"Python {report['python']}"),
        f"- {report['num_requests']} requests of {report['log_requests']} in the log; the others have no steps",
        f"- Costs, pool, load, requests: {WHOLE}",
        f"- Target: under {TARGET_S:g} s with any policy; longest: {longest_s:.0f} s",
        "- *Additions*: how fast the machine was: what a loop of Python adds up in a second, behind each replay",
    ]
    if report["steps_per_task"] > 1:
        lines.append(f"- `--steps-per-task {report['steps_per_task']}`; in brackets the same by single steps")
    lines += [
        "",
        "| policy | replay, s | tasks/s | additions, millions/s | in time, % | mean, s | p99, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        cells = [f"{row['elapsed_s']:.0f}", f"{row['num_tasks'] / row['elapsed_s']:,.0f}"]
        cells.append(f"{row['additions_per_s'] / 1e6:.1f}")
        for key, scale, form in SHOWN:
            beside = f" ({scale * exact[name][key]:{form}})" if name in exact else ""
            cells.append(f"{scale * row[key]:{form}}{beside}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="lora_request_trace.csv")
    parser.add_argument("--steps-per-task", type=int, default=1, help="more than 1: the coarse simulation")
    parser.add_argument("--exact", type=Path, help="result of single steps, to be shown beside")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "whole.jsonl")
        WHOLE.write(args.log, path)
        trace = tuple(read_trace(path))
    report = provenance([sys.argv[0], args.log.name, *sys.argv[2:]])
    report |= {"num_requests": len(trace), "steps_per_task": args.steps_per_task, "policies": {}, "exact": {}}
    if args.exact is not None:
        report["exact"] = json.loads(args.exact.read_text())["policies"]
    report["log_requests"] = len(args.log.read_text().splitlines()) - 1
    for choice in POLICIES:
        row = report["policies"][choice.label] = replay(choice, trace, args.steps_per_task)
        print(choice.label, row, flush=True)
    name = "replay" if args.steps_per_task == 1 else "replay_coarse"
    for written in write_report(args.out, name, report, as_markdown(report)):
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
