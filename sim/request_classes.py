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
    """``service_s`` is the time alone on one rank, ``deadline_s`` counts from arrival.

    ``share`` is that of its model and number of steps among requests of its size.
    """

    name: str
    model: str
    shape: Shape
    num_steps: int
    cfg: bool
    service_s: float
    deadline_s: float
    share: float = 1.0


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
    model = only_model(cost, model)
    cfg = is_guided(cost, model)
    shapes = standard_shapes(cost, model)
    named = {str(side): Shape(side, side) for side in sides} or dict(zip(SIZES, shapes, strict=True))
    graphs = GraphBuilder(cost, num_ranks=1)
    services_s = [
        graphs.service_s(Request(name, model, shape, num_steps, 0.0, cfg=cfg)) for name, shape in named.items()
    ]
    if not sides:
        factors = standard_factors(shapes) if deadline_factors is None else _checked(deadline_factors)
        deadlines_s = [factor * service_s for factor, service_s in zip(factors, services_s, strict=True)]
    return tuple(
        RequestClass(name, model, shape, num_steps, cfg, service_s, deadline_s * slo_scale)
        for (name, shape), service_s, deadline_s in zip(named.items(), services_s, deadlines_s, strict=True)
    )


def standard_shapes(cost: TableCostModel, model: str) -> tuple[Shape, Shape, Shape]:
    """The smallest, the middle and the largest that the table has for ``model`` on one rank.

    Raises ``ValueError`` if it has none.
    """
    cfg = is_guided(cost, model)
    entries = [e for e in cost.table.entries if (e.model, e.task, e.cfg) == (model, TaskKind.DENOISE, cfg)]
    alone = {e.shape for e in entries if e.parallel == SINGLE and e.batch == 1}
    shapes = sorted(alone, key=lambda shape: (shape.num_tokens, shape.height, shape.width))
    if not shapes:
        raise ValueError(f"the cost table has no time of a denoising step of {model!r} on one rank")
    return shapes[0], shapes[len(shapes) // 2], shapes[-1]


def standard_factors(shapes: Sequence[Shape]) -> tuple[float, ...]:
    return IMAGE_FACTORS if shapes[-1].num_frames == 1 else VIDEO_FACTORS


def is_guided(cost: TableCostModel, model: str) -> bool:
    """Whether the table has times of ``model`` with guidance, which its requests then have."""
    return any(e.cfg for e in cost.table.entries if (e.model, e.task) == (model, TaskKind.DENOISE))


def _checked(factors: Sequence[float]) -> Sequence[float]:
    if len(factors) != len(SIZES) or not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ValueError(f"deadline factors must be {len(SIZES)} positive numbers, got {list(factors)}")
    return factors


def known_models(cost: TableCostModel) -> list[str]:
    return list(dict.fromkeys(entry.model for entry in cost.table.entries))


def only_model(cost: TableCostModel, model: str | None) -> str:
    """``model``, or the only one that has costs. Raises ``ValueError`` if it has none, or several do."""
    models = known_models(cost)
    if model is None and len(models) == 1:
        return models[0]
    if model not in models:
        wrong = "which model: the cost table has several" if model is None else f"no cost for model {model!r}"
        raise ValueError(f"{wrong}, known: {', '.join(models)}")
    return model
