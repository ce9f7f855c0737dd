"""The classes of requests a workload mixes: what they generate, and by when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gfdit.core import Request, Shape, TaskKind
from gfdit.core.cost.table import TableCostModel
from gfdit.core.layouts import SINGLE
from gfdit.sim.graphs import GraphBuilder

SIZES = ("S", "M", "L")
DEFAULT_STEPS = 50
IMAGE_FACTORS = (1.5, 2.0, 6.0)
VIDEO_FACTORS = (2.0, 2.5, 3.5)
"""Deadlines of small, medium and large requests as multiples of their time alone on one rank (GF-DiT paper)."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """``service_s`` is the time alone on one rank, ``deadline_s`` counts from arrival."""

    name: str
    model: str
    shape: Shape
    num_steps: int
    cfg: bool
    service_s: float
    deadline_s: float


def request_classes(
    cost: TableCostModel,
    *,
    model: str | None = None,
    num_steps: int = DEFAULT_STEPS,
    deadline_factors: Sequence[float] | None = None,
    sides: Sequence[int] = (),
    deadlines_s: Sequence[float] = (),
    slo_scale: float = 1.0,
) -> tuple[RequestClass, ...]:
    """Small, medium and large: the smallest, the middle and the largest shape of ``model`` in the table.

    With ``sides`` square images of so many pixels instead, due after ``deadlines_s``, named by their sides.
    Guidance is on if the table has times for it. Raises ``ValueError`` for a table that does not say which model,
    or lacks its times on one rank, and for numbers out of range.
    """
    if num_steps < 1:
        raise ValueError(f"the number of steps must be at least 1, got {num_steps}")
    if not (math.isfinite(slo_scale) and slo_scale > 0):
        raise ValueError(f"the SLO scale must be a positive number, got {slo_scale}")
    if sides and deadline_factors:
        raise ValueError("deadline factors are for small, medium and large requests; this workload has deadlines")
    model = _only_model(cost, model)
    entries = [e for e in cost.table.entries if (e.model, e.task) == (model, TaskKind.DENOISE)]
    cfg = any(entry.cfg for entry in entries)
    alone = {e.shape for e in entries if e.parallel == SINGLE and e.batch == 1 and e.cfg == cfg}
    shapes = sorted(alone, key=lambda shape: (shape.num_tokens, shape.height, shape.width))
    if not shapes:
        raise ValueError(f"the cost table has no time of a denoising step of {model!r} on one rank")
    named = {str(side): Shape(side, side) for side in sides}
    named = named or dict(zip(SIZES, (shapes[0], shapes[len(shapes) // 2], shapes[-1]), strict=True))
    graphs = GraphBuilder(cost, num_ranks=1)
    services_s = [
        graphs.service_s(Request(name, model, shape, num_steps, 0.0, cfg=cfg)) for name, shape in named.items()
    ]
    if not sides:
        factors = _factors(deadline_factors, shapes[-1])
        deadlines_s = [factor * service_s for factor, service_s in zip(factors, services_s, strict=True)]
    return tuple(
        RequestClass(name, model, shape, num_steps, cfg, service_s, deadline_s * slo_scale)
        for (name, shape), service_s, deadline_s in zip(named.items(), services_s, deadlines_s, strict=True)
    )


def _factors(given: Sequence[float] | None, largest: Shape) -> Sequence[float]:
    factors = given or (IMAGE_FACTORS if largest.num_frames == 1 else VIDEO_FACTORS)
    if len(factors) != len(SIZES) or not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ValueError(f"deadline factors must be {len(SIZES)} positive numbers, got {list(factors)}")
    return factors


def _only_model(cost: TableCostModel, model: str | None) -> str:
    models = list(dict.fromkeys(entry.model for entry in cost.table.entries))
    if model is None and len(models) == 1:
        return models[0]
    if model not in models:
        wrong = "which model: the cost table has several" if model is None else f"no cost for model {model!r}"
        raise ValueError(f"{wrong}, known: {', '.join(models)}")
    return model
