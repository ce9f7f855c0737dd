"""The denoising that requests have left, seen from one round."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from gfdit.core import RequestView, SchedulerView, TaskKind
from gfdit.core.policy.estimates import Estimates, ServiceTimes
from gfdit.policies._allocation import ROUNDING_S, Degree, Share, minimal_allocation, useful_degrees


@dataclass(eq=False, slots=True)
class Job:
    """The denoising a request has left: ``num_steps`` that may start at ``start_s`` and must be over by ``due_s``.

    ``due_s`` leaves time for what comes after denoising; it is infinite without a deadline. ``degrees`` are the
    useful ones, narrowest first; there is at least one.
    """

    request: RequestView
    num_steps: int
    start_s: float
    due_s: float
    degrees: tuple[Degree, ...]
    times: ServiceTimes
    fastest_s: float = field(init=False)  # of one step
    latest_start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.fastest_s = self.degrees[-1][1]
        self.latest_start_s = self.due_s - self.num_steps * self.fastest_s + ROUNDING_S

    @property
    def is_late(self) -> bool:
        """It misses its deadline even if nothing holds it up and it runs at its fastest."""
        return self.start_s > self.latest_start_s

    def allocation(self, *, mixed: bool) -> list[Share]:
        return minimal_allocation(self.degrees, self.num_steps, self.due_s - self.start_s, mixed=mixed)

    def survives(self, share: Share, round_end_s: float) -> bool:
        """Whether it can still be in time after a round with ``share``.

        The lower bound of section 4.2.2: as many steps of the share as fit the round, all others at the fastest.
        """
        (_, seconds), count = share
        num_done = min(count, int((round_end_s - self.start_s) / seconds + ROUNDING_S))
        return round_end_s <= self.latest_start_s + num_done * self.fastest_s

    def may_take(self, step_s: float) -> bool:
        """Whether it keeps its deadline at a pace of ``step_s`` a step, or has lost it anyway."""
        return self.is_late or self.start_s + self.num_steps * step_s <= self.due_s + ROUNDING_S


class Jobs:
    """Makes jobs; one is made again only when its request has changed, or after a while."""

    def __init__(self) -> None:
        self.estimates = Estimates()
        self._known: dict[str, Job] = {}
        self._num_able: Counter[str] = Counter()  # ranks by model
        self._since_s = -math.inf

    def refresh(self, view: SchedulerView) -> None:
        """Take new ranks into account, and now and then what the cost model has learnt."""
        num_able = Counter([model for rank in view.ranks for model in rank.resident])
        if num_able != self._num_able or not 0 <= view.now_s - self._since_s <= self.estimates.max_age_s:
            self._num_able, self._since_s = num_able, view.now_s
            self._known.clear()

    def of(self, request: RequestView, start_s: float, view: SchedulerView) -> Job | None:
        """None if no step is left that does not run, or if no ranks can run it."""
        job = self._known.get(request.id)
        if job is None or job.request is not request:
            times = self.estimates.of(request, view)
            degrees = useful_degrees(times.step_s, self._num_able[request.model])
            num_steps = request.tasks_left.get(TaskKind.DENOISE, 0) - request.running
            if not degrees or num_steps < 1:
                return None
            due_s = math.inf if request.deadline_s is None else request.deadline_s - times.around_s(request)
            job = self._known[request.id] = Job(request, num_steps, start_s, due_s, degrees, times)
        job.start_s = start_s
        return job
