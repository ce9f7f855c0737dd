"""The whole of a production log, replayed by every policy: how long that takes, and what it would have met.

    python -m benchmarks.replay lora_request_trace.csv --out benchmarks/results

The log is GenTD26's, which is not part of this repository, with the sizes and deadlines of
:mod:`benchmarks.production_windows`. One process, one policy after the other.
"""

from __future__ import annotations

import argparse
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


def replay(choice: PolicyChoice, trace: Sequence[TraceRequest]) -> dict[str, Any]:
    simulator = Simulator(choice.load(), load_cost_table(WHOLE.costs), trace, SimulationOptions(WHOLE.num_ranks))
    started_s = time.perf_counter()
    run = simulator.run()
    elapsed_s = time.perf_counter() - started_s
    assert not run.faults, run.faults[0]
    kept = ("slo_attainment", "mean_latency_s", "p99_latency_s")
    numbers = {key: summarize(run)[key] for key in kept}
    return numbers | {"num_tasks": run.num_tasks, "elapsed_s": elapsed_s, "additions_per_s": additions_per_s()}


def as_markdown(report: dict[str, Any]) -> str:
    found = report["policies"]
    longest_s = max(row["elapsed_s"] for row in found.values())
    lines = [
        "# A production log, replayed",
        "",
        *source_lines(report, f"Python {report['python']}"),
        f"- {report['num_requests']} requests of {report['log_requests']} in the log; the others have no steps",
        f"- Costs, pool, load, requests: {WHOLE}",
        f"- Target: under {TARGET_S:g} s with any policy; longest: {longest_s:.0f} s",
        "- *Additions*: how fast the machine was: what a loop of Python adds up in a second, behind each replay",
        "",
        "| policy | replay, s | tasks/s | additions, millions/s | in time, % | mean, s | p99, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        cells = [f"{row['elapsed_s']:.0f}", f"{row['num_tasks'] / row['elapsed_s']:,.0f}"]
        cells += [f"{row['additions_per_s'] / 1e6:.1f}", f"{100 * row['slo_attainment']:.1f}"]
        cells += [f"{row['mean_latency_s']:.1f}", f"{row['p99_latency_s']:.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="lora_request_trace.csv")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "whole.jsonl")
        WHOLE.write(args.log, path)
        trace = tuple(read_trace(path))
    report = provenance([sys.argv[0], args.log.name, *sys.argv[2:]])
    report |= {"num_requests": len(trace), "policies": {}}
    report["log_requests"] = len(args.log.read_text().splitlines()) - 1
    for choice in POLICIES:
        row = report["policies"][choice.label] = replay(choice, trace)
        print(choice.label, row, flush=True)
    for written in write_report(args.out, "replay", report, as_markdown(report)):
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
