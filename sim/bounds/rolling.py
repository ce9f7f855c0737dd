"""A schedule that nobody had to foresee: planned anew at every arrival, for the requests that are there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from gfdit.core.cost.file import CostTable
from gfdit.sim.bounds.best_known import Job, KnownSchedule, Search, jobs_of
from gfdit.sim.bounds.profile import Run
from gfdit.sim.trace import TraceRequest


@dataclass(slots=True)
class _Begun:
    """A request that has come: what it has begun, when the last of that ends, and what is planned behind it."""

    job: Job
    free_ns: int
    num_begun: int = 0
    runs: list[Run] = field(default_factory=list)
    planned: Sequence[Run] = ()

    @property
    def is_done(self) -> bool:
        return self.num_begun == self.job.plans.num_tasks

    def advance(self, now_ns: int) -> None:
        """Of what is planned, what begins before ``now_ns`` does; the rest is to be planned anew."""
        for run in self.planned:
            if run.start_ns >= now_ns:
                break
            task_ns = (run.end_ns - run.start_ns) // run.num_tasks
            num_tasks = min(run.num_tasks, -((run.start_ns - now_ns) // task_ns))
            self.free_ns = run.start_ns + num_tasks * task_ns
            self.runs.append(Run(run.start_ns, self.free_ns, run.num_ranks, num_tasks))
            self.num_begun += num_tasks
        self.planned = ()


def rolling(
    trace: Sequence[TraceRequest], table: CostTable, *, num_ranks: int, grace_s: float = 0.0
) -> KnownSchedule:
    """What can be met by packing alone: nothing is known of a request before it comes.

    At every arrival the tasks that have not begun are placed anew into the ranks that running ones leave free, the
    request with the least work first, each as cheaply as its deadline allows. Who finds no room may at the next
    arrival, and until then does not run: a server that serves the late as well has less room for the others.
    Rules and errors are those of :func:`~gfdit.sim.bounds.best_known.best_known`.
    """
    jobs, owners = jobs_of(trace, table, num_ranks, grace_s)
    runs: list[tuple[Run, ...] | None] = [None] * len(trace)
    num_met = len(trace) - len(jobs)
    present: dict[int, _Begun] = {}
    in_order = sorted(range(len(jobs)), key=lambda index: jobs[index].arrival_ns)
    for now_ns, arriving in groupby(in_order, key=lambda index: jobs[index].arrival_ns):
        for owner, one in list(present.items()):
            one.advance(now_ns)
            if one.free_ns <= now_ns and (one.is_done or one.job.deadline_ns <= now_ns):
                del present[owner]
            if one.is_done and runs[owner] is None:
                runs[owner] = tuple(one.runs)
                num_met += 1
        present |= {owners[index]: _Begun(jobs[index], now_ns) for index in arriving}
        _plan(present.values(), num_ranks, now_ns)
    for owner, one in present.items():
        if one.planned:
            runs[owner] = (*one.runs, *one.planned)
            num_met += 1
    return KnownSchedule(tuple(runs), num_met)


def _plan(present: Collection[_Begun], num_ranks: int, now_ns: int) -> None:
    busy = [Run(now_ns, one.free_ns, one.runs[-1].num_ranks, 1) for one in present if one.free_ns > now_ns]
    left = [one for one in present if not one.is_done]
    jobs = [
        Job(max(now_ns, one.free_ns), one.job.deadline_ns, one.job.plans.behind(one.num_begun)) for one in left
    ]
    search = Search(jobs, num_ranks, seed=0, taken=busy)
    search.insert(sorted(range(len(jobs)), key=lambda index: jobs[index].plans.least_rank_ns), pricing=0)
    for one, planned in zip(left, search.runs, strict=True):
        one.planned = planned or ()
