"""The least parallelism that meets a deadline (TetriServe paper, section 4.2.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gfdit.core import ParallelSpec

ROUNDING_S = 1e-9

Degree = tuple[ParallelSpec, float]
"""A specification, and the seconds that a denoising step takes at it."""

Share = tuple[Degree, int]
"""A number of steps to run at a degree."""


def useful_degrees(step_s: Mapping[ParallelSpec, float], num_ranks: int) -> tuple[Degree, ...]:
    """Of ``step_s``, narrowest first, those that fit ``num_ranks`` and are faster than everything before them."""
    useful: list[Degree] = []
    for spec, seconds in step_s.items():
        if spec.size <= num_ranks and (not useful or seconds < useful[-1][1]):
            useful.append((spec, seconds))
    return tuple(useful)


def minimal_allocation(
    degrees: Sequence[Degree], num_steps: int, available_s: float, *, mixed: bool = True
) -> list[Share]:
    """How many steps to run at which degree to finish within ``available_s`` for the fewest rank-seconds.

    One degree or two, the narrower first: a linear program with two constraints needs no more, up to
    rounding to whole steps. Empty if even the fastest takes too long. Without ``mixed`` there is one degree.
    """
    (narrowest, narrowest_s), *others = degrees
    if num_steps * narrowest_s <= available_s + ROUNDING_S:
        rank_s = narrowest.size * narrowest_s
        if all([rank_s <= spec.size * seconds for spec, seconds in others]):
            return [(degrees[0], num_steps)]  # the usual case, decided early
    best: list[Share] = []
    best_s = math.inf
    for index, wide in enumerate(degrees):
        for narrow in degrees[: index + 1] if mixed else [wide]:
            num_wide = _num_wide(narrow[1], wide[1], num_steps, available_s)
            if num_wide is not None:
                mix = [(degree, n) for degree, n in ((narrow, num_steps - num_wide), (wide, num_wide)) if n]
                rank_s = sum([spec.size * seconds * n for (spec, seconds), n in mix])
                if rank_s < best_s:
                    best, best_s = mix, rank_s
    return best


def _num_wide(narrow_s: float, wide_s: float, num_steps: int, available_s: float) -> int | None:
    """How many steps must take ``wide_s`` instead of ``narrow_s``; None if all are too few."""
    late_s = num_steps * narrow_s - available_s
    if late_s <= ROUNDING_S:
        return 0
    saved_s = narrow_s - wide_s
    num_wide = math.ceil(late_s / saved_s - ROUNDING_S) if saved_s > 0 else num_steps + 1
    return num_wide if num_wide <= num_steps else None
