"""The best attainment that any schedule of a small instance can reach, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gfdit.core import ExecutionLayout, Request, TaskView
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.bounds.programme import Programme
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.trace import TraceRequest

MAX_TERMS = 2_000_000  # of the capacity constraints
_US_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class _Mode:
    """One way to run a task: a number of slots on a number of ranks."""

    slots: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class _Job:
    """A request in slots of time: it arrives at ``first`` and is late after ``last``."""

    first: int
    last: int
    tasks: tuple[tuple[_Mode, ...], ...]

    def windows(self) -> list[tuple[int, int]] | None:
        """The earliest start and the latest end of every task; None if the job cannot but be late."""
        shortest = [min(mode.slots for mode in modes) for modes in self.tasks]
        if self.first + sum(shortest) > self.last:
            return None
        return [
            (self.first + sum(shortest[:index]), self.last - sum(shortest[index + 1 :]))
            for index in range(len(shortest))
        ]


def optimal_num_met(
    trace: Sequence[TraceRequest], table: CostTable, *, num_ranks: int, time_limit_s: float = 600.0
) -> int:
    """How many requests of ``trace`` complete in time under the best schedule.

    The schedules are those of the control plane without batches: tasks of a request one after another, each on
    any of its degrees, never interrupted; every rank is as good as any other and nothing is lost between
    tasks. A time-indexed integer programme has a binary variable for each task, degree and start. Time is
    counted in the largest unit that divides all task times and arrivals (in microseconds), which loses nothing:
    a schedule moved as early as it goes starts every task when another one ends or its request arrives.

    Raises ``ValueError`` if the table has batches, if the instance is too large or for a request that cannot be
    served, ``TimeoutError`` if the optimum is not found in time.
    """
    if any(entry.batch > 1 for entry in table.entries):
        raise ValueError("the exact optimum does not know batches: the cost table has entries with batch > 1")
    cost = TableCostModel(table)
    graphs = GraphBuilder(cost, num_ranks)
    jobs = _jobs([line.request() for line in trace if line.deadline_s is not None], graphs, cost)
    windows = [(job, job.windows()) for job in jobs]
    feasible = [(job, found) for job, found in windows if found is not None]
    if sum(_num_terms(job, found) for job, found in feasible) > MAX_TERMS:
        raise ValueError("the instance is too large for an exact optimum, or its times have no common unit")
    num_met = len(trace) - len(jobs)  # without a deadline, after all the others
    if not feasible:
        return num_met
    programme = Programme()
    slots = _Slots(programme, num_ranks)
    for job, found in feasible:
        _add_job(programme, job, found, slots)
    solution = programme.solve(time_limit_s)
    if not solution.is_optimal or solution.value is None:
        raise TimeoutError(f"the optimum was not found in {time_limit_s} s")
    return num_met + round(solution.value)


def _jobs(requests: Sequence[Request], graphs: GraphBuilder, cost: TableCostModel) -> list[_Job]:
    modes_us = [_modes_us(request, graphs, cost) for request in requests]
    arrivals_us = [_microseconds(request.arrival_s) for request in requests]
    times_us = [time_us for tasks in modes_us for modes in tasks for time_us, _ in modes]
    unit_us = math.gcd(*times_us, *arrivals_us)
    return [
        _Job(
            first=arrival_us // unit_us,
            last=_microseconds(request.deadline_s or 0.0) // unit_us,
            tasks=tuple(tuple(_Mode(time_us // unit_us, size) for time_us, size in modes) for modes in tasks),
        )
        for request, arrival_us, tasks in zip(requests, arrivals_us, modes_us, strict=True)
    ]


def _modes_us(request: Request, graphs: GraphBuilder, cost: TableCostModel) -> list[list[tuple[int, int]]]:
    """For every task, (microseconds, ranks) at each of its degrees."""
    views = [TaskView.of(request, task) for task in graphs.build(request).tasks]
    return [
        [
            (_microseconds(cost.task_s(view, ExecutionLayout(tuple(range(spec.size)), spec))), spec.size)
            for spec in cost.candidates(view)
        ]
        for view in views
    ]


def _microseconds(time_s: float) -> int:
    return round(time_s * _US_PER_S)


def _num_terms(job: _Job, windows: Sequence[tuple[int, int]]) -> int:
    return sum(
        mode.slots * max(0, latest - earliest - mode.slots + 1)
        for modes, (earliest, latest) in zip(job.tasks, windows, strict=True)
        for mode in modes
    )


def _add_job(programme: Programme, job: _Job, windows: Sequence[tuple[int, int]], slots: _Slots) -> None:
    done = programme.add_variable(gain=1.0, largest=1.0, integer=True)
    before: list[tuple[int, int]] = []  # (end, variable) of the starts of the task before
    for modes, (earliest, latest) in zip(job.tasks, windows, strict=True):
        begun: list[tuple[int, int]] = []
        ended: list[tuple[int, int]] = []
        for mode in modes:
            for start in range(earliest, latest - mode.slots + 1):
                variable = programme.add_variable(largest=1.0, integer=True)
                slots.occupy(start, mode, variable)
                begun.append((start, variable))
                ended.append((start + mode.slots, variable))
        # A task of a job that is done starts once, and by no time before the task before it has ended.
        programme.add_row([(done, -1.0), *((variable, 1.0) for _, variable in begun)], least=0.0, most=0.0)
        if before:
            for time in range(earliest, latest):
                so_far = [(variable, 1.0) for start, variable in begun if start <= time]
                ready = [(variable, -1.0) for end, variable in before if end <= time]
                programme.add_row(so_far + ready, most=0.0)
        before = ended


class _Slots:
    """The ranks used in every slot of time, a row of the programme each."""

    def __init__(self, programme: Programme, num_ranks: int) -> None:
        self._programme = programme
        self._num_ranks = num_ranks
        self._rows: dict[int, int] = {}

    def occupy(self, start: int, mode: _Mode, variable: int) -> None:
        for slot in range(start, start + mode.slots):
            if slot not in self._rows:
                self._rows[slot] = self._programme.add_row(most=self._num_ranks)
            self._programme.add_term(self._rows[slot], variable, mode.num_ranks)
