"""Pictures of comparisons: deadlines met against load, and distributions of latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gfdit.observe.timeline import Span
from gfdit.sim.bounds.possible import KNOWN, ROLLING, SIDES, UPPER
from gfdit.sim.plan import Answer, Requirement
from gfdit.sim.sweep import Point, Sweep
from gfdit.sim.timeline_plot import LANE_HEIGHT_IN, LOW_LANE_HEIGHT_IN, WIDTH_IN, draw_comparison
from gfdit.sim.trace import TraceRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110
PANEL_WIDTH_IN = 4.6
PANEL_HEIGHT_IN = 3.3
LANES_DPI = 78
MAX_COLUMNS = 3
MANY_REQUESTS = 20  # more than there are colours for
DODGE = 0.008  # of the axis, between the markers of two policies
# Paul Tol's bright and vibrant colours: told apart by the colour-blind too, and by their markers.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ee7733", "#aa3377", "#66ccee", "#997700", "#009988", "#332288")
_MARKERS = "osD^vP*X<"
_SIDE_STYLES = {UPPER: "--", KNOWN: ":", ROLLING: "-."}
_AXIS_LABELS = MappingProxyType(
    {
        "load": "load / capacity",
        "per_min": "requests a minute",
        "slo_scale": "SLO scale (deadlines multiplied by it)",
        "num_ranks": "ranks",
    }
)


def plot_attainment(sweep: Sweep, path: str | Path, *, grace_s: float = 0.0) -> None:
    """Write a PNG: a panel per workload, mean share of deadlines met and its 95 % confidence interval.

    The horizontal axis is what the sweep varies most: the load, the rate or the SLO scale.
    """
    panels = sweep.groups()
    figure, all_axes = _figure(len(panels))
    for axes, (common, members) in zip(all_axes, panels.items(), strict=True):
        for index, policy in enumerate(sweep.policies):
            _draw_line(axes, sweep, members, policy, index)
        _finish(axes, str(common), _AXIS_LABELS[sweep.axis])
        axes.set_ylim(0, 102)
    late = f" or by less than {grace_s:g} s late" if grace_s else ""
    figure.supylabel(f"requests in time{late}, %", fontsize=10)
    _legend(figure, all_axes[0])
    figure.savefig(path, format="png")


def plot_latencies(panels: Mapping[str, Mapping[str, Sequence[float]]], path: str | Path) -> None:
    """Write a PNG: a panel per title, the share of completed requests within a time for every policy.

    ``panels`` has seconds by title and policy.
    """
    figure, all_axes = _figure(len(panels))
    for axes, (title, latencies_s) in zip(all_axes, panels.items(), strict=True):
        draw_latencies(axes, latencies_s)
        _finish(axes, title, "latency, s")
    figure.supylabel("completed requests, %", fontsize=10)
    _legend(figure, all_axes[0])
    figure.savefig(path, format="png")


def plot_trade_off(
    curves: Mapping[str, Sequence[tuple[float, float, str]]], path: str | Path, *, x_label: str, y_label: str
) -> None:
    """Write a PNG with a curve per title: (x, y, label) of its points, in their order."""
    figure, (axes,) = _figure(1)
    figure.set_size_inches(1.6 * PANEL_WIDTH_IN, 1.4 * PANEL_HEIGHT_IN)
    for index, (title, points) in enumerate(curves.items()):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        x, y, labels = zip(*points, strict=True)
        axes.plot(x, y, color=colour, marker=marker, ms=4.5, lw=1.5, label=title)
        for at, label in zip(zip(x, y, strict=True), labels, strict=True):
            axes.annotate(label, at, xytext=(3, 4), textcoords="offset points", fontsize=7.5, color=colour)
    _finish(axes, "", x_label)
    axes.set_ylabel(y_label, fontsize=9)
    _legend(figure, axes)
    figure.savefig(path, format="png")


def plot_plan(answers: Sequence[Answer], requirements: Sequence[Requirement], path: str | Path) -> None:
    """Write a PNG: a panel per requirement, mean and bound against ranks, target and answer marked."""
    from matplotlib.ticker import FixedLocator, ScalarFormatter

    figure, all_axes = _figure(len(requirements), share_y=False)
    for number, (axes, requirement) in enumerate(zip(all_axes, requirements, strict=True)):
        scale = 100 if requirement.kind == "attainment" else 1
        for index, answer in enumerate(answers):
            colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
            tried = list(answer.verdicts.values())
            ranks = [verdict.num_ranks for verdict in tried]
            means = [scale * verdict.means[number] for verdict in tried]
            bounds = [scale * verdict.bounds[number] for verdict in tried]
            axes.plot(ranks, means, color=colour, marker=marker, ms=4.5, lw=1.5, label=answer.policy)
            axes.plot(ranks, bounds, color=colour, lw=1.0, ls=":")
            if answer.num_ranks is not None:
                axes.axvline(answer.num_ranks, color=colour, lw=0.8, alpha=0.5)
        axes.axhline(scale * requirement.limit, color="#555555", ls="--", lw=1.2)
        _finish(axes, f"target: {requirement}", "ranks (dotted: the bound that has to hold)")
        axes.set_ylabel("requests in time, %" if scale == 100 else "latency, s", fontsize=9)
        axes.set_xscale("log", base=2)  # the search doubles
        most = max(ranks for answer in answers for ranks in answer.verdicts)
        axes.xaxis.set_major_locator(FixedLocator([2**power for power in range(most.bit_length() + 1)]))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        if scale == 100:
            axes.set_ylim(0, 102)
    _legend(figure, all_axes[0])
    figure.savefig(path, format="png")


def plot_runs(
    trace: Sequence[TraceRequest],
    results: Mapping[str, Mapping[str, Any]],
    spans: Mapping[str, Sequence[Span]],
    path: str | Path,
    *,
    num_ranks: int,
) -> None:
    """Write a PNG of runs of one trace, by policy: what ran where, and above it the latencies of several.

    ``results`` are result files. Colours are the requests' or, if there are many, those of their classes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    many = len(trace) > MANY_REQUESTS
    titles = {name: f"{name}: {result['slo_attainment']:.0%} in time" for name, result in results.items()}
    late = {
        name: [request["id"] for request in result["requests"] if not request["met_deadline"]]
        for name, result in results.items()
    }
    lane_in = LOW_LANE_HEIGHT_IN if many else LANE_HEIGHT_IN
    lanes_in = len(spans) * (num_ranks * lane_in + 0.55) + 1.2
    heights_in = ([PANEL_HEIGHT_IN] if len(results) > 1 else []) + [lanes_in]
    figure = Figure(figsize=(WIDTH_IN, sum(heights_in)), dpi=LANES_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(heights_in), 1, squeeze=False, height_ratios=heights_in)[:, 0]
    if len(results) > 1:
        axes = parts[0].subplots()
        draw_latencies(axes, {name: completed_latencies(result) for name, result in results.items()})
        _finish(axes, "", "latency, s")
        axes.set_ylabel("completed requests, %", fontsize=9)
        axes.legend(fontsize=9, frameon=False)
    draw_comparison(
        parts[-1],
        {titles[name]: spans[name] for name in results},
        lanes=num_ranks,
        classes={request.id: request.slo_class for request in trace} if many else None,
        pale={titles[name]: late[name] for name in results},
    )
    figure.savefig(path, format="png")


def completed_latencies(result: Mapping[str, Any]) -> list[float]:
    return [request["latency_s"] for request in result["requests"] if request["latency_s"] is not None]


def draw_latencies(axes: Axes, latencies_s: Mapping[str, Sequence[float]]) -> None:
    """Cumulative distributions over a logarithmic axis."""
    from matplotlib.ticker import LogLocator

    for index, (policy, values_s) in enumerate(latencies_s.items()):
        ordered = np.sort(np.asarray(values_s, dtype=float))
        share = np.arange(1, len(ordered) + 1) / max(len(ordered), 1) * 100
        axes.step(ordered, share, where="post", color=_COLOURS[index % len(_COLOURS)], lw=1.6, label=policy)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0, 102)


def pooled_latencies(sweep: Sweep, point: Point) -> dict[str, list[float]]:
    """Of all seeds, by policy."""
    return {
        policy: [latency_s for values in sweep.values(point, policy, "latencies_s") for latency_s in values]
        for policy in sweep.policies
        if policy not in SIDES
    }


def _draw_line(axes: Axes, sweep: Sweep, points: Sequence[Point], policy: str, index: int) -> None:
    found = [
        (getattr(point, sweep.axis), sweep.estimate(point, policy, "slo_attainment_grace")) for point in points
    ]
    rows = [(at or 0.0, 100 * e.mean, 100 * e.low, 100 * e.high) for at, e in found if e is not None]
    x, mean, low, high = (np.array(column) for column in zip(*sorted(rows), strict=True))
    if policy in SIDES:
        axes.plot(x, mean, color="#555555", ls=_SIDE_STYLES[policy], lw=1.4, label=policy, zorder=1)
        return
    colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
    # Side by side, so that intervals at one load do not hide each other.
    x = x + (index - (len(sweep.policies) - 1) / 2) * DODGE * (x.max() - x.min())
    axes.vlines(x, low, high, color=colour, lw=1.1, alpha=0.75, zorder=2)
    axes.plot(x, mean, color=colour, marker=marker, ms=4.5, lw=1.5, label=policy, zorder=3)


def _figure(num_panels: int, *, share_y: bool = True) -> tuple[Figure, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(num_panels, MAX_COLUMNS)
    rows = -(-num_panels // columns)
    size = (columns * PANEL_WIDTH_IN + 0.4, rows * PANEL_HEIGHT_IN + 0.6)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False).flatten()
    for spare in grid[num_panels:]:
        spare.remove()
    return figure, list(grid[:num_panels])


def _finish(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_xlabel(x_label, fontsize=9)
    axes.grid(color="#e4e4e4", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    width_in = sum(0.62 + 0.085 * len(label) for label in labels)
    num_rows = math.ceil(width_in / figure.get_figwidth())
    ncols = math.ceil(len(labels) / num_rows) if labels else 1
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize=9, frameon=False)
