"""Workloads: arrival patterns of the published evaluations, at a chosen load or rate.

A workload is a list of phases, each with a rate and a mix of request classes. The rates of the GF-DiT patterns
(paper, section 6) and of ``poisson`` and ``gamma`` only matter relative to each other: they are scaled so that
the time its requests would take on one rank each is the wanted share of what the ranks have to give. The
TetriServe mixes (paper, section 6.1) have a rate of their own, 12 requests a minute.

``production-images`` imitates the log of a service, by :mod:`gfdit.sim.sessions` and ``tools/fit_arrivals.py``. It
is so bursty that no trace has the expected load: time is squeezed to the load of each, as with a log itself.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gfdit.core.cost.table import TableCostModel
from gfdit.sim.arrivals import Pace, arrival_times, pick
from gfdit.sim.request_classes import DEFAULT_STEPS, RequestClass, request_classes
from gfdit.sim.sessions import Sessions
from gfdit.sim.shares import Shares
from gfdit.sim.trace import TraceRequest

__all__ = [
    "DEFAULT_STEPS",
    "PATTERNS",
    "Phase",
    "RequestClass",
    "Workload",
    "generate",
    "offered_load",
    "request_classes",
    "workload_classes",
]

MAX_CV = 100.0

Mix = tuple[float, ...]
"""Shares of the classes, smallest first."""


@dataclass(frozen=True, slots=True)
class Phase:
    duration_s: float
    per_min: float
    mix: Mix


@dataclass(frozen=True, slots=True)
class Workload:
    """``cv`` is the coefficient of variation of the gaps between arrivals; 1 is Poisson.

    Without ``sides`` the classes are small, medium and large shapes of the cost table. With ``sides`` they are
    square images of so many pixels, with deadlines in seconds. ``steps`` are shares of numbers of denoising steps;
    without, all have ``num_steps``. With ``sessions`` there is one phase, whose mix alone counts, and without a
    duration or a number of requests there are ``num_requests``.
    """

    phases: tuple[Phase, ...]
    cv: float = 1.0
    sides: tuple[int, ...] = ()
    deadlines_s: tuple[float, ...] = ()
    num_steps: int = DEFAULT_STEPS
    steps: tuple[tuple[int, float], ...] = ()
    sessions: Sessions | None = None
    num_requests: int | None = None

    @property
    def has_rate(self) -> bool:
        """Its rates are those of an evaluation or a log; others only matter relative to each other."""
        return bool(self.sides) or self.sessions is not None

    @property
    def duration_s(self) -> float:
        return sum(phase.duration_s for phase in self.phases)

    @property
    def num_expected(self) -> float:
        """Requests in one turn of the phases at the rates written there."""
        return sum(phase.duration_s * phase.per_min / 60 for phase in self.phases)


# The mixes that the GF-DiT paper leaves open are even among the sizes it does not speak of.
_EVEN: Mix = (1 / 3, 1 / 3, 1 / 3)
_ONLY_S: Mix = (1.0, 0.0, 0.0)
_NO_S: Mix = (0.0, 0.5, 0.5)
_ONLY_L: Mix = (0.0, 0.0, 1.0)


def _mostly_s(share: float) -> Mix:
    return (share, (1 - share) / 2, (1 - share) / 2)


def _tetriserve(skew: float) -> Workload:
    """Shares grow with exp(skew x tokens / most tokens). 300 requests are expected, as many as its prompts.

    The paper does not say how many steps; see :mod:`gfdit.sim.flux_costs`.
    """
    sides = (256, 512, 1024, 2048)
    shares = tuple(math.exp(skew * (side / sides[-1]) ** 2) for side in sides)
    return Workload((Phase(1500, 12.0, shares),), sides=sides, deadlines_s=(1.5, 2.0, 3.0, 5.0), num_steps=20)


GENTD26 = Sessions(
    per_hour=6.21,
    rate_sigma=1.9,
    rate_memory_s=6 * 3600.0,
    size_shape=3.07,
    size_scale=6.63,
    gap_s=66.0,
    gap_sigma=0.8,
    script_share=0.0029,
    script_size=67.8,
    script_gap_s=1.24,
    script_gap_sigma=1.46,
)
"""Fitted to text-to-image requests 0 to 2,999 and 22,000 on of Alibaba's log GenTD26, in order of time."""
GENTD26_STEPS = (
    *((30, 0.919), (40, 0.046), (50, 0.016), (28, 0.004)),
    *((25, 0.003), (100, 0.002), (35, 0.002)),
)

PATTERNS: Mapping[str, Workload] = MappingProxyType(
    {
        "short": Workload(
            (
                Phase(60, 0.8, _mostly_s(0.5)),
                Phase(300, 1.5, _mostly_s(0.6)),
                Phase(180, 2.5, _mostly_s(0.7)),
                Phase(60, 0.0, _EVEN),
            )
        ),
        "foreground-burst": Workload(
            (
                Phase(180, 0.5, _NO_S),
                Phase(180, 3.0, _mostly_s(0.85)),
                Phase(540, 0.8, _EVEN),
                Phase(180, 3.0, _mostly_s(0.85)),
                Phase(720, 0.5, _EVEN),
            )
        ),
        "inflight-burst": Workload(
            (
                Phase(300, 0.6, _ONLY_L),
                Phase(300, 0.0, _EVEN),
                Phase(180, 4.0, _ONLY_S),
                Phase(720, 0.0, _EVEN),
            )
        ),
        "five-phase": Workload(
            (
                Phase(600, 0.8, _EVEN),
                Phase(900, 1.4, _EVEN),
                Phase(900, 2.4, (0.275, 0.275, 0.45)),
                Phase(600, 1.2, _EVEN),
                Phase(600, 0.6, _EVEN),
            )
        ),
        "poisson": Workload((Phase(600, 1.0, _EVEN),)),
        "gamma": Workload((Phase(600, 1.0, _EVEN),), cv=2.0),
        "production-images": Workload(
            (Phase(600, 1.0, (0.3, 0.5, 0.2)),),  # the log has no sizes: most images are of the middle one
            sessions=GENTD26,
            steps=GENTD26_STEPS,
            num_requests=400,
        ),
        "tetriserve-uniform": _tetriserve(skew=0.0),
        "tetriserve-skewed": _tetriserve(skew=1.0),
    }
)


def workload_classes(
    workload: Workload,
    cost: TableCostModel,
    *,
    model: str | None = None,
    models: Shares[str] | None = None,
    num_steps: int | None = None,
    deadline_factors: Sequence[float] | None = None,
    slo_scale: float = 1.0,
) -> tuple[RequestClass, ...]:
    """The classes of ``workload``, of one model or several; its own steps unless given; deadlines x ``slo_scale``.

    They are in rounds as long as a phase's mix: all sizes of one model and number of steps, then of the next.
    ``models`` are shares of requests, and their classes are named by them; without, all is of ``model``, or of the
    only one. Raises what :func:`request_classes` raises.
    """
    steps = workload.steps or ((workload.num_steps, 1.0),)
    if num_steps is not None:
        steps = ((num_steps, 1.0),)
    of_models: Sequence[tuple[str | None, float]] = [(model, 1.0)]
    if models is not None:
        of_models = list(zip(models.values, models.weights, strict=True))
    return tuple(
        replace(
            kind,
            name=f"{kind.model}/{kind.name}" if len(of_models) > 1 else kind.name,
            share=model_share * steps_share,
        )
        for one, model_share in of_models
        for number, steps_share in steps
        for kind in request_classes(
            cost,
            model=one,
            num_steps=number,
            deadline_factors=deadline_factors,
            sides=workload.sides,
            deadlines_s=workload.deadlines_s,
            slo_scale=slo_scale,
        )
    )


def generate(
    workload: Workload,
    classes: Sequence[RequestClass],
    *,
    num_ranks: int,
    seed: int,
    load: float | None = None,
    per_min: float | None = None,
    cv: float | None = None,
    duration_s: float | None = None,
    num_requests: int | None = None,
) -> list[TraceRequest]:
    """A trace that the same arguments always reproduce; times are in whole microseconds.

    At most one of ``load`` (relative to ``num_ranks``) and ``per_min`` (mean arrivals a minute) is given; without,
    the rates are the workload's own. The trace is one turn of the phases, or as long as ``duration_s`` or
    ``num_requests`` say, the phases repeating. Raises ``ValueError`` naming what is out of range, and if nothing
    arrives.

    A workload of sessions has exactly that load, or rate, from its first arrival to its last.
    """
    _check_range(num_ranks=num_ranks, load=load, per_min=per_min, duration_s=duration_s, num_requests=num_requests)
    if workload.sessions is not None:
        if cv is not None:
            raise ValueError("this workload has gaps as in a log, and no coefficient of variation to choose")
        pace = Pace(load=load, num_ranks=num_ranks, per_min=per_min)
        return _in_sessions(
            workload, workload.sessions, classes, pace, random.Random(seed), duration_s, num_requests
        )
    cv = workload.cv if cv is None else cv
    if not 0 <= cv <= MAX_CV:
        raise ValueError(f"cv must be a number from 0 to {MAX_CV}, got {cv}")
    scale = _scale(workload, classes, num_ranks, load, per_min)
    if duration_s is None and num_requests is None:
        duration_s = workload.duration_s
    draw = random.Random(seed)
    times_s = arrival_times(
        [(phase.duration_s, phase.per_min * scale / 60) for phase in workload.phases], draw, cv
    )
    arrivals = []
    for at_s in itertools.islice(times_s, num_requests):
        if duration_s is not None and at_s >= duration_s:
            break
        arrivals.append((at_s, classes[pick(_weights(_phase_at(workload, at_s), classes), draw)]))
    if not arrivals:
        wanted = f"load {load} on {num_ranks} ranks" if per_min is None else f"{per_min} a minute"
        raise ValueError(f"no request arrives at {wanted} with seed {seed}")
    return _trace(arrivals)


def _in_sessions(
    workload: Workload,
    sessions: Sessions,
    classes: Sequence[RequestClass],
    pace: Pace,
    draw: random.Random,
    duration_s: float | None,
    num_requests: int | None,
) -> list[TraceRequest]:
    """As many requests as fill ``duration_s`` at that pace, at most ``num_requests``."""
    if duration_s is None and num_requests is None:
        num_requests = workload.num_requests
    weights = _weights(workload.phases[0], classes)
    kinds: list[RequestClass] = []
    arrivals_s: list[float] = []
    work_s = 0.0
    for at_s in itertools.islice(sessions.arrival_times(draw), num_requests):
        kind = classes[pick(weights, draw)]
        span_s = pace.span_s(len(kinds) + 1, work_s + kind.service_s)
        if span_s is None:
            span_s = at_s - arrivals_s[0] if arrivals_s else 0.0
        if duration_s is not None and span_s > duration_s and kinds:
            break
        kinds.append(kind)
        arrivals_s.append(at_s)
        work_s += kind.service_s
    return _trace(list(zip(pace.times_s(arrivals_s, work_s), kinds, strict=True)))


def _trace(arrivals: Sequence[tuple[float, RequestClass]]) -> list[TraceRequest]:
    width = len(str(len(arrivals) - 1))
    return [_trace_request(f"r{index:0{width}}", at_s, kind) for index, (at_s, kind) in enumerate(arrivals)]


def _weights(phase: Phase, classes: Sequence[RequestClass]) -> list[float]:
    """Of each class: the phase's share of its size, and its own of that."""
    return [share * kind.share for share, kind in zip(itertools.cycle(phase.mix), classes, strict=False)]


def offered_load(
    trace: Sequence[TraceRequest], classes: Sequence[RequestClass], *, num_ranks: int, over_s: float
) -> float:
    """What ``trace`` asks for in ``over_s`` seconds, as a share of what the ranks have to give."""
    service_s = {(kind.model, *kind.shape.size, kind.num_steps): kind.service_s for kind in classes}
    work_s = sum(service_s[one.model, one.height, one.width, one.num_frames, one.num_steps] for one in trace)
    return work_s / (num_ranks * over_s)


def _check_range(**values: float | None) -> None:
    """All that are given must be positive; numbers of things at least 1."""
    for name, value in values.items():
        least = 1 if name.startswith("num_") else 0
        if value is None or (math.isfinite(value) and value >= least and value > 0):
            continue
        what, bound = _RANGES[name], "at least 1" if least else "a positive number"
        raise ValueError(f"{what} must be {bound}, got {value}")


_RANGES = MappingProxyType(
    {
        "num_ranks": "the number of ranks",
        "load": "the load",
        "per_min": "the requests a minute",
        "duration_s": "the duration",
        "num_requests": "the number of requests",
    }
)


def _scale(
    workload: Workload, classes: Sequence[RequestClass], num_ranks: int, load: float | None, per_min: float | None
) -> float:
    """What the rates of the phases are multiplied by."""
    if load is not None and per_min is not None:
        raise ValueError("the rate follows from the load: give one of them")
    if per_min is not None:
        return per_min * workload.duration_s / 60 / workload.num_expected
    if load is not None:
        return load * num_ranks * workload.duration_s / _expected_rank_s(workload, classes)
    if not workload.has_rate:
        raise ValueError("this workload has no rate of its own: give a load or a number of requests a minute")
    return 1.0


def _expected_rank_s(workload: Workload, classes: Sequence[RequestClass]) -> float:
    return sum(
        phase.duration_s / 60 * phase.per_min * weight / sum(weights) * kind.service_s
        for phase in workload.phases
        for weights in [_weights(phase, classes)]
        for weight, kind in zip(weights, classes, strict=True)
    )


def _phase_at(workload: Workload, at_s: float) -> Phase:
    at_s %= workload.duration_s
    for phase in workload.phases:
        at_s -= phase.duration_s
        if at_s < 0:
            return phase
    return workload.phases[-1]


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
