"""Choosing what runs in a round, and at which degree (TetriServe paper, sections 4.2.2, 4.2.3 and 5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby

from gfdit.core import RequestView
from gfdit.core.policy.estimates import ServiceTimes
from gfdit.core.policy.ranks import RankCounts
from gfdit.policies._allocation import ROUNDING_S, Degree, Share, minimal_allocation
from gfdit.policies._batches import join
from gfdit.policies._knapsack import pack
from gfdit.policies._prospects import Prospect


@dataclass(eq=False, slots=True)
class Job:
    """The denoising of a request as a round sees it: it may start at ``start_s`` and must be over by ``due_s``.

    ``due_s`` leaves time for what comes after denoising; it is infinite without a deadline. ``degrees`` are the
    useful ones, narrowest first.
    """

    prospect: Prospect
    start_s: float
    request: RequestView = field(init=False)
    degrees: tuple[Degree, ...] = field(init=False)
    num_steps: int = field(init=False)
    due_s: float = field(init=False)
    latest_start_s: float = field(init=False)

    def __post_init__(self) -> None:
        prospect = self.prospect
        self.request, self.degrees, self.num_steps = prospect.request, prospect.degrees, prospect.num_steps
        self.due_s = prospect.deadline_s - prospect.after_s
        self.latest_start_s = self.due_s - self.num_steps * self.fastest_s + ROUNDING_S

    @property
    def times(self) -> ServiceTimes:
        return self.prospect.times

    @property
    def fastest_s(self) -> float:
        """Of one step."""
        return self.prospect.fastest_s

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


Plan = dict[str, tuple[Job, Degree]]
"""What runs in a round, and how, by request."""


def rescue(jobs: Iterable[Job], left: RankCounts, round_end_s: float, *, mixed: bool) -> Plan:
    """Run what would otherwise become late in this round, so that the most requests survive it (section 4.2.2).

    The more urgent priority comes first. Requests that survive without running are left out: no choice for
    them is better than another here. A model's requests compete for the ranks that have it.
    """
    urgent = [job for job in jobs if job.start_s <= job.latest_start_s < round_end_s]
    urgent.sort(key=lambda job: (_level(job), job.due_s, job.request.arrival_s))
    plan: Plan = {}
    for (_, model), same in groupby(urgent, key=_level):
        level = list(same)
        shares = [[s for s in job.allocation(mixed=mixed) if job.survives(s, round_end_s)] for job in level]
        options = [[(spec.size, 1.0) for (spec, _), _ in choices] for choices in shares]
        for job, choices, index in zip(level, shares, pack(options, left.of(model)), strict=True):
            if index is not None:
                degree, _ = choices[index]
                plan[job.request.id] = (job, degree)
                left.take(model, degree[0].size)
    return plan


def fill(plan: Plan, jobs: Iterable[Job], left: RankCounts, *, mixed: bool, widest_first: bool) -> None:
    """Add ``jobs`` to ``plan``, one after the other, while there are ranks.

    Each gets the narrowest degree of its minimal allocation first, as in the example of section 2.3, or the widest
    first, which leaves room later for what nobody knows yet; or what is left of it. A late request gets the
    narrowest.
    """
    for job in jobs:
        if not left:
            break
        shares = [] if job.is_late else job.allocation(mixed=mixed)
        wanted, _ = shares[-1 if widest_first else 0] if shares else (job.degrees[0], 0)
        most = min(wanted[0].size, left.of(job.request.model))
        if fitting := [degree for degree in job.degrees if degree[0].size <= most]:
            plan[job.request.id] = (job, fitting[-1])
            left.take(job.request.model, fitting[-1][0].size)


def scale_up(plan: Plan, left: RankCounts, round_end_s: float) -> None:
    """Widen what is planned while ranks are left, first what gets faster by the most (section 4.2.3).

    Only what has "sufficient remaining steps" for it: here, as many as the round has room for at the wider degree.
    """
    if not left:
        return
    queue: list[tuple[float, str, Degree]] = []

    def offer(name: str) -> None:
        job, (spec, seconds) = plan[name]
        wider = next((degree for degree in job.degrees if degree[0].size > spec.size), None)
        if wider and job.num_steps >= int((round_end_s - job.start_s) / wider[1] + ROUNDING_S):
            heappush(queue, (wider[1] / seconds, name, wider))

    for name in plan:
        offer(name)
    while queue:
        _, name, wider = heappop(queue)
        job, (spec, _) = plan[name]
        if wider[0].size - spec.size <= left.of(job.request.model):
            left.take(job.request.model, wider[0].size - spec.size)
            plan[name] = (job, wider)
            offer(name)


def share_steps(plan: Plan, waiting: Iterable[Job]) -> dict[str, str]:
    """Who of ``waiting`` shares the steps of a planned request: guest to host."""
    hosts = [host for host, (spec, _) in plan.values() if host.times.batch_s and spec == host.degrees[0][0]]
    batches = join(hosts, waiting, Job.may_take) if hosts else ()
    return {guest.request.id: host.request.id for host, guests in batches for guest in guests}


def _level(job: Job) -> tuple[int, str]:
    return -job.request.priority, job.request.model
