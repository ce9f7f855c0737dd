"""Timeline pictures: one lane per rank, colour = request, label = sequence-parallel degree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfdit.observe.timeline import MIGRATE, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

WIDTH_IN = 15.0
LANE_HEIGHT_IN = 0.52
LOW_LANE_HEIGHT_IN = 0.26
DPI = 130
_BAR_HEIGHT = 0.82
_MIGRATION_HEIGHT = 0.12
_MAX_LEGEND_ENTRIES = 28
_CHAR_WIDTH_IN = 0.078
# The task kinds that are not denoising: hatch and legend text.
_HATCHES = {"encode": "////", "prepare": "....", "decode": "xxxx"}
# Told apart side by side and under black or white text; repeats after 20 requests.
_PALETTE = (
    *(
        "#4477aa",
        "#ee8866",
        "#44aa77",
        "#cc6677",
        "#ddcc55",
        "#88ccee",
        "#aa4499",
        "#999933",
        "#77aadd",
        "#bb5566",
    ),
    *(
        "#117733",
        "#ee99aa",
        "#332288",
        "#bbcc33",
        "#009988",
        "#ee7733",
        "#6699cc",
        "#997700",
        "#aaaa00",
        "#882255",
    ),
)
# For classes of requests: few, told apart by the colour-blind.
_CLASS_PALETTE = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#997700", "#66ccee")


def plot_timeline(
    spans: Sequence[Span],
    path: str | Path,
    *,
    title: str = "",
    num_ranks: int | None = None,
    names: Mapping[str, str] | None = None,
    classes: Mapping[str, str] | None = None,
) -> None:
    """Write a PNG of one timeline; options as those of :func:`plot_comparison`."""
    plot_comparison({title: spans}, path, num_ranks=num_ranks, names=names, classes=classes)


def plot_comparison(
    timelines: Mapping[str, Sequence[Span]],
    path: str | Path,
    *,
    num_ranks: int | None = None,
    names: Mapping[str, str] | None = None,
    classes: Mapping[str, str] | None = None,
    pale: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Write a PNG of several timelines, by title, one below the other on one time axis.

    A request has the same colour in all of them: its own, or that of its class where ``classes`` has the classes
    of the requests. ``names`` gives requests other names in the legend, ``num_ranks`` adds idle lanes.
    ``pale`` has by title the requests to draw pale: those that came too late, as the legend says.
    """
    # The class instead of pyplot: no global state, no display, and safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = count_lanes(timelines, num_ranks)
    lane_in = LANE_HEIGHT_IN if classes is None else LOW_LANE_HEIGHT_IN
    panel_in = lanes * lane_in + 0.55
    figure = Figure(figsize=(WIDTH_IN, len(timelines) * panel_in + 1.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    draw_comparison(figure, timelines, lanes=lanes, names=names, classes=classes, pale=pale)
    figure.savefig(path, format="png")


def count_lanes(timelines: Mapping[str, Sequence[Span]], num_ranks: int | None = None) -> int:
    everything = (span for spans in timelines.values() for span in spans)
    return max([num_ranks or 1, *(rank + 1 for span in everything for rank in span.ranks)])


def draw_comparison(
    figure: Figure | SubFigure,
    timelines: Mapping[str, Sequence[Span]],
    *,
    lanes: int,
    names: Mapping[str, str] | None = None,
    classes: Mapping[str, str] | None = None,
    pale: Mapping[str, Collection[str]] | None = None,
) -> None:
    """What :func:`plot_comparison` draws, into a figure or a part of one, ``WIDTH_IN`` wide."""
    everything = [span for spans in timelines.values() for span in spans]
    end_s = max((span.end_s for span in everything), default=1.0)
    requests = dict.fromkeys(span.request for span in sorted(everything, key=lambda span: span.start_s))
    keys = {request: (classes or {}).get(request, request) for request in requests}
    palette = _PALETTE if classes is None else _CLASS_PALETTE
    order = dict.fromkeys(keys.values()) if classes is None else sorted(set(keys.values()))
    colour_of = {key: palette[i % len(palette)] for i, key in enumerate(order)}
    colours = {request: colour_of[key] for request, key in keys.items()}
    all_axes: Any = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, spans) in zip(all_axes, timelines.items(), strict=True):
        _draw_lanes(axes, lanes, end_s, title)
        late = (pale or {}).get(title, ())
        own = {request: _paler(colour) if request in late else colour for request, colour in colours.items()}
        _draw_spans(axes, spans, own, inches_per_s=(WIDTH_IN - 1.0) / end_s)
    all_axes[-1].set_xlabel("seconds")
    kinds = {span.kind for span in everything}
    titles = colour_of if classes else {(names or {}).get(name, name): colour for name, colour in colours.items()}
    _draw_legend(figure, titles, kinds, has_pale=any((pale or {}).values()))


def _draw_lanes(axes: Axes, lanes: int, end_s: float, title: str) -> None:
    for rank in range(lanes):
        axes.axhspan(rank - _BAR_HEIGHT / 2, rank + _BAR_HEIGHT / 2, color="#f2f2f2", zorder=0)
    axes.set_yticks(range(lanes), [f"rank {rank}" for rank in range(lanes)])
    axes.set_ylim(lanes - 0.45, -0.55)
    axes.set_xlim(0, end_s)
    axes.tick_params(left=False)
    axes.grid(axis="x", color="white", linewidth=1, zorder=0.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)


def _draw_spans(axes: Axes, spans: Sequence[Span], colours: Mapping[str, str], *, inches_per_s: float) -> None:
    # Edges part neighbouring steps; around bars a few pixels wide they would only wash the colour out, so
    # that there they part requests.
    widths_in = sorted(span.duration_s * inches_per_s for span in spans)
    line_width = 0.4 if widths_in and widths_in[len(widths_in) // 2] > 0.05 else 0.0
    if not line_width:
        spans, line_width = _joined(spans, gap_s=0.02 / inches_per_s), 0.25
    # What looks alike is drawn at once: that is what drawing costs.
    alike: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for span in spans:
        colour = "#222222" if span.kind == MIGRATE else colours[span.request]
        alike.setdefault((colour, span.kind, span.rank), []).append((span.start_s, span.duration_s))
    for (colour, kind, rank), bars in alike.items():
        height = _MIGRATION_HEIGHT if kind == MIGRATE else _BAR_HEIGHT
        axes.broken_barh(
            bars,
            (rank + _BAR_HEIGHT / 2 - height if kind == MIGRATE else rank - height / 2, height),
            facecolor=colour,
            edgecolor="white",
            linewidth=line_width,
            hatch=_HATCHES.get(kind),
            zorder=3 if kind == MIGRATE else 2,
        )
    for label in _labels(spans, colours):
        needed_s = len(label.text) * _CHAR_WIDTH_IN / inches_per_s
        if label.end_s - label.start_s >= needed_s:
            # On the longest step if the text fits there: the middle of a run may be a gap.
            longest_s = label.longest.duration_s
            middle = label.longest if longest_s >= needed_s else label
            x = (middle.start_s + middle.end_s) / 2
            axes.text(
                x, label.longest.rank, label.text, ha="center", va="center", fontsize=8, color=label.ink, zorder=4
            )


def _joined(spans: Sequence[Span], *, gap_s: float) -> list[Span]:
    """One span for a run of steps of one request on the same ranks without gaps that could be seen."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.kind == MIGRATE, *_place(span))):
        last = joined[-1] if joined else None
        if last and (_run(span), span.kind) == (_run(last), last.kind) and span.start_s - last.end_s < gap_s:
            joined[-1] = replace(last, end_s=max(span.end_s, last.end_s))
        else:
            joined.append(span)
    return joined


@dataclass(frozen=True, slots=True)
class _Label:
    """The text of a run of steps, which lasts from ``start_s`` to ``end_s`` with gaps between the steps."""

    text: str
    ink: str
    start_s: float
    end_s: float
    longest: Span


def _labels(spans: Sequence[Span], colours: Mapping[str, str]) -> list[_Label]:
    """One label for each run of steps of one request on the same ranks at one degree.

    Only kinds without a hatch are labelled: a hatch says enough, and text on it is illegible.
    """
    ordered = sorted((span for span in spans if span.kind not in _HATCHES and span.kind != MIGRATE), key=_place)
    labels = []
    for (_, request, _, sp, cfg), group in groupby(ordered, key=_run):
        run = list(group)
        text = f"SP{sp}" if cfg == 1 else f"SP{sp}·CFG{cfg}"
        longest = max(run, key=lambda span: span.duration_s)
        labels.append(_Label(text, _ink(colours[request]), run[0].start_s, run[-1].end_s, longest))
    return labels


def _place(span: Span) -> tuple[int, float]:
    return span.rank, span.start_s


def _run(span: Span) -> tuple[int, str, tuple[int, ...], int, int]:
    return span.rank, span.request, span.ranks, span.sp, span.cfg


def _ink(background: str) -> str:
    """Black or white, whichever reads better on a ``#rrggbb`` colour."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _paler(colour: str) -> str:
    """Two thirds of the way to white, from and to ``#rrggbb``."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - part) // 3:02x}" for part in parts)


def _draw_legend(
    figure: Figure | SubFigure, titles: Mapping[str, str], kinds: set[str], *, has_pale: bool
) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=colour, label=title) for title, colour in titles.items()]
    if len(entries) > _MAX_LEGEND_ENTRIES:
        hidden = len(entries) - _MAX_LEGEND_ENTRIES
        entries = [*entries[:_MAX_LEGEND_ENTRIES], Patch(facecolor="none", label=f"and {hidden} more")]
    if has_pale:
        entries.append(Patch(facecolor=_paler("#555555"), label="pale: too late"))
    for kind, hatch in _HATCHES.items():
        if kind in kinds:
            entries.append(Patch(facecolor="#cccccc", edgecolor="white", hatch=hatch, label=kind))
    if MIGRATE in kinds:
        entries.append(Patch(facecolor="#222222", label="migration"))
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=min(8, len(entries) or 1),
        fontsize=8,
        frameon=False,
        handlelength=1.4,
    )
