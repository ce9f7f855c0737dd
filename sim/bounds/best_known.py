"""The best schedule that a search finds which knows all arrivals in advance: so much can be reached at least."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, product

import numpy as np

from gfdit.core import TaskView
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.bounds.fluid import TOLERANCE_S
from gfdit.sim.bounds.plans import NUM_PRICINGS, Plans
from gfdit.sim.bounds.profile import Profile, Run
from gfdit.sim.bounds.work import Mode, modes_of
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.trace import TraceRequest

MAX_REMOVED = 8  # requests in one move
MAX_ADDED = 6  # others that are tried where those were
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class KnownSchedule:
    """``runs`` has the tasks of every request of the trace, in their order, None where a deadline is missed.

    A request without a deadline counts as met: it runs after all others, and has no runs here.
    """

    runs: tuple[tuple[Run, ...] | None, ...]
    num_met: int

    @property
    def attainment(self) -> float:
        return self.num_met / len(self.runs)


@dataclass(frozen=True, slots=True)
class Job:
    """A request that may start at ``arrival_ns`` and must end by ``deadline_ns``."""

    arrival_ns: int
    deadline_ns: int
    plans: Plans


def best_known(
    trace: Sequence[TraceRequest],
    table: CostTable,
    *,
    num_ranks: int,
    seed: int = 0,
    num_moves: int = 2000,
    grace_s: float = 0.0,
) -> KnownSchedule:
    """A schedule that meets many deadlines, found by ruin and recreate (Schrimpf et al., 2000).

    Its rules are those of the bound: tasks of a request one after another, each at any degree and never
    interrupted; nothing is lost between tasks. It has no batches. Requests are placed one by one into the ranks
    that others leave free, as cheaply as their deadlines allow (:mod:`gfdit.sim.bounds.plans`). A move takes
    requests out around a time within the window of one that is missed, puts that one in, and then the others
    again and more of the missed; it is undone if fewer are met than before.

    The result depends on ``seed`` and ``num_moves`` alone, not on the machine; more moves are never worse. Raises
    ``ValueError`` for a request that the table or the ranks cannot serve.
    """
    jobs, owners = jobs_of(trace, table, num_ranks, grace_s)
    runs: list[tuple[Run, ...] | None] = [None] * len(trace)
    num_met = len(trace) - len(jobs)
    if jobs:
        search = _best_start(jobs, num_ranks, seed)
        for _ in range(num_moves):
            if len(search.missed) == 0:
                break
            search.move()
        for owner, found in zip(owners, search.runs, strict=True):
            runs[owner] = found
        num_met += search.num_met
    return KnownSchedule(tuple(runs), num_met)


def jobs_of(
    trace: Sequence[TraceRequest], table: CostTable, num_ranks: int, grace_s: float
) -> tuple[list[Job], list[int]]:
    """Of the requests with a deadline, and where they are in the trace."""
    cost = TableCostModel(table)
    graphs = GraphBuilder(cost, num_ranks)
    made: dict[tuple[object, ...], Plans] = {}
    jobs, owners = [], []
    for index, line in enumerate(trace):
        request = line.request()
        if request.deadline_s is None:
            graphs.check(request)
            continue
        kind = (request.model, request.shape, request.num_steps, request.cfg)
        if kind not in made:
            views = (TaskView.of(request, task) for task in graphs.build(request).tasks)
            modes = groupby(_modes_ns(view, cost) for view in views)
            made[kind] = Plans([(len(list(same)), each) for each, same in modes], num_ranks)
        arrival_ns = round(request.arrival_s * _NS_PER_S)
        deadline_ns = round((request.deadline_s + grace_s + TOLERANCE_S) * _NS_PER_S)
        jobs.append(Job(arrival_ns, deadline_ns, made[kind]))
        owners.append(index)
    return jobs, owners


def _modes_ns(view: TaskView, cost: TableCostModel) -> tuple[Mode, ...]:
    """With times in nanoseconds."""
    return tuple(Mode(round(mode.seconds * _NS_PER_S), mode.num_ranks) for mode in modes_of(view, [1], cost))


def _best_start(jobs: Sequence[Job], num_ranks: int, seed: int) -> Search:
    by_work = sorted(range(len(jobs)), key=lambda index: jobs[index].plans.least_rank_ns)
    by_deadline = sorted(range(len(jobs)), key=lambda index: jobs[index].deadline_ns)
    searches = []
    for order, pricing in product((by_work, by_deadline), range(NUM_PRICINGS)):
        search = Search(jobs, num_ranks, seed)
        search.insert(order, pricing)
        searches.append(search)
    return max(searches, key=lambda search: search.num_met)


class Search:
    """A schedule in the making; of the ranks, ``taken`` are not free."""

    def __init__(self, jobs: Sequence[Job], num_ranks: int, seed: int, taken: Iterable[Run] = ()) -> None:
        self._jobs = jobs
        self._draw = random.Random(seed)
        self._profile = Profile(num_ranks)
        self._profile.take(taken)
        self._arrivals_ns = np.array([job.arrival_ns for job in jobs])
        self._deadlines_ns = np.array([job.deadline_ns for job in jobs])
        self._is_met = np.zeros(len(jobs), dtype=bool)
        self._starts_ns = np.zeros(len(jobs), dtype=np.int64)
        self._ends_ns = np.zeros(len(jobs), dtype=np.int64)
        self.runs: list[tuple[Run, ...] | None] = [None] * len(jobs)

    @property
    def num_met(self) -> int:
        return int(self._is_met.sum())

    @property
    def missed(self) -> np.ndarray:
        return np.flatnonzero(~self._is_met)

    def move(self) -> None:
        draw = self._draw
        missed = self.missed
        target = int(missed[draw.randrange(len(missed))])
        time_ns = draw.randint(self._jobs[target].arrival_ns, self._jobs[target].deadline_ns)
        around = self._is_met & (self._starts_ns <= time_ns) & (self._ends_ns >= time_ns)
        removed = self._sample(around, draw.randint(1, MAX_REMOVED))
        waiting = ~self._is_met & (self._arrivals_ns <= time_ns) & (self._deadlines_ns >= time_ns)
        waiting[target] = False
        others = self._sample(waiting, MAX_ADDED)
        before = {index: self._remove(index) for index in removed}
        added = self.insert(self._order(target, removed, others), draw.randrange(NUM_PRICINGS))
        if len(added) < len(removed):
            for index in added:
                self._remove(index)
            for index, runs in before.items():
                self._put(index, runs)

    def insert(self, order: Iterable[int], pricing: int) -> list[int]:
        """Those of ``order`` for which there was room."""
        added = []
        for index in order:
            if (runs := self._cheapest(self._jobs[index], pricing)) is not None:
                self._put(index, runs)
                added.append(index)
        return added

    def _sample(self, chosen: np.ndarray, at_most: int) -> list[int]:
        found: list[int] = np.flatnonzero(chosen).tolist()
        return self._draw.sample(found, min(at_most, len(found)))

    def _order(self, target: int, removed: list[int], others: list[int]) -> list[int]:
        """Mostly by work: small requests fill what is free, large ones have more ways to fit around them."""
        draw, jobs = self._draw, self._jobs
        how = draw.random()
        if how < 0.3:
            removed.sort(key=lambda index: jobs[index].deadline_ns)
        elif how < 0.8:
            noise = draw.random()
            removed.sort(key=lambda index: jobs[index].plans.least_rank_ns * (1 + noise * draw.random()))
        others.sort(key=lambda index: jobs[index].plans.least_rank_ns)
        order = [target, *removed, *others]
        if 0.8 <= how < 0.9:
            order.sort(key=lambda index: jobs[index].plans.least_rank_ns)
        elif how >= 0.9:
            draw.shuffle(order)
        return order

    def _cheapest(self, job: Job, pricing: int) -> tuple[Run, ...] | None:
        """By the cheapest plan that is in time, and of the next cheaper one as many tasks as there can be."""
        legs, last = job.plans.legs, job.plans.num_plans(pricing) - 1
        fit = self._profile.fit
        window = job.arrival_ns, job.deadline_ns
        if (runs := fit(*window, legs(pricing, last, last, 0))) is None:
            return None
        late, plan = -1, last
        while plan - late > 1:
            middle = (late + plan) // 2
            if (found := fit(*window, legs(pricing, middle, middle, 0))) is None:
                late = middle
            else:
                plan, runs = middle, found
        if plan == 0:
            return tuple(runs)
        num_tasks = job.plans.num_tasks
        cheap_first = self._draw.random() < 0.5
        too_few, num_dear = 0, num_tasks
        while num_dear - too_few > 1:
            middle = (too_few + num_dear) // 2
            mixed = (plan - 1, plan, num_tasks - middle) if cheap_first else (plan, plan - 1, middle)
            if (found := fit(*window, legs(pricing, *mixed))) is None:
                too_few = middle
            else:
                num_dear, runs = middle, found
        return tuple(runs)

    def _put(self, index: int, runs: tuple[Run, ...]) -> None:
        self._profile.take(runs)
        self.runs[index] = runs
        self._is_met[index] = True
        self._starts_ns[index], self._ends_ns[index] = runs[0].start_ns, runs[-1].end_ns

    def _remove(self, index: int) -> tuple[Run, ...]:
        runs = self.runs[index]
        assert runs is not None
        self._profile.give_back(runs)
        self.runs[index] = None
        self._is_met[index] = False
        return runs
