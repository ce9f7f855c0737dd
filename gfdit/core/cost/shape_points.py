"""Values known for some shapes, and what they are for the others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping

from gfdit.core.tasks import Shape


class ShapePoints:
    """Values by group and shape. A shape that a group lacks is interpolated in tokens."""

    def __init__(self, points: Iterable[tuple[Hashable, Shape, float]]) -> None:
        self._exact: dict[Hashable, dict[Shape, float]] = {}
        for group, shape, value in points:
            self._exact.setdefault(group, {})[shape] = value
        self._curves = {group: _curve(shapes) for group, shapes in self._exact.items()}

    def __contains__(self, group: Hashable) -> bool:
        return group in self._exact

    def at(self, group: Hashable, shape: Shape) -> float | None:
        """None for a group without points."""
        if (shapes := self._exact.get(group)) is None:
            return None
        value = shapes.get(shape)
        return value if value is not None else _interpolate(self._curves[group], shape.num_tokens)

    def reach(self, group: Hashable, shape: Shape) -> bool:
        """Whether ``group`` has a point of ``shape``'s size or of a larger one."""
        return group in self._curves and shape.num_tokens <= self._curves[group][-1][0]


def _interpolate(curve: tuple[tuple[int, float], ...], num_tokens: int) -> float:
    """The value at ``num_tokens`` from points sorted by tokens: linear between them.

    Outside, the nearest segment goes on, never falling with size; below the smallest point never under its
    line through the origin's height, so that a cost stays positive. One point alone scales with tokens.
    """
    if len(curve) == 1:
        return curve[0][1] * num_tokens / curve[0][0]
    index = bisect_left(curve, (num_tokens, 0.0))
    right = min(max(index, 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    slope = (y1 - y0) / (x1 - x0)
    if num_tokens > curve[-1][0]:
        return y1 + max(0.0, slope) * (num_tokens - x1)
    if num_tokens < x0:
        return max(y0 + slope * (num_tokens - x0), y0 * num_tokens / x0)
    share = (num_tokens - x0) / (x1 - x0)
    return (1 - share) * y0 + share * y1  # positive whatever is rounded


def _curve(shapes: Mapping[Shape, float]) -> tuple[tuple[int, float], ...]:
    """(tokens, value) sorted by tokens; shapes of one length count as their mean."""
    by_tokens: dict[int, list[float]] = {}
    for shape, value in shapes.items():
        by_tokens.setdefault(shape.num_tokens, []).append(value)
    return tuple((tokens, sum(values) / len(values)) for tokens, values in sorted(by_tokens.items()))
