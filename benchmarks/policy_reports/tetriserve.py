"""The TetriServe evaluation (paper, section 6) on its two mixes, in the simulator: comparison and ablation."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.policy_reports.claims import (
    ATTAINMENT,
    CLEARLY,
    Claim,
    Verdict,
    attainment_table,
    claims_table,
    count_led,
    lead_of,
    percent,
    rivals_of,
    verdict_of,
)
from benchmarks.policy_reports.report import Report
from gfdit.sim.compare import PolicyChoice
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.plots import plot_attainment, plot_latencies, pooled_latencies
from gfdit.sim.sweep import Grid, Point, Sweep

NAME, TITLE = "tetriserve", "TetriServe on its own workloads"

NUM_RANKS = 8
MIXES = ("tetriserve-uniform", "tetriserve-skewed")
SLO_SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
RATES_PER_MIN = (6.0, 9.0, 12.0, 15.0, 18.0)
DEGREES = (1, 2, 4, 8)

TETRISERVE, RSSP = "TetriServe", "RSSP"
FIXED = tuple(PolicyChoice("fcfs", (("group_size", str(degree)),), name=f"SP={degree}") for degree in DEGREES)
POLICIES = (PolicyChoice("tetriserve", name=TETRISERVE), PolicyChoice("rssp", name=RSSP), *FIXED)
FIXED_NAMES = tuple(policy.label for policy in FIXED)

# Rows of the paper's table 5, each with what it adds to the one before.
SCHEDULE, PLACEMENT, ELASTIC = "TetriServe schedule", "+ placement", "+ elastic scale-up"
ABLATION = (
    PolicyChoice(
        "tetriserve", (("placement_preservation", "false"), ("elastic_scale_up", "false")), name=SCHEDULE
    ),
    PolicyChoice("tetriserve", (("elastic_scale_up", "false"),), name=PLACEMENT),
    PolicyChoice("tetriserve", name=ELASTIC),
)
# Each mechanism left out of the whole; the last three are not in the paper's table.
SWITCHES = ("placement_preservation", "elastic_scale_up", "mixed_degrees", "packing", "batching")
WITHOUT = tuple(
    PolicyChoice("tetriserve", ((switch, "false"),), name=f"without {switch.replace('_', ' ')}")
    for switch in SWITCHES
)
PUBLISHED = {  # attainment, mean latency in seconds
    ("tetriserve-uniform", 1.0): ((0.54, 4.45), (0.56, 3.96), (0.63, 3.89)),
    ("tetriserve-uniform", 1.5): ((0.74, 4.81), (0.69, 5.14), (0.78, 4.83)),
    ("tetriserve-skewed", 1.0): ((0.27, 8.43), (0.31, 7.64), (0.36, 7.68)),
    ("tetriserve-skewed", 1.5): ((0.38, 9.92), (0.45, 8.16), (0.55, 7.71)),
}


def run(report: Report) -> None:
    by_scale = report.sweep("slo-scale", _grid(report, POLICIES, slo_scales=SLO_SCALES))
    by_rate = report.sweep("rate", _grid(report, POLICIES, per_min=RATES_PER_MIN))
    ablation = report.sweep("ablation", _grid(report, ABLATION, slo_scales=(1.0, 1.5), bound=False))
    whole = PolicyChoice("tetriserve", name=TETRISERVE)
    without = report.sweep("without", _grid(report, (whole, *WITHOUT), slo_scales=(1.0, 1.5), bound=False))
    report.add(
        "FLUX.1-dev on 8 ranks, 12 requests a minute unless said otherwise, about 300 requests a trace. The "
        "cost table `flux-h100` is derived from the paper's figures, not measured: shapes are compared, not "
        "figures. `SP=k` is first come, first served on groups of k ranks. The dashed line is the upper "
        "bound of `gfdit.sim.bounds.fluid`, which no schedule exceeds.",
        "",
        "## Claims",
        "",
        CLEARLY,
        "",
        *claims_table([*_ranking(by_scale, by_rate), *_ablation_claims(ablation)]),
        "",
        "## Deadlines met against the SLO scale",
        "",
    )
    plot_attainment(by_scale, report.picture("slo_scale", "12 requests a minute; the paper's figures 7 and 8."))
    report.add(*attainment_table(by_scale))
    report.add("## Deadlines met against the rate", "")
    plot_attainment(by_rate, report.picture("rate", "SLO scale 1; the paper's figure 13 for the uniform mix."))
    report.add(*attainment_table(by_rate))
    report.add("## Latency", "")
    panels = {mix: pooled_latencies(by_scale, Point(mix)) for mix in MIXES}
    plot_latencies(panels, report.picture("latency", "SLO scale 1, all seeds; the paper's figure 9."))
    report.add("## Ablation", "", "Share of requests in time / mean latency in seconds.", "")
    report.add(*_ablation_table(ablation))
    report.add("The whole, and what each mechanism left out of it changes, in points of requests in time:", "")
    report.add(*_without_table(without))


def _grid(
    report: Report,
    policies: tuple[PolicyChoice, ...],
    *,
    slo_scales: tuple[float, ...] = (1.0,),
    per_min: tuple[float | None, ...] = (None,),
    bound: bool = True,
) -> Grid:
    return Grid(
        load_cost_table("flux-h100"),
        policies,
        MIXES,
        report.seeds,
        SimulationOptions(NUM_RANKS),
        per_min=per_min,
        slo_scales=slo_scales,
        bound=bound,
    )


def _ranking(by_scale: Sweep, by_rate: Sweep) -> list[Claim]:
    rivals = (RSSP, *FIXED_NAMES)
    return [
        _best(
            "TetriServe has the highest attainment at every SLO scale, on both mixes", by_scale, TETRISERVE, rivals
        ),
        _best("TetriServe is best at every rate from 6 to 18 a minute", by_rate, TETRISERVE, rivals),
        _best("RSSP is at least as good as every fixed degree", by_scale, RSSP, FIXED_NAMES),
        _no_fixed_degree_fits_all(by_scale),
    ]


def _best(statement: str, sweep: Sweep, policy: str, others: Sequence[str]) -> Claim:
    rivals = rivals_of(sweep, policy, others, sweep.points)
    return Claim(statement, "6.2, 6.3", count_led(len(sweep.points), rivals), verdict_of(rivals))


def _no_fixed_degree_fits_all(sweep: Sweep) -> Claim:
    """Low degrees fail on the largest images, high ones on the smallest."""
    point = Point("tetriserve-uniform")

    def of_class(policy: str, side: int) -> float:
        found = sweep.estimate(point, policy, f"per_class.{side}.slo_attainment")
        assert found is not None
        return found.mean

    rows = {name: [of_class(name, side) for side in (256, 512, 1024, 2048)] for name in FIXED_NAMES}
    text = "; ".join(f"{name}: " + " / ".join(f"{100 * value:.0f}" for value in row) for name, row in rows.items())
    low_fails = rows["SP=1"][3] < 0.05 < 0.5 < rows["SP=1"][0]
    high_fails = rows["SP=8"][0] < rows["SP=1"][0] and rows["SP=8"][3] > rows["SP=1"][3]
    return Claim(
        "no fixed degree serves all sizes: SP=1 fails on 2048 x 2048, SP=8 on small images",
        "2.3",
        f"in time at SLO scale 1, uniform, 256 / 512 / 1024 / 2048, %: {text}",
        Verdict.HOLDS if low_fails and high_fails else Verdict.FAILS,
    )


def _ablation_claims(sweep: Sweep) -> list[Claim]:
    return [
        _raises("elastic scale-up raises attainment in all four settings", sweep, ELASTIC, PLACEMENT, 4),
        _raises("both mechanisms together are better than none in all four settings", sweep, ELASTIC, SCHEDULE, 4),
        _raises(
            "placement preservation raises attainment in three of four settings", sweep, PLACEMENT, SCHEDULE, 3
        ),
    ]


def _raises(statement: str, sweep: Sweep, policy: str, other: str, least: int) -> Claim:
    """Whether ``policy`` is better than ``other`` in at least so many settings, and clearly worse in none."""
    leads = [lead_of(sweep, point, policy, other) for point in sweep.points]
    losses = [lead_of(sweep, point, other, policy) for point in sweep.points]
    num_raised = sum(rival.lead.mean > 0 for rival in leads)
    verdict = Verdict.HOLDS if num_raised >= least else Verdict.WITHIN_NOISE
    if any(rival.is_clear for rival in losses):
        verdict = Verdict.FAILS
    text = "; ".join(f"{rival.point}: {percent(rival.lead)}{' !' if rival.is_clear else ''}" for rival in leads)
    return Claim(statement, "6.5, table 5", f"points: {text}", verdict)


def _ablation_table(sweep: Sweep) -> list[str]:
    lines = ["| variant | " + " | ".join(map(str, sweep.points)) + " |", "|---" * (len(sweep.points) + 1) + "|"]
    for row, policy in enumerate(sweep.policies):
        cells = []
        for point in sweep.points:
            attainment, latency = (sweep.estimate(point, policy, name) for name in (ATTAINMENT, "mean_latency_s"))
            assert attainment is not None and latency is not None
            paper = PUBLISHED[point.workload, point.slo_scale][row]
            cells.append(
                f"{percent(attainment)} % / {latency.mean:.2f} (paper {100 * paper[0]:.0f} % / {paper[1]:.2f})"
            )
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return [*lines, ""]


def _without_table(sweep: Sweep) -> list[str]:
    lines = ["| | " + " | ".join(map(str, sweep.points)) + " |", "|---" * (len(sweep.points) + 1) + "|"]
    for policy in sweep.policies:
        if policy == TETRISERVE:
            found = [sweep.estimate(point, policy, ATTAINMENT) for point in sweep.points]
        else:
            found = [lead_of(sweep, point, policy, TETRISERVE).lead for point in sweep.points]
        cells = [percent(value) for value in found if value is not None]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return [*lines, ""]
