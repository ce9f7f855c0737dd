"""The default policy and all others on windows of a production log: text-to-image requests of GenTD26.

Each window is what one `gfdit workload import` makes of the log, which is not part of this repository:

    python -m benchmarks.production_windows lora_request_trace.csv --out benchmarks/results

The policies were tuned on windows of the first 3,000 requests and of those from 22,000 on. ``--held-out`` takes
others, at places chosen before anything was run there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gfdit.cli import main as cli
from gfdit.cli.provenance import provenance
from gfdit.sim.bounds.fluid import attainment_bound
from gfdit.sim.bounds.rolling import rolling
from gfdit.sim.compare import Job, PolicyChoice, in_processes, simulate
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.trace import read_trace

DEFAULT = "triage"
POLICIES = (
    PolicyChoice(DEFAULT),
    PolicyChoice("edf"),
    PolicyChoice("srtf"),
    PolicyChoice("srtf", (("parallelism", "widest"),)),
    PolicyChoice("tetriserve"),
    PolicyChoice("rssp"),
    PolicyChoice("fcfs"),
    PolicyChoice("static"),
    PolicyChoice("equipartition"),
)
FAST = ("edf", "srtf", "tetriserve")
MIXES = {
    "qwen-image-h20": ("512:.3,1024:.5,1536:.2", "1.5"),
    "flux-h100": ("256:.2,512:.3,1024:.35,2048:.15", "1.2"),
}


@dataclass(frozen=True, slots=True)
class Window:
    costs: str
    num_ranks: int
    load: float
    select: str

    def __str__(self) -> str:
        return f"{self.costs}, {self.num_ranks} ranks, load {self.load:g}, {self.select}"

    def write(self, log: Path, out: Path) -> None:
        sizes, factor = MIXES[self.costs]
        asked = ["--format", "gentd26", "--select", self.select, "--costs", self.costs, "--sizes", sizes]
        asked += ["--deadline-factors", factor, "--load", str(self.load), "--ranks", str(self.num_ranks)]
        if cli.main(["workload", "import", str(log), *asked, "--out", str(out)]):
            raise ValueError(f"{log} has no window {self.select}")


WINDOWS = (
    Window("qwen-image-h20", 4, 0.9, "0:400"),
    Window("qwen-image-h20", 4, 0.9, "1000:1400"),
    Window("qwen-image-h20", 4, 0.9, "22000:22400"),
    Window("qwen-image-h20", 8, 0.8, "23000:23400"),
    Window("qwen-image-h20", 8, 1.2, "22400:23000"),
    Window("flux-h100", 8, 0.8, "1500:2300"),
    Window("flux-h100", 8, 0.8, "22000:22800"),
    Window("flux-h100", 8, 1.2, "2200:3000"),
)
HELD_OUT = (
    Window("qwen-image-h20", 4, 0.9, "4000:4400"),
    Window("qwen-image-h20", 4, 0.9, "7000:7400"),
    Window("qwen-image-h20", 4, 0.9, "10000:10400"),
    Window("qwen-image-h20", 8, 0.8, "13000:13400"),
    Window("qwen-image-h20", 8, 1.2, "16000:16600"),
    Window("flux-h100", 8, 0.8, "5000:5800"),
    Window("flux-h100", 8, 0.8, "9000:9800"),
    Window("flux-h100", 8, 1.2, "19000:19800"),
)


def measure(log: Path, window: Window, policies: Sequence[PolicyChoice], num_processes: int) -> dict[str, Any]:
    """By policy, attainment, mean and p99 in seconds; the upper bound on attainment, and what planning meets."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "window.jsonl")
        window.write(log, path)
        trace = tuple(read_trace(path))
    table = load_cost_table(window.costs)
    jobs = [Job(policy, trace, table, SimulationOptions(window.num_ranks)) for policy in policies]
    outcomes = in_processes(partial(simulate), jobs, num_processes=num_processes)
    keys = ("slo_attainment", "mean_latency_s", "p99_latency_s")
    found: dict[str, Any] = {
        policy.label: {key: outcome.result[key] for key in keys}
        for policy, outcome in zip(policies, outcomes, strict=True)
    }
    bound = attainment_bound(trace, table, num_ranks=window.num_ranks).attainment
    planned = rolling(trace, table, num_ranks=window.num_ranks).attainment
    return {"window": str(window), "load": window.load, "bound": bound, "rolling": planned, "policies": found}


def verdicts(row: dict[str, Any]) -> dict[str, float]:
    """The lead in points over the best of all others; the mean over the best of the fast; the p99 over fcfs's."""
    found = row["policies"]
    own, others = found[DEFAULT], [v for name, v in found.items() if not name.startswith(DEFAULT)]
    return {
        "lead_points": 100 * (own["slo_attainment"] - max(v["slo_attainment"] for v in others)),
        "below_bound_points": 100 * (row["bound"] - own["slo_attainment"]),
        "below_rolling_points": 100 * (row["rolling"] - own["slo_attainment"]),
        "mean_ratio": own["mean_latency_s"] / min(found[name]["mean_latency_s"] for name in FAST),
        "p99_ratio": own["p99_latency_s"] / found["fcfs"]["p99_latency_s"],
    }


def as_markdown(rows: Sequence[dict[str, Any]], source: dict[str, Any]) -> str:
    names = list(rows[0]["policies"])
    lines = [
        "# Policies on windows of a production log",
        "",
        f"- {source['date']}, commit {source['commit']}",
        f"- Command: `{source['command']}`",
        *(["- All others: {date}, commit {commit}".format(**source["others"])] if "others" in source else []),
        "",
        "Requests in time, % / mean latency, s / 99th percentile, s. Latencies are of what completed: with",
        "admission the others were turned away.",
        "",
        "| | " + " | ".join(row["window"] for row in rows) + " |",
        "|---" * (1 + len(rows)) + "|",
    ]
    for name in names:
        cells = []
        for row in rows:
            value = row["policies"][name]
            mean_s, p99_s = (value[key] or 0.0 for key in ("mean_latency_s", "p99_latency_s"))
            cells.append(f"{100 * value['slo_attainment']:.1f} / {mean_s:.1f} / {p99_s:.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for key, title in (("bound", "upper bound"), ("rolling", "planned at each arrival, the late never served")):
        lines.append(f"| {title} | " + " | ".join(f"{100 * row[key]:.1f}" for row in rows) + " |")
    for key, title in (
        ("lead_points", f"{DEFAULT}'s lead over the best other, points"),
        ("below_bound_points", "points below the bound"),
        ("below_rolling_points", "points below what planning at each arrival meets"),
        ("mean_ratio", f"mean over the best of {', '.join(FAST)}"),
        ("p99_ratio", "99th percentile over that of fcfs"),
    ):
        lines.append(f"| {title} | " + " | ".join(f"{verdicts(row)[key]:.2f}" for row in rows) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the policies on windows of a production log.")
    parser.add_argument("log", type=Path)
    parser.add_argument("--held-out", action="store_true", help="windows that nothing was tuned on")
    parser.add_argument("--without-admission", action="store_true", help="only policies that turn nothing away")
    parser.add_argument(
        "--others", type=Path, metavar="JSON", help="an earlier result: only the default runs again"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, required=True, help="folder")
    args = parser.parse_args()
    source = provenance(sys.argv)
    chosen = " --held-out" if args.held_out else ""
    source["command"] = f"python -m benchmarks.production_windows {args.log.name}{chosen} --out {args.out}"
    policies = list(POLICIES)
    if not args.without_admission:
        policies += [PolicyChoice(policy.spec, policy.args, admission="deadline") for policy in POLICIES]
    earlier: dict[str, dict[str, Any]] = {}
    if args.others is not None:
        before = json.loads(args.others.read_text(encoding="utf-8"))
        source["others"] = {key: before[key] for key in ("date", "commit")}
        source["command"] += f" --others {args.others.name}"
        earlier = {row["window"]: row["policies"] for row in before["windows"]}
        policies = [policy for policy in policies if policy.spec == DEFAULT]
    rows = []
    for window in HELD_OUT if args.held_out else WINDOWS:
        rows.append(measure(args.log, window, policies, args.jobs))
        rows[-1]["policies"] = earlier.get(str(window), {}) | rows[-1]["policies"]
        print({key: round(value, 2) for key, value in verdicts(rows[-1]).items()}, flush=True)
    name = f"production_windows{chosen.replace(' --', '_').replace('-', '_')}_{datetime.now(UTC):%Y-%m-%d}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.md").write_text(as_markdown(rows, source), encoding="utf-8")
    (args.out / f"{name}.json").write_text(
        json.dumps({**source, "windows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
