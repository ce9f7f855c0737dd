"""How far policies are from the upper bound, and on small instances from the optimum itself."""

from __future__ import annotations

import random
from functools import partial

from benchmarks.policy_reports.claims import ATTAINMENT, admission_table, attainment_table, percent
from benchmarks.policy_reports.report import Report
from gfdit.core import TaskKind
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.sim.bounds.exact import optimal_num_met
from gfdit.sim.bounds.fluid import attainment_bound
from gfdit.sim.bounds.possible import SIDES
from gfdit.sim.compare import Job, PolicyChoice, in_processes, simulate
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.estimates import estimate
from gfdit.sim.options import SimulationOptions
from gfdit.sim.plots import plot_attainment
from gfdit.sim.sweep import BOUND, Grid
from gfdit.sim.trace import TraceRequest

NAME, TITLE = "gaps", "How far the policies are from what is possible"

POLICIES = (
    PolicyChoice("triage", name="triage"),
    PolicyChoice("edf", name="EDF"),
    PolicyChoice("tetriserve", name="TetriServe"),
    PolicyChoice("rssp", name="RSSP"),
    PolicyChoice("srtf", name="SRTF-SP1"),
    PolicyChoice("fcfs", name="FCFS-SP1"),
    PolicyChoice("equipartition"),
)
LOADS = (0.6, 0.8, 1.0, 1.2, 1.5)
SMALL_RANKS = 4
NUM_SMALL = 60
OPTIMUM = "optimum"


def run(report: Report) -> None:
    report.add(
        "The upper bound knows all arrivals in advance, serves requests in fractions and moves work freely "
        "between ranks (`gfdit.sim.bounds.fluid`): the optimum is below it, by an unknown amount. On small "
        "instances the optimum itself is computed (`gfdit.sim.bounds.exact`); it knows the future too, as no "
        "policy can.",
        "",
        "## Whole traces",
        "",
    )
    for title, table, num_ranks, workloads, grace_s in (
        ("wan", "wan2.2-synthetic", 8, ("short", "foreground-burst"), 5.0),
        ("qwen", "qwen-image-h20", 4, ("short", "foreground-burst"), 1.0),
    ):
        grid = Grid(
            load_cost_table(table),
            POLICIES,
            workloads,
            report.seeds,
            SimulationOptions(num_ranks),
            loads=LOADS,
            grace_s=grace_s,
            bound=True,
        )
        sweep, admitted = report.sweep(title, grid), report.admitted(title, grid)
        plot_attainment(sweep, report.picture(title, f"`{table}`, {num_ranks} ranks."), grace_s=grace_s)
        report.add(*attainment_table(sweep))
        report.add("Without / with admission:", "", *admission_table(sweep, admitted))
        report.add("Points missing to the bound, of the best policy at each point:", "")
        for point in sweep.points:
            policies = [name for name in sweep.policies if name not in SIDES]
            gaps = {name: sweep.difference(point, BOUND, name, ATTAINMENT) for name in policies}
            best = min(gaps, key=lambda name: gaps[name].mean)
            report.add(f"- {point}: {best}, {percent(gaps[best])}")
        report.add("")
    _small_instances(report)


def _small_instances(report: Report) -> None:
    cases = in_processes(
        partial(_solve, small_table()), list(range(NUM_SMALL)), num_processes=report.num_processes
    )
    num_requests = sum(case["requests"] for case in cases)
    report.add(
        "## Small instances",
        "",
        f"{NUM_SMALL} random instances of 3 to 5 requests with 1 to 4 steps on {SMALL_RANKS} ranks, "
        f"{num_requests} requests in all; step times of `qwen-image-h20` in units of 50 ms, copies free, "
        "deadlines 1 to 3 times the time alone on the fastest degree.",
        "",
        "| | requests in time | of the optimum, mean over instances | instances at the optimum |",
        "|---|---|---|---|",
    )
    for name in (BOUND, OPTIMUM, *(policy.label for policy in POLICIES)):
        met = sum(case[name] for case in cases)
        shares = [case[name] / case[OPTIMUM] for case in cases if case[OPTIMUM]]
        equal = sum(case[name] == case[OPTIMUM] for case in cases)
        report.add(f"| {name} | {met} | {percent(estimate(shares))} % | {equal} of {NUM_SMALL} |")
    report.means["small"] = cases


def small_table() -> CostTable:
    """Qwen-Image in units of 50 ms, so that an exact optimum can be found; moving artifacts costs nothing."""
    unit_s = 0.05
    entries = [
        CostEntry("small", TaskKind.ENCODE, side, side, 1, False, 1, 1, 1, unit_s) for side in (512, 1024, 1536)
    ]
    for entry in load_cost_table("qwen-image-h20").entries:
        if entry.task in (TaskKind.DENOISE, TaskKind.DECODE):
            seconds = max(1, round(entry.seconds / unit_s)) * unit_s
            entries.append(
                CostEntry(
                    "small", entry.task, entry.height, entry.width, 1, False, entry.sp, 1, 1, round(seconds, 6)
                )
            )
    return CostTable("8 x NVIDIA H20, rounded", "qwen-image-h20 in units of 50 ms", 0.0, 1e12, tuple(entries))


def small_trace(table: CostTable, seed: int) -> tuple[TraceRequest, ...]:
    draw = random.Random(seed)
    steps_s = {
        (entry.height, entry.sp): entry.seconds for entry in table.entries if entry.task is TaskKind.DENOISE
    }
    arrival_s, trace = 0.0, []
    for index in range(draw.randint(3, 5)):
        side, num_steps = draw.choice((512, 1024, 1536)), draw.randint(1, 4)
        fastest_s = 0.2 + num_steps * min(steps_s[side, sp] for sp in (1, 2, 4))
        trace.append(
            TraceRequest(
                f"r{index}",
                round(arrival_s, 6),
                "small",
                side,
                side,
                1,
                num_steps,
                deadline_s=round(draw.uniform(1.0, 3.0) * fastest_s, 3),
            )
        )
        arrival_s += draw.randint(0, 12) * 0.05
    return tuple(trace)


def _solve(table: CostTable, seed: int) -> dict[str, int]:
    trace = small_trace(table, seed)
    found = {
        "requests": len(trace),
        BOUND: attainment_bound(trace, table, num_ranks=SMALL_RANKS).num_met,
        OPTIMUM: optimal_num_met(trace, table, num_ranks=SMALL_RANKS, time_limit_s=3600.0),
    }
    for policy in POLICIES:
        outcome = simulate(Job(policy, trace, table, SimulationOptions(SMALL_RANKS)))
        assert not outcome.complaint, outcome.complaint
        found[policy.label] = sum(request["met_deadline"] for request in outcome.result["requests"])
    assert found[OPTIMUM] <= found[BOUND], f"seed {seed}: the optimum is above the bound"
    return found
