"""The TetriServe evaluation (paper, section 6) on its two mixes, in the simulator: comparison and ablation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.policy_reports.claims import (
    ATTAINMENT,
    CLEARLY,
    Claim,
    Verdict,
    admission_table,
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
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.plots import plot_attainment, plot_latencies, pooled_latencies
from gfdit.sim.sweep import Grid, Point, Sweep

NAME, TITLE = "tetriserve", "TetriServe on its own workloads"

NUM_RANKS = 8
MIXES = ("tetriserve-uniform", "tetriserve-skewed")
SLO_SCALES = (1.0, 1.1, 1.2, 1.5)
RATES_PER_MIN = (6.0, 12.0, 18.0)
DEGREES = (1, 2, 4, 8)
STEPS_PER_ROUND = (1, 2, 5, 10)

TETRISERVE, IMPROVED = "TetriServe", "TetriServe, improved"
RSSP, EFFICIENT = "RSSP", "RSSP, efficient"
IMPROVEMENTS = (("widest_first", "true"), ("starts_in_round", "true"), ("fixed_rounds", "false"))
FIXED = tuple(PolicyChoice("fcfs", (("group_size", str(degree)),), name=f"SP={degree}") for degree in DEGREES)
POLICIES = (
    PolicyChoice("tetriserve", name=TETRISERVE),
    PolicyChoice("tetriserve", IMPROVEMENTS, name=IMPROVED),
    PolicyChoice("rssp", name=RSSP),
    PolicyChoice("rssp", (("min_efficiency", "0.4"),), name=EFFICIENT),
    *FIXED,
)
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
# Each mechanism left out of the whole, of which the last three are not in the paper's table; and each departure
# from the paper added to it.
SWITCHES = ("placement_preservation", "elastic_scale_up", "mixed_degrees", "packing", "batching")
CHANGES = (
    *(
        PolicyChoice("tetriserve", ((switch, "false"),), name=f"without {switch.replace('_', ' ')}")
        for switch in SWITCHES
    ),
    PolicyChoice("tetriserve", IMPROVEMENTS[:1], name="wider steps of an allocation first"),
    PolicyChoice("tetriserve", IMPROVEMENTS[1:2], name="starts in the middle of a round"),
    PolicyChoice("tetriserve", IMPROVEMENTS[2:], name="rounds by their own requests"),
    PolicyChoice("tetriserve", IMPROVEMENTS, name="all three"),
)
ROUNDS = tuple(
    PolicyChoice("tetriserve", (("steps_per_round", str(count)),), name=f"{count} steps a round")
    for count in STEPS_PER_ROUND
)
REPOSITORY = {1.0: (0.76, 0.74), 1.1: (0.83, 0.65), 1.2: (0.91, 0.69), 1.5: (0.95, 0.80)}
"""Attainment of TetriServe and its best baseline by SLO scale: README of DiT-Serving/TetriServe, read 2026-09."""
PUBLISHED = {  # attainment, mean latency in seconds
    ("tetriserve-uniform", 1.0): ((0.54, 4.45), (0.56, 3.96), (0.63, 3.89)),
    ("tetriserve-uniform", 1.5): ((0.74, 4.81), (0.69, 5.14), (0.78, 4.83)),
    ("tetriserve-skewed", 1.0): ((0.27, 8.43), (0.31, 7.64), (0.36, 7.68)),
    ("tetriserve-skewed", 1.5): ((0.38, 9.92), (0.45, 8.16), (0.55, 7.71)),
}


def run(report: Report) -> None:
    by_scale = report.sweep("slo-scale", _grid(report, POLICIES, slo_scales=SLO_SCALES))
    by_rate = report.sweep("rate", _grid(report, POLICIES, per_min=RATES_PER_MIN))
    admitted = report.admitted("slo-scale", _grid(report, POLICIES, slo_scales=(1.0, 1.5)))
    whole = PolicyChoice("tetriserve", name=TETRISERVE)
    ablated = (*ABLATION[:2], whole, *CHANGES)  # the whole is the last row of the ablation, too
    changes = report.sweep("changes", _grid(report, ablated, slo_scales=(1.0, 1.5), bound=False))
    ablation = Sweep(
        tuple(
            replace(cell, policy=ELASTIC if cell.policy == TETRISERVE else cell.policy)
            for cell in changes.cells
            if cell.policy in (SCHEDULE, PLACEMENT, TETRISERVE)
        )
    )
    rounds = report.sweep("rounds", _grid(report, ROUNDS, per_min=RATES_PER_MIN, bound=False))
    report.add(
        "FLUX.1-dev on 8 ranks, 12 requests a minute unless said otherwise, about 300 requests a trace. The "
        "cost table `flux-h100` is derived from the paper's figures, not measured: shapes are compared, not "
        "figures. `SP=k` is first come, first served on groups of k ranks. TetriServe and RSSP are as published, "
        "as far as that is said (`gfdit policies`, `policies/tetriserve.py` and `policies/rssp.py` list the "
        "differences); *improved* and *efficient* have what is not in the paper: wider steps first, starts in the "
        "middle of a round, rounds as long as their own requests say; degrees up to the widest that any shape "
        "needs, at 40 % efficiency. The dashed line is the upper bound of `gfdit.sim.bounds.fluid`, which no "
        "schedule exceeds.",
        "",
        "## Claims",
        "",
        CLEARLY,
        "",
        *claims_table([*_ranking(by_scale, by_rate), *_ablation_claims(ablation)]),
        "",
        "## Against the figures of its repository",
        "",
        *_repository_table(by_scale),
        "## Deadlines met against the SLO scale",
        "",
    )
    plot_attainment(by_scale, report.picture("slo_scale", "12 requests a minute; the paper's figures 7 and 8."))
    report.add(*attainment_table(by_scale))
    report.add("## Deadlines met against the rate", "")
    plot_attainment(by_rate, report.picture("rate", "SLO scale 1; the paper's figure 13 for the uniform mix."))
    report.add(*attainment_table(by_rate))
    report.add("Without / with admission, which turns away on arrival what cannot be in time; the paper drops it:")
    report.add("", *admission_table(by_scale, admitted))
    report.add("## Latency", "")
    panels = {mix: pooled_latencies(by_scale, Point(mix)) for mix in MIXES}
    plot_latencies(panels, report.picture("latency", "SLO scale 1, all seeds; the paper's figure 9."))
    report.add("## Ablation", "", "Share of requests in time / mean latency in seconds.", "")
    report.add(*_ablation_table(ablation))
    report.add(
        "The whole, and what it changes, in points of requests in time, to leave a mechanism out or to add what "
        "is not in the paper:",
        "",
        *_changes_table(changes),
        _helps(changes),
        "",
        "## Steps of a round",
        "",
        "The paper's figure 15, where 5 and 10 steps are the most robust: deciding costs time there. Here it does "
        "not, and a round is so many steps of the slowest shape. Requests in time, %:",
        "",
        *attainment_table(rounds),
    )


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
    rivals = (RSSP, EFFICIENT, *FIXED_NAMES)
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


def _repository_table(sweep: Sweep) -> list[str]:
    """On both mixes: the repository does not say which mix its figures are of."""
    published = [f"{100 * own:.0f} / {100 * best:.0f}" for own, best in REPOSITORY.values()]
    lines = [
        "Requests in time by SLO scale, %, of TetriServe / the best of RSSP and the fixed degrees. The repository "
        "does not say of which mix its figures are, nor with how many steps; here there are 20.",
        "",
        "| | " + " | ".join(f"{scale:g}" for scale in REPOSITORY) + " |",
        "|---" * (1 + len(REPOSITORY)) + "|",
        f"| its repository | {' | '.join(published)} |",
    ]
    for policy in (TETRISERVE, IMPROVED):
        for mix in MIXES:
            cells = []
            for scale in REPOSITORY:
                point = Point(mix, slo_scale=scale)
                best = max(sweep.mean(point, name, ATTAINMENT) for name in (RSSP, *FIXED_NAMES))
                cells.append(f"{100 * sweep.mean(point, policy, ATTAINMENT):.0f} / {100 * best:.0f}")
            lines.append(f"| {policy}, {mix.removeprefix('tetriserve-')} | {' | '.join(cells)} |")
    return [*lines, ""]


def _helps(sweep: Sweep) -> str:
    """Names the published mechanisms without which more deadlines are met on average."""
    found = {
        switch: statistics.fmean(
            lead_of(sweep, point, f"without {switch.replace('_', ' ')}", TETRISERVE).lead.mean
            for point in sweep.points
        )
        for switch in SWITCHES
    }
    helps = [f"{name.replace('_', ' ')} ({100 * lead:+.1f} points)" for name, lead in found.items() if lead > 0]
    return f"Published mechanisms that are better left out, on average: {', '.join(helps) or 'none'}."


def _changes_table(sweep: Sweep) -> list[str]:
    lines = ["| | " + " | ".join(map(str, sweep.points)) + " |", "|---" * (len(sweep.points) + 1) + "|"]
    for policy in sweep.policies:
        if policy in (SCHEDULE, PLACEMENT):
            continue
        if policy == TETRISERVE:
            found = [sweep.estimate(point, policy, ATTAINMENT) for point in sweep.points]
        else:
            found = [lead_of(sweep, point, policy, TETRISERVE).lead for point in sweep.points]
        cells = [percent(value) for value in found if value is not None]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return [*lines, ""]
