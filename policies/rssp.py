"""A fixed degree for each resolution: the smallest that meets its deadline on an idle machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec, RequestView, SchedulerView
from gfdit.core.layouts import widest
from gfdit.core.policy.estimates import Estimates
from gfdit.core.policy.ranks import FreeRanks


@dataclass
class Rssp:
    """Resolution-specific sequence parallelism: one fixed degree per shape, first come, first served.

    The strongest baseline of the TetriServe paper (section 6.1): the best degree for each shape, from offline
    profiles, which were 1, 1, 2 and 8 for FLUX at 256, 512, 1024 and 2048 pixels. Here it comes from the cost
    model: the narrowest degree at which the shape meets its deadline alone on the machine, or else the fastest;
    without a deadline the narrowest. These are the same four. A request holds its ranks from start to end, and
    none starts before those that came earlier.

    With ``min_efficiency``, which is not in the paper and meets more deadlines, a shape gets the widest degree
    that keeps that parallel efficiency, up to the widest that any shape has needed so far: ranks come free in
    blocks of that size, and a narrower start would leave the rest of a block idle.

    Differences from the paper: degrees follow the deadline of each request, not a profile of many; how requests
    queue is not said there, here first come, first served.
    """

    min_efficiency: float | None = None
    name = "rssp"
    run_ahead = True
    _held: dict[str, ExecutionLayout] = field(default_factory=dict, init=False, repr=False)
    _widest_needed: dict[str, int] = field(default_factory=dict, init=False, repr=False)  # by model
    _estimates: Estimates = field(default_factory=Estimates, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.min_efficiency is not None and not 0 < self.min_efficiency <= 1:
            raise ValueError(f"min_efficiency must be above 0 and at most 1, got {self.min_efficiency}")

    def schedule(self, view: SchedulerView) -> Decision:
        self._held = {name: held for name, held in self._held.items() if name in view.requests}
        present = {rank.id for rank in view.ranks}
        for name in [name for name, held in self._held.items() if not present.issuperset(held.ranks)]:
            del self._held[name]
        ready = view.ready_by_request
        for name, held in list(self._held.items()):
            if any([_within(held, view.cost.candidates(task)) is None for task in ready.get(name, ())]):
                del self._held[name]  # it turned out not to fit into the memory of so few ranks
        taken = {rank for held in self._held.values() for rank in held.ranks}
        free = FreeRanks.of([rank for rank in view.ranks if rank.id not in taken])
        for task in view.ready:  # oldest first
            request = view.requests[task.request_id]
            if request.id not in self._held and (spec := self._degree(request, view)):
                layout = free.take(spec, task.model, request.last_layout)
                if layout is None:
                    break
                self._held[request.id] = layout
        idle = set(view.free_ranks)
        dispatches = []
        for name, held in self._held.items():
            for task in ready.get(name, ()):
                layout = _within(held, view.cost.candidates(task))
                if layout and idle.issuperset(layout.ranks):
                    idle.difference_update(layout.ranks)
                    dispatches.append(Dispatch((task.id,), layout))
        return Decision(tuple(dispatches))

    def _degree(self, request: RequestView, view: SchedulerView) -> ParallelSpec | None:
        """The degree of all steps of ``request``; None if no ranks can run it."""
        num_able = sum([request.model in rank.resident for rank in view.ranks])
        times = self._estimates.of(request, view)
        step_s = {spec: step_s for spec, step_s in times.step_s.items() if spec.size <= num_able}
        if not step_s:
            return None
        allowed_s = math.inf if request.deadline_s is None else request.deadline_s - request.arrival_s
        fastest = min(step_s, key=lambda spec: step_s[spec])
        needed = next((spec for spec in step_s if times.alone_s(request, spec) <= allowed_s), fastest)
        if self.min_efficiency is None:
            return needed
        rank_s = {spec: spec.size * step_s[spec] for spec in step_s}
        efficient = [spec for spec in step_s if self.min_efficiency * rank_s[spec] <= min(rank_s.values())]
        if request.deadline_s is None:
            return efficient[-1]
        most = max(needed.size, self._widest_needed.get(request.model, 0))
        self._widest_needed[request.model] = most
        return max(
            [needed, *(spec for spec in efficient if needed.size < spec.size <= most)], key=lambda s: s.size
        )


def _within(held: ExecutionLayout, specs: Iterable[ParallelSpec]) -> ExecutionLayout | None:
    """``held``, or its first ranks for a task that cannot use all."""
    spec = held.parallel if held.parallel in specs else widest(specs, len(held.ranks))
    return ExecutionLayout(held.ranks[: spec.size], spec) if spec else None
