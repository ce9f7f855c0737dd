"""The default policy against all others, on every workload: what it leads by, what it costs, what its parts do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from benchmarks.policy_reports.claims import admission_table, attainment_table, claims_table, percent
from benchmarks.policy_reports.default_claims import DEFAULT, FAST, IMPROVED, Targets
from benchmarks.policy_reports.report import Report
from benchmarks.policy_reports.tetriserve import IMPROVEMENTS
from gfdit.sim.compare import PolicyChoice
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.plots import plot_attainment, plot_trade_off
from gfdit.sim.rank_faults import SlowRank
from gfdit.sim.sweep import Grid, Point, Sweep

NAME, TITLE = "default_policy", "The default policy against all others"

POLICIES = (
    PolicyChoice(DEFAULT),
    PolicyChoice("edf"),
    PolicyChoice("srtf"),
    PolicyChoice("srtf", (("parallelism", "widest"),), name="srtf widest"),
    PolicyChoice("tetriserve"),
    PolicyChoice("tetriserve", IMPROVEMENTS, name=IMPROVED),
    PolicyChoice("rssp", (("min_efficiency", "0.4"),), name="rssp, efficient"),
    PolicyChoice("fcfs"),
    PolicyChoice("equipartition"),
)
# They gain by admission, and are far behind with it all the same: see the windows of the production log.
NOT_ADMITTED = ("fcfs", "srtf widest")
LOADS = (0.4, 0.7, 0.9, 1.1, 1.5, 2.0)
# The two arguments an operator sets, their values, and what they are paid with.
KNOBS = {
    "price": (("0", "2", "4", "8", "32", "inf"), "mean_latency_s", "mean latency"),
    "patience": (("1", "1.5", "2", "3", "inf"), "p99_latency_s", "99th percentile of the latency"),
}
WITHOUT = {
    "nobody given up": ("giving_up", "false"),
    "no room for requests to come": ("reserve", "0"),
    "room for all that is expected": ("reserve", "1"),
    "nothing lent to shorter requests": ("lending", "0"),
    "all lent to shorter requests": ("lending", "1"),
    "no degree above the narrowest for a deadline": ("max_waste", "0"),
    "any number of rank-seconds for a deadline": ("max_waste", "inf"),
    "a deadline at any price": ("price", "inf"),
    "no waiting for ranks": ("waiting", "false"),
    "late work in the way of wide requests": ("withholding", "false"),
    "no widening on idle ranks": ("widening", "false"),
    "no patience": ("patience", "inf"),
    "deadlines ignored": ("objective", "latency"),
}
METRICS = (
    ("Requests in time, %", "slo_attainment", 100.0),
    ("Mean latency, s", "mean_latency_s", 1.0),
    ("95th percentile of the latency, s", "p95_latency_s", 1.0),
    ("99th percentile of the latency, s", "p99_latency_s", 1.0),
    ("Rank-seconds per request", "rank_s_per_request", 1.0),
)


def run(report: Report) -> None:
    grids = _grids(report)
    if unknown := [name for name in report.only if name not in (*grids, *PARTS)]:
        raise ValueError(f"unknown part {unknown[0]!r}, known: {', '.join((*grids, *PARTS))}")
    sweeps = {name: report.sweep(name, grid) for name, grid in grids.items() if report.wants(name)}
    admitted = {name: report.admitted(name, grids[name], NOT_ADMITTED) for name in sweeps}
    report.add(
        "Policies with their default arguments, which are the published ones; two are there with what is not in "
        "their papers, too, which meets more deadlines. The GF-DiT patterns with `wan2.2-synthetic`, `poisson` "
        "and `gamma` with `qwen-image-h20`, both on 4 ranks, the TetriServe mixes with `flux-h100` on 8 (100 s of "
        "each). Load 1 is what the ranks can do if every request runs on one. In time means by the deadline, "
        "without grace. The upper bound knows the future (`gfdit.sim.bounds.fluid`). Left out are `static`, "
        "`rssp` with its published argument, and behind admission "
        + ", ".join(f"`{name}`" for name in NOT_ADMITTED)
        + ": "
        "they are the best in no window of the production log.",
        "",
    )
    if report.points:
        report.add(f"Only the settings {', '.join(report.points)}.", "")
    if left_out := [name for name in (*grids, *PARTS) if not report.wants(name)]:
        report.add(f"Not run, to be had by leaving out `--only`: {', '.join(left_out)}.", "")
    report.add(
        "## Targets",
        "",
        *claims_table(Targets(_joined(sweeps, admitted)).claims(), "target"),
        "",
        "## Deadlines against load",
        "",
    )
    for name, sweep in sweeps.items():
        plot_attainment(sweep, report.picture(name, f"`{name}`; the bars are 95 % confidence intervals."))
    some = {
        "qwen": replace(grids["qwen"], workloads=("gamma",), loads=(1.5,)),
        "flux": replace(grids["flux"], workloads=("tetriserve-uniform",), loads=(0.9,)),
    }
    some = {name: grid for name, grid in some.items() if report.wants(name)}
    for part, write in PARTS.items():
        if some and report.wants(part):
            write(report, some)
    for title, metric, scale in METRICS:
        report.add(f"## {title}", "")
        for name, sweep in sweeps.items():
            report.add(f"### {name}", "", *attainment_table(sweep, metric, scale))
    report.add("## Requests in time without / with admission, %", "")
    for name, sweep in sweeps.items():
        report.add(f"### {name}", "", *admission_table(sweep, admitted[name], "slo_attainment"))


def _joined(sweeps: Mapping[str, Sweep], others: Mapping[str, Sweep]) -> dict[str, Sweep]:
    return {name: Sweep(sweep.cells + others[name].cells) for name, sweep in sweeps.items()}


def _grids(report: Report) -> dict[str, Grid]:
    def grid(
        table: str,
        num_ranks: int,
        workloads: tuple[str, ...],
        *,
        loads: tuple[float, ...] = LOADS,
        duration_s: float | None = None,
    ) -> Grid:
        return Grid(
            load_cost_table(table),
            POLICIES,
            workloads,
            report.seeds,
            SimulationOptions(num_ranks),
            loads=loads,
            duration_s=duration_s,
            bound=True,
        )

    return {
        "wan": grid("wan2.2-synthetic", 4, ("short", "foreground-burst", "inflight-burst")),
        "five-phase": grid("wan2.2-synthetic", 4, ("five-phase",), loads=(0.7, 1.1, 1.5)),
        "qwen": grid("qwen-image-h20", 4, ("poisson", "gamma")),
        "flux": grid("flux-h100", 8, ("tetriserve-uniform", "tetriserve-skewed"), duration_s=100.0),
    }


def _variants(
    report: Report, name: str, grids: Mapping[str, Grid], arguments: Mapping[str, tuple[str, str]]
) -> dict[str, Sweep]:
    policies = tuple(PolicyChoice(DEFAULT, (argument,), name=label) for label, argument in arguments.items())
    policies = (PolicyChoice(DEFAULT), PolicyChoice("fcfs"), *policies)
    return {
        title: report.sweep(f"{name}-{title}", replace(grid, policies=policies, bound=False))
        for title, grid in grids.items()
    }


def _knobs(report: Report, grids: Mapping[str, Grid]) -> None:
    report.add("## The two knobs", "", "In time, % / mean latency, s / 99th percentile of the latency, s.", "")
    for knob, (values, paid_with, called) in KNOBS.items():
        sweeps = _variants(report, knob, grids, {f"{knob} {value}": (knob, value) for value in values})
        points = [(sweep, point) for sweep in sweeps.values() for point in sweep.points]
        lines = ["| | " + " | ".join(_points(sweeps)) + " |", "|---" * (1 + len(points)) + "|"]
        curves: dict[str, list[tuple[float, float, str]]] = {}
        for value in values:
            cells = []
            for title, (sweep, point) in zip(_points(sweeps), points, strict=True):
                policy = f"{knob} {value}"
                in_time = 100 * sweep.mean(point, policy, "slo_attainment")
                cells.append(
                    f"{in_time:.1f} / {sweep.mean(point, policy, 'mean_latency_s'):.1f} / "
                    f"{sweep.mean(point, policy, 'p99_latency_s'):.0f}"
                )
                paid = sweep.mean(point, policy, paid_with) / sweep.mean(point, "fcfs", paid_with)
                curves.setdefault(title, []).append((paid, in_time, value))
            lines.append(f"| {knob} {value} | {' | '.join(cells)} |")
        report.add(*lines, "")
        plot_trade_off(
            curves,
            report.picture(knob, f"Labels are values of `{knob}`."),
            x_label=f"{called} over that of fcfs",
            y_label="requests in time, %",
        )


def _points(sweeps: Mapping[str, Sweep]) -> list[str]:
    return [f"{title}: {point}" for title, sweep in sweeps.items() for point in sweep.points]


def _mechanisms(report: Report, grids: Mapping[str, Grid]) -> None:
    sweeps = _variants(report, "without", grids, WITHOUT)
    report.add("## What each mechanism does", "", *_changes_table(sweeps, WITHOUT), "")


def _wrong_costs(report: Report, grids: Mapping[str, Grid]) -> None:
    disturbed = {
        "every task off by 20 %": SimulationOptions(4, jitter=0.2),
        "half of the ranks 20 % slower": SimulationOptions(4, slow_ranks=(SlowRank(0, 1.2), SlowRank(1, 1.2))),
        "5 ms from decision to start": SimulationOptions(4, dispatch_latency_s=0.005),
    }
    if "qwen" not in grids:
        return
    few = tuple(policy for policy in POLICIES if policy.label in (DEFAULT, *FAST))
    sweeps = {
        name: report.sweep(name, replace(grids["qwen"], policies=few, options=options, bound=False))
        for name, options in disturbed.items()
    }
    report.add(
        "## Wrong costs and slow starts", "", "In time, % / mean latency, s.", "", *_short_table(sweeps), ""
    )


def _changes_table(sweeps: Mapping[str, Sweep], arguments: Mapping[str, object]) -> list[str]:
    """The default, and what every variant changes in it."""
    lines = [
        "Requests in time, % / mean latency, s; below what each change adds to the default, in points / times.",
        "",
        "| | " + " | ".join(_points(sweeps)) + " |",
        "|---" * (1 + len(_points(sweeps))) + "|",
    ]

    def row(title: str, cell: Callable[[Sweep, Point], str]) -> None:
        cells = [cell(sweep, point) for sweep in sweeps.values() for point in sweep.points]
        lines.append(f"| {title} | {' | '.join(cells)} |")

    row(DEFAULT, lambda sweep, point: _in_time_and_mean(sweep, point, DEFAULT))
    for label in arguments:

        def changed(sweep: Sweep, point: Point, label: str = label) -> str:
            points = sweep.difference(point, label, DEFAULT, "slo_attainment")
            ratio = sweep.mean(point, label, "mean_latency_s") / sweep.mean(point, DEFAULT, "mean_latency_s")
            return f"{'+' if points.mean > 0 else ''}{percent(points)} / {ratio:.2f}"

        row(label, changed)
    return lines


def _short_table(sweeps: Mapping[str, Sweep]) -> list[str]:
    policies = next(iter(sweeps.values())).policies
    lines = ["| | " + " | ".join(policies) + " |", "|---" * (1 + len(policies)) + "|"]
    for title, sweep in sweeps.items():
        for point in sweep.points:
            cells = [_in_time_and_mean(sweep, point, name) for name in policies]
            lines.append(f"| {title}, load {point.load:g} | {' | '.join(cells)} |")
    return lines


def _in_time_and_mean(sweep: Sweep, point: Point, policy: str) -> str:
    in_time, mean_s = (sweep.mean(point, policy, metric) for metric in ("slo_attainment", "mean_latency_s"))
    return f"{100 * in_time:.1f} / {mean_s:.1f}"


PARTS: Mapping[str, Callable[[Report, Mapping[str, Grid]], None]] = {
    "knobs": _knobs,
    "mechanisms": _mechanisms,
    "wrong costs": _wrong_costs,
}
