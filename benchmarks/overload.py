"""Three times what a server can do, for ten minutes, with the default policy and admission: what is still useful.

Compared with the same policy on a saturated server: requests of the same kinds without deadlines, all there from
the start. Work counts in the seconds that a request takes on one rank, since admission prefers short ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from gfdit.cli.provenance import provenance, write_report
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.core.events import Event
from gfdit.core.policy.loading import DEFAULT_POLICY, load_policy
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.simulator import SimulatedRequest, SimulationOptions, Simulator, Status
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS, RequestClass, generate, workload_classes

LOAD, SECONDS = 3.0, 600.0
TARGET = 0.95
ADMISSION = ("deadline", "promise")
DEADLINES = {"4 x alone": (4.0, 4.0, 4.0), "as published": None}
MACHINES = {"qwen-image-h20": 4, "wan2.2-synthetic": 8}


class Watched(Simulator):
    """Notes the most requests that were alive at a time."""

    most_alive = 0

    def _tell(self, event: Event) -> None:
        super()._tell(event)
        self.most_alive = max(self.most_alive, len(self._control.state.requests))


@dataclass(frozen=True)
class Case:
    table: CostTable
    num_ranks: int
    classes: tuple[RequestClass, ...]
    policy: str
    seed: int

    def trace(self) -> list[TraceRequest]:
        pattern = PATTERNS["poisson"]
        return generate(
            pattern, self.classes, num_ranks=self.num_ranks, seed=self.seed, load=LOAD, duration_s=SECONDS
        )

    def serve(
        self, trace: Sequence[TraceRequest], admission: str
    ) -> tuple[Watched, list[SimulatedRequest], float]:
        policy = load_policy(self.policy, {}, admission)
        simulator = Watched(policy, self.table, trace, SimulationOptions(self.num_ranks))
        run = simulator.run()
        assert not run.faults, run.faults[0]
        return simulator, run.requests, run.last_end_s

    def work_share(self, requests: Sequence[TraceRequest], end_s: float) -> float:
        """What they take on one rank each, as a share of what all ranks had to give until ``end_s``."""
        service_s = {kind.name: kind.service_s for kind in self.classes}
        return sum(service_s[request.slo_class] for request in requests) / (self.num_ranks * end_s)


def measure(case: Case, admission: str) -> dict[str, Any]:
    trace = case.trace()
    many = [replace(r, arrival_s=0.0, deadline_s=None) for r in trace[: int(len(trace) / LOAD)]]
    _, saturated, saturated_end_s = case.serve(many, "none")
    saturated_share = case.work_share([r.trace for r in saturated], saturated_end_s)
    simulator, done, end_s = case.serve(trace, admission)
    in_time = [r.trace for r in done if r.met_deadline()]
    completed = [r.trace for r in done if r.status is Status.COMPLETED]
    rejected = [r for r in done if r.status is Status.REJECTED]
    return {
        "requests": len(trace),
        "in_time": len(in_time),
        "late": len(completed) - len(in_time),
        "rejected": len(rejected),
        "rejected_later_than_at_once": sum(r.end_s != r.trace.arrival_s for r in rejected),
        "other": len(done) - len(completed) - len(rejected),
        "most_alive": simulator.most_alive,
        "saturated_work": round(saturated_share, 4),
        "work_in_time": round(case.work_share(in_time, end_s) / saturated_share, 4),
        "rate_in_time": round(len(in_time) / end_s / (len(saturated) / saturated_end_s), 4),
        "work_done": round(case.work_share(completed, end_s) / saturated_share, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    report["policy"] = args.policy
    cases: list[dict[str, Any]] = []
    report["cases"] = cases
    for name, num_ranks in MACHINES.items():
        table = load_cost_table(name)
        for deadlines, factors in DEADLINES.items():
            classes = workload_classes(PATTERNS["poisson"], TableCostModel(table), deadline_factors=factors)
            for admission, seed in product(ADMISSION, range(args.seeds)):
                case = {
                    "table": name,
                    "ranks": num_ranks,
                    "deadlines": deadlines,
                    "admission": admission,
                    "seed": seed,
                }
                result = measure(Case(table, num_ranks, tuple(classes), args.policy, seed), admission)
                cases.append(case | result)
                print(cases[-1], flush=True)
    for path in write_report(args.out, "overload", report, markdown(report)):
        print(path)
    kept = [case for case in cases if case["admission"] == "promise"]
    return 0 if all(case["work_in_time"] >= TARGET for case in kept) else 1


def markdown(report: dict[str, Any]) -> str:
    columns = list(report["cases"][0])
    lines = [
        "# Overload",
        "",
        f"`{report['command']}`, {report['date']}, commit {report['commit']}. Simulated,",
        f"policy {report['policy']}; {LOAD:g} times what the ranks can do for {SECONDS:g} s.",
        "",
        "`work in time`, `rate in time` and `work done`: work, requests and work per second, as a share of what",
        f"the same policy does on a saturated server; target {TARGET} of its work, with `promise`.",
        "`saturated work`: what that does, as a share of single ranks that never rest.",
        "",
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(str(case[column]) for column in columns) + " |" for case in report["cases"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
