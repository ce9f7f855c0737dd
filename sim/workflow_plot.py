"""Pictures of workflows: a lane for every model, a box for every call, from left to right as they can run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfdit.workflow.compiling import CompiledWorkflow
from gfdit.workflow.recording import Node

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 110
COLUMN_IN = 0.62
LANE_IN = 0.52
NAMES_IN = 2.6
MAX_STEPS = 7  # more are left out in the middle
_FIRST = 4
_BOX = (0.74, 0.62)
# Paul Tol's bright colours, as in the other pictures.
_COLOURS = {
    "encode": "#ccbb44",
    "prepare": "#aa3377",
    "control": "#ee6677",
    "denoise": "#4477aa",
    "decode": "#228833",
}
FORMATS = (".png", ".svg")


def plot_workflows(workflows: Sequence[CompiledWorkflow], path: str | Path) -> None:
    """Write a PNG or SVG with one panel each. What is read while it is made has a dashed line.

    Of the calls of a model that read the same, a line goes to the first one.

    Raises ``ValueError`` for another ending.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if Path(path).suffix not in FORMATS:
        raise ValueError(f"{path}: a picture ends in {' or '.join(FORMATS)}")
    shown = [_shown(one) for one in workflows]
    columns = max(1 + max(_columns(nodes).values()) for nodes in shown)
    lanes = [len(_lanes(nodes)) for nodes in shown]
    size = NAMES_IN + columns * COLUMN_IN, sum(number * LANE_IN + 0.5 for number in lanes)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(workflows), 1, squeeze=False, height_ratios=[n + 1 for n in lanes])[:, 0]
    for axes, one, nodes in zip(panels, workflows, shown, strict=True):
        _draw(axes, nodes, columns)
        hidden = len(one.nodes) - len(nodes)
        left_out = f", {hidden} of them not drawn" if hidden else ""
        axes.set_title(f"{one.name}: {len(one.nodes)} tasks{left_out}", loc="left", fontsize=10.5)
    figure.savefig(path, format=Path(path).suffix[1:])


def _shown(one: CompiledWorkflow) -> list[Node]:
    steps = sorted({node.step for node in one.nodes.values() if node.step is not None})
    if len(steps) > MAX_STEPS:
        steps = [*steps[:_FIRST], *steps[_FIRST - MAX_STEPS + 1 :]]
    return [node for node in one.nodes.values() if node.step is None or node.step in steps]


def _columns(nodes: Sequence[Node]) -> dict[Node, int]:
    """The number of calls that have to be over before; what is deferred need not be."""
    column: dict[Node, int] = {}
    last = 0  # where steps are left out the next one follows all that is there
    for node in nodes:
        before = [value.node for value in node.values(deferred=False)]
        after = [column[one] for one in before if one in column]
        gap = len(after) < len(before)
        column[node] = last + 2 if gap and last not in after else 1 + max(after, default=-1)
        last = max(last, column[node]) if not gap else last
    return column


def _lanes(nodes: Sequence[Node]) -> dict[str, int]:
    return {name: lane for lane, name in enumerate(dict.fromkeys(node.name.partition("/")[0] for node in nodes))}


def _draw(axes: Axes, nodes: Sequence[Node], columns: int) -> None:
    lanes, column = _lanes(nodes), _columns(nodes)
    at = {node: (column[node], lanes[node.name.partition("/")[0]]) for node in nodes}
    for lane in lanes.values():
        axes.axhspan(lane - 0.41, lane + 0.41, color="#f2f2f2", zorder=0)
    drawn: set[tuple[Node, int]] = set()
    for node in nodes:
        for deferred in (False, True):
            for value in node.values(deferred=deferred):
                edge = value.node, at[node][1]  # the first reader in a lane, others would hide it
                if value.node in at and edge not in drawn:
                    drawn.add(edge)
                    _edge(axes, at[value.node], at[node], dashed=deferred)
        _box(axes, at[node], str(node.model.kind), "" if node.step is None else str(node.step))
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_xticks([])
    axes.tick_params(left=False, labelsize=8.5)
    for side in axes.spines.values():
        side.set_visible(False)


def _edge(axes: Axes, begin: tuple[int, int], end: tuple[int, int], *, dashed: bool) -> None:
    style: dict[str, Any] = {"ls": "--", "color": "#ee6677"} if dashed else {"ls": "-", "color": "#888888"}
    axes.annotate(
        "",
        xy=(
            end[0] - (0 if dashed else _BOX[0] / 2),
            end[1] - (_BOX[1] / 2 if end[1] > begin[1] and dashed else 0),
        ),
        xytext=(begin[0] + (0 if dashed else _BOX[0] / 2), begin[1]),
        arrowprops={"arrowstyle": "->", "lw": 0.9, "alpha": 0.8, **style},
        zorder=1,
    )


def _box(axes: Axes, at: tuple[int, int], kind: str, label: str) -> None:
    from matplotlib.patches import Rectangle

    width, height = _BOX
    corner = at[0] - width / 2, at[1] - height / 2
    axes.add_patch(Rectangle(corner, width, height, color=_COLOURS.get(kind, "#bbbbbb"), zorder=2))
    axes.text(*at, label or kind, color="white", fontsize=7, ha="center", va="center", zorder=3)
