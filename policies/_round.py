"""Choosing what runs in a round, and at which degree (TetriServe paper, sections 4.2.2, 4.2.3 and 5)."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import groupby

from gfdit.core.policy.ranks import RankCounts
from gfdit.policies._allocation import Degree
from gfdit.policies._batches import join
from gfdit.policies._jobs import Job
from gfdit.policies._knapsack import pack

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


def fill(plan: Plan, jobs: Iterable[Job], left: RankCounts, *, mixed: bool) -> None:
    """Add ``jobs`` to ``plan``, one after the other, while there are ranks.

    Each gets the widest degree of its minimal allocation, or what is left of it: the steps that must be fast come
    first, so that there is room later for what nobody knows yet. A late request gets the narrowest.
    """
    for job in jobs:
        if not left:
            break
        shares = [] if job.is_late else job.allocation(mixed=mixed)
        wanted, _ = shares[-1] if shares else (job.degrees[0], 0)
        most = min(wanted[0].size, left.of(job.request.model))
        if fitting := [degree for degree in job.degrees if degree[0].size <= most]:
            plan[job.request.id] = (job, fitting[-1])
            left.take(job.request.model, fitting[-1][0].size)


def scale_up(plan: Plan, left: RankCounts) -> None:
    """Widen what is planned while ranks are left, first what gets faster by the most (section 4.2.3)."""
    if not left:
        return
    queue: list[tuple[float, str, Degree]] = []

    def offer(name: str) -> None:
        job, (spec, seconds) = plan[name]
        if wider := next((degree for degree in job.degrees if degree[0].size > spec.size), None):
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
    hosts = [host for host, (spec, _) in plan.values() if spec == host.degrees[0][0]]
    batches = join(hosts, waiting, Job.may_take)
    return {guest.request.id: host.request.id for host, guests in batches for guest in guests}


def _level(job: Job) -> tuple[int, str]:
    return -job.request.priority, job.request.model
