"""Times of whole requests, from the cost model, remembered for as long as they are fresh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gfdit.core.cost import UnknownCostError
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec
from gfdit.core.policy import RequestView, SchedulerView, TaskView
from gfdit.core.tasks import Shape, TaskKind

_Part = TaskKind | tuple[str, TaskKind]
"""Tasks that take the same time: of one kind, and in a workflow of one component."""


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Times in seconds that requests of one model, shape, guidance and kind of graph share.

    ``step_s`` is of one denoising step at each feasible specification, the narrowest first. ``other_s`` is of each
    other part, on one rank. ``batch_s`` is of one step of several requests at once at the narrowest
    specification, by their number, as far as the cost model knows.
    """

    step_s: Mapping[ParallelSpec, float]
    other_s: Mapping[_Part, float]
    batch_s: Mapping[int, float]

    def around_s(self, request: RequestView) -> float:
        """Of the unfinished tasks of ``request`` other than denoising steps."""
        left: Mapping[Any, int] = request.tasks_left if request.parts is None else request.parts
        return sum([count * self.other_s[part] for part, count in left.items() if part in self.other_s])

    def remaining_s(self, request: RequestView, spec: ParallelSpec) -> float:
        """To finish ``request`` with every denoising step left at ``spec``; a running task counts in full."""
        return self.around_s(request) + request.tasks_left.get(TaskKind.DENOISE, 0) * self.step_s[spec]

    def alone_s(self, request: RequestView, spec: ParallelSpec) -> float:
        """From arrival to end on an idle machine."""
        around_s = sum([s * (request.num_steps if _is_per_step(part) else 1) for part, s in self.other_s.items()])
        return around_s + request.num_steps * self.step_s[spec]


def _is_per_step(part: _Part) -> bool:
    return not isinstance(part, TaskKind) and part[1] is TaskKind.CONTROL


_Class = tuple[str, Shape, bool, tuple[ParallelSpec, ...], tuple[_Part, ...]]

MAX_BATCH = 8
MAX_CLASSES = 1024
"""More are forgotten: a server may be asked for any size."""


@dataclass(frozen=True, slots=True)
class _Known:
    model: str
    shape: Shape
    cfg: bool
    candidates: tuple[ParallelSpec, ...]
    asked_s: float
    version: int  # of the cost model
    times: ServiceTimes


class Estimates:
    """:class:`ServiceTimes` by request.

    Asking the cost model for everything about every request in every decision takes too long, so what it said
    is kept for ``max_age_s``, and longer while nothing has changed: it changes slowly, by what is measured.
    """

    def __init__(self, max_age_s: float = 1.0) -> None:
        self.max_age_s = max_age_s
        self._by_request: dict[str, _Known] = {}
        self._by_class: dict[_Class, _Known] = {}
        self._version, self._since_s = 0, -math.inf

    def of(self, request: RequestView, view: SchedulerView) -> ServiceTimes:
        """Raises :class:`~gfdit.core.cost.UnknownCostError` naming ``request`` for what the cost model lacks."""
        known = self._by_request.get(request.id)
        if known is None or not _fits(known, request) or not self._fresh(known, view):
            known = self._by_request[request.id] = self._of_class(request, view)
            if len(self._by_request) > 2 * len(view.requests) + 16:
                live = self._by_request.keys() & view.requests.keys()
                self._by_request = {name: self._by_request[name] for name in live}
        return known.times

    def are_old(self, view: SchedulerView) -> bool:
        """Whether what was said before may not hold any more. It is forgotten then, and good for ``max_age_s``."""
        if view.cost.version == self._version or 0 <= view.now_s - self._since_s <= self.max_age_s:
            return False
        self._version, self._since_s = view.cost.version, view.now_s
        self._by_request.clear()
        self._by_class.clear()
        return True

    def _of_class(self, request: RequestView, view: SchedulerView) -> _Known:
        what = (request.model, request.shape, request.cfg, request.candidates)
        parts: tuple[_Part, ...] = tuple(request.tasks_left if request.parts is None else request.parts)
        key = (*what, parts)
        known = self._by_class.get(key)
        if known is None or not self._fresh(known, view):
            if len(self._by_class) >= MAX_CLASSES:
                self._by_class.clear()
            known = self._by_class[key] = _Known(
                *what, view.now_s, view.cost.version, _service_times(request, view)
            )
        return known

    def _fresh(self, known: _Known, view: SchedulerView) -> bool:
        return known.version == view.cost.version or 0 <= view.now_s - known.asked_s <= self.max_age_s


def _fits(known: _Known, request: RequestView) -> bool:
    """An id may come again for another request."""
    return (
        known.shape == request.shape
        and known.candidates == request.candidates
        and known.cfg == request.cfg
        and known.model == request.model
    )


def _service_times(request: RequestView, view: SchedulerView) -> ServiceTimes:
    cost = view.cost
    parts = request.parts
    if TaskKind.DENOISE not in request.tasks_left:
        return _of_one_task(request, view)
    steps = () if parts is None else [name for name, kind in parts if kind is TaskKind.DENOISE]
    denoise = _task(request, TaskKind.DENOISE, request.candidates, *steps[:1])
    layouts = [ExecutionLayout(tuple(range(spec.size)), spec) for spec in cost.candidates(denoise)]
    others: dict[_Part, TaskView]
    if parts is None:
        others = {kind: _task(request, kind, (SINGLE,)) for kind in request.tasks_left}
        others.pop(TaskKind.DENOISE, None)
    else:
        others = {part: _task(request, part[1], (SINGLE,), part[0]) for part in parts}
        others.pop((denoise.model, TaskKind.DENOISE), None)
    return ServiceTimes(
        step_s={layout.parallel: cost.task_s(denoise, layout) for layout in layouts},
        other_s={part: cost.task_s(task, ExecutionLayout((0,))) for part, task in others.items()},
        batch_s=dict(_batch_times(denoise, layouts[0], view)),
    )


def _of_one_task(request: RequestView, view: SchedulerView) -> ServiceTimes:
    """Of a request without steps of its own: it runs whole."""
    names = (
        [(request.model, kind) for kind in request.tasks_left] if request.parts is None else list(request.parts)
    )
    tasks = {name: _task(request, name[1], (SINGLE,), name[0]) for name in names}
    times = {name: view.cost.task_s(task, ExecutionLayout((0,))) for name, task in tasks.items()}
    other_s: dict[_Part, float] = {name if request.parts is not None else name[1]: s for name, s in times.items()}
    return ServiceTimes(step_s={SINGLE: 0.0}, other_s=other_s, batch_s={})


def _batch_times(task: TaskView, layout: ExecutionLayout, view: SchedulerView) -> Iterator[tuple[int, float]]:
    for size in range(2, MAX_BATCH + 1):
        with suppress(UnknownCostError):
            yield size, view.cost.task_s(task, layout, size)


def _task(
    request: RequestView, kind: TaskKind, candidates: tuple[ParallelSpec, ...], component: str = ""
) -> TaskView:
    return TaskView(
        id=f"{request.id}/{kind}",
        request_id=request.id,
        model=component or request.model,
        kind=kind,
        step_index=0,
        shape=request.shape,
        cfg=request.cfg,
        candidates=candidates,
        artifacts=(),
    )
