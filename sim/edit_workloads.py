"""Edits under masks: how large masks are, of which templates, and when they arrive (FlashPS, section 2.2).

The paper gives the means of three distributions, and shows that they are skewed, with a long tail. Beta
distributions are fitted to that by eye: their means are the paper's, their spread is not known to the digit. A
few templates are asked for most: 970 of them by Zipf's law, whose number is the paper's and whose law is
assumed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice, takewhile
from types import MappingProxyType

from gfdit.core.cost.table import TableCostModel
from gfdit.sim.arrivals import arrival_times, gamma
from gfdit.sim.costs.edit_costs import EditCosts, Tier
from gfdit.sim.costs.flux_costs import MODEL
from gfdit.sim.costs.flux_edits import NUM_STEPS, SIDE
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.trace import TraceRequest

NUM_TEMPLATES = 970  # FlashPS, section 2.2
SMALLEST, LARGEST = 0.01, 1.0
DEADLINE_FACTORS = (2.0, 4.0, 8.0)
DURATION_S = 600.0
MAX_CV = 100.0
NUM_SAMPLES = 2000  # of masks, for the mean time of an edit
_ZIPF = tuple(accumulate(1 / (1 + rank) for rank in range(NUM_TEMPLATES)))


@dataclass(frozen=True, slots=True)
class EditWorkload:
    """Mask ratios are Beta distributed, clipped to [.01, 1]; a larger ``concentration`` scatters them less."""

    mean_ratio: float
    concentration: float

    def mask_ratio(self, draw: random.Random) -> float:
        painted = gamma(draw, self.mean_ratio * self.concentration)
        rest = gamma(draw, (1 - self.mean_ratio) * self.concentration)
        ratio = painted / (painted + rest) if painted + rest > 0 else SMALLEST
        return round(min(LARGEST, max(SMALLEST, ratio)), 4)


EDITS: Mapping[str, EditWorkload] = MappingProxyType(
    {
        "edits-own": EditWorkload(0.11, 6.0),  # face swaps and the like: the paper's own trace
        "edits-public": EditWorkload(0.19, 4.0),  # restoration of images just made
        "edits-try-on": EditWorkload(0.35, 6.0),  # garments
    }
)


@cache
def template_names() -> tuple[str, ...]:
    """The one asked for most first."""
    return tuple(f"t{rank}" for rank in range(NUM_TEMPLATES))


class EditTimes:
    """What an edit takes alone on one rank whose host has its template."""

    def __init__(self, cost: TableCostModel, edits: EditCosts, num_steps: int = NUM_STEPS) -> None:
        self._graphs, self._edits, self.num_steps = GraphBuilder(cost, num_ranks=1), edits, num_steps
        self._known: dict[int, float] = {}  # by percent

    def alone_s(self, mask_ratio: float) -> float:
        """Raises ``ValueError`` if the table lacks a time."""
        percent = self._edits.percent(mask_ratio, Tier.HOST)
        if percent not in self._known:
            line = TraceRequest("edit", 0.0, MODEL, SIDE, SIDE, 1, self.num_steps)
            self._known[percent] = self._graphs.service_s(line.request(computed_percent=percent))
        return self._known[percent]

    def mean_s(self, workload: EditWorkload) -> float:
        draw = random.Random(0)
        return sum(self.alone_s(workload.mask_ratio(draw)) for _ in range(NUM_SAMPLES)) / NUM_SAMPLES


def generate_edits(
    workload: EditWorkload,
    times: EditTimes,
    *,
    num_ranks: int,
    seed: int,
    load: float | None = None,
    per_min: float | None = None,
    cv: float = 1.0,
    duration_s: float | None = None,
    num_requests: int | None = None,
    slo_scale: float = 1.0,
) -> list[TraceRequest]:
    """A trace of edits of FLUX at 1024 x 1024 that the same arguments always reproduce; in whole microseconds.

    Either ``load`` (1: edits alone on a rank each are all that ``num_ranks`` have to give) or ``per_min`` is
    given. Gaps have ``cv`` as their coefficient of variation. Deadlines are :data:`DEADLINE_FACTORS`, evenly,
    times the time alone, times ``slo_scale``. Ten minutes long unless ``duration_s`` or ``num_requests`` says
    otherwise. The same seed has the same edits at any rate. Raises ``ValueError`` naming what is out of range,
    and if nothing arrives.
    """
    if (load is None) == (per_min is None):
        raise ValueError("give either a load or a number of requests a minute")
    values = {"load": load, "per_min": per_min, "num_ranks": num_ranks, "duration_s": duration_s}
    for name, value in {**values, "num_requests": num_requests, "slo_scale": slo_scale}.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value}")
    if not 0 <= cv <= MAX_CV:
        raise ValueError(f"cv must be a number from 0 to {MAX_CV}, got {cv}")
    per_s = per_min / 60 if per_min is not None else (load or 0.0) * num_ranks / times.mean_s(workload)
    if duration_s is None and num_requests is None:
        duration_s = DURATION_S
    arrivals_s = list(
        takewhile(
            lambda at_s: duration_s is None or at_s < duration_s,
            islice(arrival_times([(DURATION_S, per_s)], random.Random(seed), cv), num_requests),
        )
    )
    if not arrivals_s:
        raise ValueError(f"no edit arrives within {duration_s:g} s with seed {seed}")
    draw = random.Random(f"masks {seed}")
    width = len(str(len(arrivals_s) - 1))
    return [
        _edit(f"e{index:0{width}}", at_s, workload, times, slo_scale, draw)
        for index, at_s in enumerate(arrivals_s)
    ]


def _edit(
    name: str, at_s: float, workload: EditWorkload, times: EditTimes, slo_scale: float, draw: random.Random
) -> TraceRequest:
    mask_ratio = workload.mask_ratio(draw)
    factor = DEADLINE_FACTORS[int(draw.random() * len(DEADLINE_FACTORS))]
    rank = min(bisect(_ZIPF, draw.random() * _ZIPF[-1]), NUM_TEMPLATES - 1)
    return TraceRequest(
        id=name,
        arrival_s=round(at_s, 6),
        model=MODEL,
        height=SIDE,
        width=SIDE,
        num_frames=1,
        num_steps=times.num_steps,
        slo_class=f"{factor:g}x",
        deadline_s=round(factor * slo_scale * times.alone_s(mask_ratio), 6),
        mask_ratio=mask_ratio,
        template=template_names()[rank],
    )
