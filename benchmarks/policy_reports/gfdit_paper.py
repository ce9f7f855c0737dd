"""The shapes of the GF-DiT evaluation (paper, section 6) on its workloads, in the simulator."""

from __future__ import annotations

from benchmarks.policy_reports.claims import CLEARLY, admission_table, attainment_table, claims_table
from benchmarks.policy_reports.gfdit_claims import (
    EDF,
    FCFS,
    MAIN_WORKLOADS,
    SRTF,
    SRTF_WIDE,
    STATIC,
    crossing,
    edf_is_best,
    elsewhere,
    single_rank_wins,
    static_collapses,
)
from benchmarks.policy_reports.report import Report
from gfdit.core.cost.file import CostTable
from gfdit.sim.compare import PolicyChoice, simulate_spans
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.plots import plot_attainment, plot_latencies, pooled_latencies
from gfdit.sim.sweep import Grid, Point

NAME, TITLE = "gfdit_paper", "The results of the GF-DiT paper, in shape"

POLICIES = (
    PolicyChoice("edf", name=EDF),
    PolicyChoice("srtf", name=SRTF),
    PolicyChoice("srtf", (("parallelism", "widest"),), name=SRTF_WIDE),
    PolicyChoice("fcfs", (("assign", "task"),), name=FCFS),
    PolicyChoice("fcfs", name=f"{FCFS} by request"),
    PolicyChoice("static", name=STATIC),
)
LOADS = (0.5, 0.7, 0.9, 1.0, 1.15, 1.4)
SUSTAINED_LOADS = (0.5, 0.7, 0.9, 1.1, 1.4, 1.8)
WAN_GRACE_S, QWEN_GRACE_S = 5.0, 1.0


def run(report: Report) -> None:
    wan, qwen = load_cost_table("wan2.2-synthetic"), load_cost_table("qwen-image-h20")
    sustained = ("short", "inflight-burst", "five-phase")
    qwen_grid = _grid(report, qwen, 4, MAIN_WORKLOADS, LOADS, QWEN_GRACE_S)
    wan_8 = report.sweep("wan-8", _grid(report, wan, 8, MAIN_WORKLOADS, LOADS, WAN_GRACE_S))
    qwen_4 = report.sweep("qwen-4", qwen_grid)
    wan_4 = report.sweep("wan-4", _grid(report, wan, 4, sustained, SUSTAINED_LOADS, WAN_GRACE_S))
    admitted = report.admitted("qwen-4", qwen_grid)
    sweeps = {"Wan on 8 ranks": wan_8, "Qwen-Image on 4 ranks": qwen_4, "Wan on 4 ranks": wan_4}
    claims = [
        edf_is_best(sweeps),
        *single_rank_wins(qwen_4, _single_share(qwen_grid, Point("short", 1.0))),
        *static_collapses(wan_8, qwen_4),
        crossing(sweeps),
        *elsewhere(),
    ]
    report.add(
        "Policies of the paper's sections 5.4 and 6.2 on its arrival patterns; FCFS assigns every task when it is "
        "ready, as section 5.4 has it, and by request as servers of fixed degrees do. `static` is its Legacy, one "
        "request at a time on the full machine. Costs: `wan2.2-synthetic` on 8 and 4 ranks, `qwen-image-h20` "
        "on 4 ranks (it has no degree above 4). In time means within the deadline and the client's allowance "
        "(5 s for Wan, 1 s for Qwen-Image), as in the paper. The dashed line is the upper bound of "
        "`gfdit.sim.bounds.fluid`, which no schedule exceeds. The costs are published or synthetic, not those of "
        "the paper's machines: shapes are compared, not figures.",
        "",
        "## Claims",
        "",
        f"{CLEARLY} Loads up to 1 count as at or below capacity; the first row is about `short` and "
        "`foreground-burst`, as the paper's main results are. `five-phase` asks for far more than its mean during "
        "a quarter of its time: a mean load below 1 is overload there.",
        "",
        *claims_table(claims),
        "",
        "## Deadlines met",
        "",
    )
    for name, caption, sweep, grace_s in (
        ("wan8", "Wan2.2-like, 8 ranks", wan_8, WAN_GRACE_S),
        ("qwen4", "Qwen-Image, 4 ranks", qwen_4, QWEN_GRACE_S),
        ("wan4", "Wan2.2-like, 4 ranks", wan_4, WAN_GRACE_S),
    ):
        plot_attainment(sweep, report.picture(name, caption), grace_s=grace_s)
        report.add(*attainment_table(sweep))
    report.add("Qwen-Image without / with admission:", "", *admission_table(qwen_4, admitted))
    panels = {
        "Wan, 8 ranks: short, load 1.15": pooled_latencies(wan_8, Point("short", 1.15)),
        "Wan, 8 ranks: foreground-burst, load 1": pooled_latencies(wan_8, Point("foreground-burst", 1.0)),
        "Qwen, 4 ranks: foreground-burst, load 0.7": pooled_latencies(qwen_4, Point("foreground-burst", 0.7)),
    }
    report.add("## Latency", "")
    plot_latencies(panels, report.picture("latency", "Latency of completed requests, all seeds"))
    report.add("Mean latency on Qwen-Image, seconds:", "", *attainment_table(qwen_4, "mean_latency_s", 1.0))
    report.add("## What ran where", "")
    lanes = _grid(report, wan, 4, ("short",), (1.1,), WAN_GRACE_S)
    report.lanes("lanes", "Wan2.2-like, short, load 1.1, 4 ranks, first seed", lanes, lanes.points()[0])


def _grid(
    report: Report,
    table: CostTable,
    num_ranks: int,
    workloads: tuple[str, ...],
    loads: tuple[float, ...],
    grace_s: float,
) -> Grid:
    return Grid(
        table,
        POLICIES,
        workloads,
        report.seeds,
        SimulationOptions(num_ranks),
        loads=loads,
        grace_s=grace_s,
        bound=True,
    )


def _single_share(grid: Grid, point: Point) -> float:
    """Share of the denoising steps that EDF runs on one rank, in the trace of the first seed."""
    _, spans = simulate_spans(grid.job(point, grid.seeds[0], POLICIES[0]))
    degrees = {span.task: span.sp for span in spans if span.kind == "denoise"}
    return sum(degree == 1 for degree in degrees.values()) / len(degrees)
