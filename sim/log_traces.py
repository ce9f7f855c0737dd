"""From requests as a log has them to a trace: what it does not say is drawn, its time is squeezed to a load."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from gfdit.core.cost.table import TableCostModel
from gfdit.core.tasks import Request, Shape
from gfdit.sim.arrivals import Pace
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.request_classes import is_guided, known_models
from gfdit.sim.shares import Shares, name_of
from gfdit.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request of a log, at ``arrival_s`` on the log's own clock; what is None the log does not say.

    ``deadline_s`` counts from the arrival.
    """

    arrival_s: float
    model: str | None = None
    shape: Shape | None = None
    num_steps: int | None = None
    slo_class: str | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """A class of requests: due after ``deadline_factor`` times what one takes alone on one rank."""

    name: str
    shape: Shape
    deadline_factor: float


@dataclass(frozen=True, slots=True)
class RequestMix:
    """What a log does not say of its requests.

    ``sizes`` are those of each model there may be; if there are several, classes are named by them as well. A size
    that the log itself gives is due after ``deadline_factor`` times the time on one rank.
    """

    models: Shares[str]
    sizes: Mapping[str, Shares[Size]]
    steps: Shares[int]
    deadline_factor: float
    slo_scale: float = 1.0


def trace_of(
    logged: Sequence[LoggedRequest],
    mix: RequestMix,
    cost: TableCostModel,
    *,
    pace: Pace,
    seed: int = 0,
) -> list[TraceRequest]:
    """``logged``, in order of time, as a trace whose first request arrives at 0 s; in whole microseconds.

    The same arguments make the same trace; other paces have the same requests. Raises ``ValueError`` if there are
    none, and for a model that the costs lack.
    """
    if not logged:
        raise ValueError("no request is left")
    draw = random.Random(seed)
    guided = {model for model in known_models(cost) if is_guided(cost, model)}
    graphs = GraphBuilder(cost, num_ranks=1)

    @cache
    def service_s(model: str, shape: Shape, num_steps: int) -> float:
        return graphs.service_s(Request("logged", model, shape, num_steps, 0.0, cfg=model in guided))

    width = len(str(len(logged) - 1))
    trace, work_s = [], 0.0
    for index, one in enumerate(logged):
        # All is drawn for every request, in this order: a column more or less changes nothing else.
        drawn_model, drawn_steps, position = mix.models.draw(draw), mix.steps.draw(draw), draw.random()
        model, num_steps = one.model or drawn_model, one.num_steps or drawn_steps
        size = mix.sizes[model].at(position)
        if one.shape is not None:
            size = Size(name_of(one.shape), one.shape, mix.deadline_factor)
        name = f"{model}/{size.name}" if len(mix.sizes) > 1 else size.name
        alone_s = service_s(model, size.shape, num_steps)
        work_s += alone_s
        deadline_s = mix.slo_scale * (one.deadline_s or size.deadline_factor * alone_s)
        trace.append(
            TraceRequest(
                id=f"r{index:0{width}}",
                arrival_s=one.arrival_s,
                model=model,
                height=size.shape.height,
                width=size.shape.width,
                num_frames=size.shape.num_frames,
                num_steps=num_steps,
                cfg=model in guided,
                slo_class=one.slo_class or name,
                deadline_s=round(deadline_s, 6),
            )
        )
    arrivals_s = pace.times_s([one.arrival_s for one in logged], work_s)
    return [replace(request, arrival_s=at_s) for request, at_s in zip(trace, arrivals_s, strict=True)]
