"""Arrival patterns of the GF-DiT evaluation (paper, section 6) and a plain Poisson one, at a chosen load.

A pattern is a list of phases of Poisson arrivals with a mix of small, medium and large requests. Its rates
only matter relative to each other: they are scaled so that the time its requests would take on one rank each
is the wanted share of what the ranks have to give during the pattern.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gfdit.core import Request, Shape, TaskKind
from gfdit.core.cost_table import TableCostModel
from gfdit.core.layouts import SINGLE
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.trace import TraceRequest

Mix = tuple[float, float, float]
"""Shares of small, medium and large requests."""

CLASSES = ("S", "M", "L")
DEFAULT_STEPS = 50
IMAGE_FACTORS = (1.5, 2.0, 6.0)
VIDEO_FACTORS = (2.0, 2.5, 3.5)
"""Deadlines of small, medium and large requests as multiples of their time alone on one rank."""


@dataclass(frozen=True, slots=True)
class Phase:
    duration_s: float
    per_min: float
    mix: Mix


# The mixes that the paper leaves open are even among the sizes it does not speak of.
_EVEN: Mix = (1 / 3, 1 / 3, 1 / 3)
_ONLY_S: Mix = (1.0, 0.0, 0.0)
_NO_S: Mix = (0.0, 0.5, 0.5)
_ONLY_L: Mix = (0.0, 0.0, 1.0)


def _mostly_s(share: float) -> Mix:
    return (share, (1 - share) / 2, (1 - share) / 2)


PATTERNS: Mapping[str, tuple[Phase, ...]] = MappingProxyType(
    {
        "short": (
            Phase(60, 0.8, _mostly_s(0.5)),
            Phase(300, 1.5, _mostly_s(0.6)),
            Phase(180, 2.5, _mostly_s(0.7)),
            Phase(60, 0.0, _EVEN),
        ),
        "foreground-burst": (
            Phase(180, 0.5, _NO_S),
            Phase(180, 3.0, _mostly_s(0.85)),
            Phase(540, 0.8, _EVEN),
            Phase(180, 3.0, _mostly_s(0.85)),
            Phase(720, 0.5, _EVEN),
        ),
        "inflight-burst": (
            Phase(300, 0.6, _ONLY_L),
            Phase(300, 0.0, _EVEN),
            Phase(180, 4.0, _ONLY_S),
            Phase(720, 0.0, _EVEN),
        ),
        "five-phase": (
            Phase(600, 0.8, _EVEN),
            Phase(900, 1.4, _EVEN),
            Phase(900, 2.4, (0.275, 0.275, 0.45)),
            Phase(600, 1.2, _EVEN),
            Phase(600, 0.6, _EVEN),
        ),
        "poisson": (Phase(600, 1.0, _EVEN),),
    }
)


@dataclass(frozen=True, slots=True)
class RequestClass:
    """One of the three sizes. ``service_s`` is its time alone on one rank."""

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
) -> tuple[RequestClass, ...]:
    """Small, medium and large: the smallest, the middle and the largest shape of ``model`` in the table.

    Guidance is on if the table has times for it. Raises ``ValueError`` for a table that does not say which
    model, or lacks its times on one rank.
    """
    if num_steps < 1:
        raise ValueError(f"the number of steps must be at least 1, got {num_steps}")
    model = _only_model(cost, model)
    entries = [e for e in cost.table.entries if (e.model, e.task) == (model, TaskKind.DENOISE)]
    cfg = any(entry.cfg for entry in entries)
    alone = {e.shape for e in entries if e.parallel == SINGLE and e.batch == 1 and e.cfg == cfg}
    shapes = sorted(alone, key=lambda shape: (shape.num_tokens, shape.height, shape.width))
    if not shapes:
        raise ValueError(f"the cost table has no time of a denoising step of {model!r} on one rank")
    factors = deadline_factors or (IMAGE_FACTORS if shapes[-1].num_frames == 1 else VIDEO_FACTORS)
    if len(factors) != len(CLASSES) or not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ValueError(f"deadline factors must be {len(CLASSES)} positive numbers, got {list(factors)}")
    graphs = GraphBuilder(cost, num_ranks=1)
    classes = []
    for name, shape, factor in zip(
        CLASSES, (shapes[0], shapes[len(shapes) // 2], shapes[-1]), factors, strict=True
    ):
        service_s = graphs.service_s(Request(name, model, shape, num_steps, 0.0, cfg=cfg))
        classes.append(RequestClass(name, model, shape, num_steps, cfg, service_s, factor * service_s))
    return tuple(classes)


def generate(
    phases: Sequence[Phase], classes: Sequence[RequestClass], *, num_ranks: int, load: float, seed: int
) -> list[TraceRequest]:
    """A trace that the same arguments always reproduce; times are in whole microseconds.

    Raises ``ValueError`` if ranks or load are not positive, or if the load is so small that nothing arrives.
    """
    if num_ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, got {num_ranks}")
    if not (math.isfinite(load) and load > 0):
        raise ValueError(f"the load must be a positive number, got {load}")
    draw = random.Random(seed)
    scale = load * num_ranks * window_s(phases) / _expected_rank_s(phases, classes)
    arrivals = []
    phase_start_s = 0.0
    for phase in phases:
        phase_end_s = phase_start_s + phase.duration_s
        at_s = phase_start_s
        while phase.per_min > 0:
            at_s -= math.log(1.0 - draw.random()) * 60 / (phase.per_min * scale)
            if at_s >= phase_end_s:
                break
            arrivals.append((at_s, draw.choices(classes, phase.mix)[0]))
        phase_start_s = phase_end_s
    if not arrivals:
        raise ValueError(f"no request arrives at load {load} on {num_ranks} ranks with seed {seed}")
    width = len(str(len(arrivals) - 1))
    return [_trace_request(f"r{index:0{width}}", at_s, kind) for index, (at_s, kind) in enumerate(arrivals)]


def window_s(phases: Sequence[Phase]) -> float:
    return sum(phase.duration_s for phase in phases)


def offered_load(
    trace: Sequence[TraceRequest], classes: Sequence[RequestClass], *, num_ranks: int, over_s: float
) -> float:
    """What ``trace`` asks for in ``over_s`` seconds, as a share of what the ranks have to give."""
    service_s = {kind.name: kind.service_s for kind in classes}
    return sum(service_s[request.slo_class] for request in trace) / (num_ranks * over_s)


def _only_model(cost: TableCostModel, model: str | None) -> str:
    models = list(dict.fromkeys(entry.model for entry in cost.table.entries))
    if model is None and len(models) == 1:
        return models[0]
    if model not in models:
        wrong = "which model: the cost table has several" if model is None else f"no cost for model {model!r}"
        raise ValueError(f"{wrong}, known: {', '.join(models)}")
    return model


def _expected_rank_s(phases: Sequence[Phase], classes: Sequence[RequestClass]) -> float:
    return sum(
        phase.duration_s / 60 * phase.per_min * share * kind.service_s
        for phase in phases
        for share, kind in zip(phase.mix, classes, strict=True)
    )


def _trace_request(request_id: str, at_s: float, kind: RequestClass) -> TraceRequest:
    return TraceRequest(
        id=request_id,
        arrival_s=round(at_s, 6),
        model=kind.model,
        height=kind.shape.height,
        width=kind.shape.width,
        num_frames=kind.shape.num_frames,
        num_steps=kind.num_steps,
        cfg=kind.cfg,
        slo_class=kind.name,
        deadline_s=round(kind.deadline_s, 6),
    )
