"""Pools of 72 and 256 ranks: policies side by side, and what it gains that they know the nodes.

72 ranks are one node, a GB200 NVL72: every layout has a published time. 256 ranks are 32 nodes of 8, joined by
links of 320 Gbit/s for each rank: what lies across nodes pays for it (``gfdit.core.cost.nodes``). These runs are
repeated with policies that are told that all ranks are on one node.
Decisions are timed by the wall clock, on a machine that may have other things to do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.core import Decision, Policy, SchedulerView
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.nodes import Nodes
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.loading import load_policy
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.results import summarize
from gfdit.sim.simulator import SimulationOptions, Simulator
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS, generate, workload_classes

POLICIES = ("triage", "tetriserve", "edf", "srtf", "rssp", "fcfs", "equipartition")
LOADS = (0.6, 0.9)


@dataclass(frozen=True)
class Study:
    """``scale`` multiplies the workload's deadlines."""

    title: str
    costs: str
    workload: str
    num_ranks: int
    ranks_per_node: int
    num_requests: int
    scale: float

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.ranks_per_node)

    def trace(self, table: CostTable, load: float, seed: int) -> list[TraceRequest]:
        pattern = PATTERNS[self.workload]
        classes = workload_classes(pattern, TableCostModel(table), slo_scale=self.scale)
        return generate(
            pattern, classes, num_ranks=self.num_ranks, seed=seed, load=load, num_requests=self.num_requests
        )


STUDIES = (
    Study("Wan2.2 on one node of 72", "wan2.2-gb200", "gamma", 72, 72, 400, 0.2),
    Study("Wan2.2 on 32 nodes of 8", "wan2.2-gb200", "gamma", 256, 8, 1000, 0.2),
    Study("FLUX on 32 nodes of 8", "flux-h100-compiled", "tetriserve-uniform", 256, 8, 2500, 1.0),
)


def simulate(name: str, table: CostTable, trace: list[TraceRequest], options: SimulationOptions) -> dict[str, Any]:
    policy = load_policy(name, {}, "none")
    times_s: list[float] = []
    policy.schedule = _timed(policy, times_s)  # type: ignore[method-assign, assignment]
    started_s = time.monotonic()
    run = Simulator(policy, table, trace, options).run()
    elapsed_s = time.monotonic() - started_s
    assert not run.faults, run.faults[0]
    numbers = summarize(run)
    kept = ("slo_attainment", "mean_latency_s", "p99_latency_s", "rank_busy_ratio", "migrations")
    return {key: round(numbers[key], 4) for key in kept} | {
        "decision_p50_ms": round(1e3 * float(np.percentile(times_s, 50)), 3),
        "decision_p99_ms": round(1e3 * float(np.percentile(times_s, 99)), 3),
        "num_tasks": run.num_tasks,
        "elapsed_s": round(elapsed_s, 1),
    }


def _timed(policy: Policy, times_s: list[float]) -> Callable[[SchedulerView], Decision]:
    schedule = policy.schedule

    def timed(view: SchedulerView) -> Decision:
        started_s = time.perf_counter()
        decision = schedule(view)
        times_s.append(time.perf_counter() - started_s)
        return decision

    return timed


def measure(study: Study, load: float, seed: int, policies: tuple[str, ...]) -> dict[str, Any]:
    table = load_cost_table(study.costs)
    trace = study.trace(table, load, seed)
    aware = SimulationOptions(study.num_ranks, nodes=study.nodes)
    rows: dict[str, Any] = {}
    for name in policies:
        rows[name] = {"aware": simulate(name, table, trace, aware)}
        if study.num_ranks > study.ranks_per_node:
            rows[name]["blind"] = simulate(name, table, trace, replace(aware, hides_nodes=True))
        print(study.title, load, seed, name, rows[name], flush=True)
    return {"study": study.title, "load": load, "seed": seed, "requests": len(trace), "policies": rows}


def _mean(cases: list[dict[str, Any]], name: str, how: str, metric: str) -> float:
    return float(np.mean([case["policies"][name][how][metric] for case in cases]))


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Large pools",
        "",
        *source_lines(report, f"Python {report['python']}"),
        f"- {report['num_seeds']} seeds, means. Costs are published or derived (docs/simulator.md); links between "
        "nodes of 320 Gbit/s for each rank. Load 1 is what the ranks can do if every request runs on one.",
        "- *Blind*: policies are told that all ranks are on one node, and pay for what they do across nodes all "
        "the same.",
        "- Decisions by the wall clock, median / 99th percentile.",
        "",
    ]
    for study in STUDIES:
        cases = [case for case in report["cases"] if case["study"] == study.title]
        if not cases:
            continue
        lines += [
            f"## {study.title}",
            "",
            f"`{study.costs}`, `{study.workload}`, {study.num_ranks} ranks, {cases[0]['requests']} requests, "
            f"deadlines x {study.scale:g}.",
            "",
        ]
        blind = study.num_ranks > study.ranks_per_node
        heads = ["load", "policy", "in time, %", "mean, s", "p99, s"]
        heads += ["blind: in time, %", "mean, s", "p99, s"] if blind else []
        heads += ["decision, ms"]
        lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for load in dict.fromkeys(case["load"] for case in cases):
            at = [case for case in cases if case["load"] == load]
            for name in at[0]["policies"]:
                cells = [f"{load:g}", name]
                for how in ("aware", "blind") if blind else ("aware",):
                    cells.append(f"{100 * _mean(at, name, how, 'slo_attainment'):.1f}")
                    cells += [f"{_mean(at, name, how, key):.2f}" for key in ("mean_latency_s", "p99_latency_s")]
                p50, p99 = (_mean(at, name, "aware", f"decision_p{p}_ms") for p in (50, 99))
                lines.append(f"| {' | '.join([*cells, f'{p50:.2f} / {p99:.2f}'])} |")
        lines.append("")
    return "\n".join([*lines, f"![requests in time](large_pools_{report['date'][:10]}.png)"]) + "\n"


def draw(report: dict[str, Any], path: Path) -> None:
    """A panel for each study and load: requests in time by policy, with and without knowing the nodes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((case["study"], case["load"]) for case in report["cases"]))
    figure, grid = plt.subplots(
        -(-len(panels) // 2), 2, figsize=(10, 2.6 * -(-len(panels) // 2)), squeeze=False, layout="constrained"
    )
    for axes, (study, load) in zip(grid.flat, panels, strict=False):
        at = [case for case in report["cases"] if (case["study"], case["load"]) == (study, load)]
        names = list(at[0]["policies"])
        hows = [how for how in ("aware", "blind") if how in at[0]["policies"][names[0]]]
        for index, how in enumerate(hows):
            heights = [100 * _mean(at, name, how, "slo_attainment") for name in names]
            left = [x + (index - (len(hows) - 1) / 2) * 0.38 for x in range(len(names))]
            label = "knows the nodes" if how == "aware" else "blind"
            axes.bar(left, heights, 0.36, label=label, color=("#4477aa", "#ee7733")[index])
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
        axes.set_ylim(0, 102)
        axes.set_title(f"{study}, load {load:g}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = max([axes.get_legend_handles_labels() for axes in grid.flat], key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, fontsize=8, frameon=False, ncols=2, loc="outside upper right")
    figure.supylabel("requests in time, %", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="repeat; default: all")
    parser.add_argument("--requests", type=int, help="of every trace (default: by study)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv) | {"num_seeds": args.seeds}
    policies = tuple(args.policy or POLICIES)
    report["cases"] = [
        measure(replace(study, num_requests=args.requests or study.num_requests), load, seed, policies)
        for study in STUDIES
        for load in LOADS
        for seed in range(args.seeds)
    ]
    for path in write_report(args.out, "large_pools", report, markdown(report)):
        print(path)
    draw(report, args.out / f"large_pools_{report['date'][:10]}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
