"""An upper bound on attainment: how many deadlines of a trace the best possible schedule could meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gfdit.core import Request
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.bounds.programme import Programme
from gfdit.sim.bounds.work import Part, parts_of
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.options import SimulationOptions
from gfdit.sim.trace import TraceRequest

# Deadlines are met or missed in floating point: what is late by less than this counts as met.
TOLERANCE_S = 1e-6


@dataclass(frozen=True, slots=True)
class AttainmentBound:
    """No schedule completes more than ``num_met`` of ``num_requests`` requests in time."""

    num_met: int
    num_requests: int

    @property
    def attainment(self) -> float:
        return self.num_met / self.num_requests


def attainment_bound(
    trace: Sequence[TraceRequest],
    table: CostTable,
    *,
    num_ranks: int,
    grace_s: float = 0.0,
    time_limit_s: float = 0.0,
    max_intervals: int = 200,
) -> AttainmentBound:
    """A relaxation that knows every arrival and every deadline in advance.

    It chooses the requests to serve and spreads each one's work, as a fluid, over the intervals between the
    arrivals and deadlines of the trace. Variables are the seconds that a part of a request (tasks of equal
    times) spends in an interval at one of its degrees. Constraints: a served request does all its work; it
    spends at most the overlap of its window, arrival to deadline, with the interval; in every interval the
    rank-seconds used are at most ranks x length.

    It is an upper bound: take any schedule and, for every request it completes in time, the seconds its tasks
    ran in each interval at each degree. They satisfy all the constraints, because a request's tasks run one after
    another inside its window and a rank runs one task at a time; so the requests of that schedule are a
    solution. What a real schedule has to respect besides, whole tasks, their order, migrations, dispatch latency
    and lost or slow ranks, only takes solutions away. A batch of ``b`` tasks counts as a degree that uses 1/b of
    its ranks for each of them. Dropping the degrees that a mixture of others beats changes nothing, and joining
    neighbouring intervals until ``max_intervals`` are left only adds solutions. It does not cover tasks that are
    faster than the table says: see :func:`check_bounded`.

    With ``time_limit_s`` 0 the choice may be fractional and the optimum is rounded down: the same on every
    machine. Otherwise HiGHS gets that many seconds to solve the mixed-integer programme and its dual bound
    counts, never a solution that may still be improved.

    Raises ``ValueError`` for a request that the table or the ranks cannot serve.
    """
    cost = TableCostModel(table)
    graphs = GraphBuilder(cost, num_ranks)
    requests = [line.request() for line in trace]
    parts = [parts_of(request, graphs, cost) for request in requests]
    windows_s = [_window_s(request, grace_s) for request in requests]
    cuts_s = _cuts_s([window_s for window_s in windows_s if window_s is not None], max_intervals)
    programme = Programme()
    capacity = [programme.add_row(most=num_ranks * (end_s - start_s)) for start_s, end_s in pairwise(cuts_s)]
    num_met = 0
    for request_parts, window_s in zip(parts, windows_s, strict=True):
        if window_s is None:
            num_met += 1  # without a deadline, after all the others
        else:
            overlaps = {capacity[i]: shared_s for i, shared_s in _overlaps_s(window_s, cuts_s)}
            _add_request(programme, overlaps, request_parts)
    if capacity:
        bound = programme.relaxed()
        if time_limit_s > 0:
            bound = min(bound, programme.solve(time_limit_s).bound)
        num_met += math.floor(bound + 1e-6)
    return AttainmentBound(num_met, len(requests))


def check_bounded(options: SimulationOptions) -> None:
    """Raise ``ValueError`` if tasks may be faster than the cost table says, so that there is no bound."""
    if options.jitter:
        raise ValueError("there is no upper bound with jitter: tasks may be faster than the cost table says")
    if any(slow.factor < 1 for slow in options.slow_ranks):
        raise ValueError("there is no upper bound with ranks that are faster than the cost table says")
    if options.edits is not None:
        raise ValueError("there is no upper bound with edits: their steps are faster than the cost table says")
    if options.steps_per_task > 1:
        raise ValueError("there is no upper bound with several steps a task: some requests lose steps by rounding")


def _add_request(programme: Programme, overlaps_s: Mapping[int, float], parts: Sequence[Part]) -> None:
    """``overlaps_s`` maps the capacity rows of the intervals that the request's window meets to seconds."""
    served = programme.add_variable(gain=1.0, largest=1.0, integer=True)
    inside = {row: programme.add_row([(served, -overlap_s)], most=0.0) for row, overlap_s in overlaps_s.items()}
    for part in parts:
        undone = programme.add_row([(served, part.num_tasks)], most=0.0)
        for mode in part.modes:
            for capacity, time in inside.items():
                seconds = programme.add_variable()
                programme.add_term(undone, seconds, -1.0 / mode.seconds)
                programme.add_term(time, seconds, 1.0)
                programme.add_term(capacity, seconds, mode.num_ranks)


def _window_s(request: Request, grace_s: float) -> tuple[float, float] | None:
    if request.deadline_s is None:
        return None
    return request.arrival_s, request.deadline_s + grace_s + TOLERANCE_S


def _cuts_s(windows_s: Sequence[tuple[float, float]], max_intervals: int) -> list[float]:
    """Where intervals begin and end, with as many arrivals and deadlines in each if there are too many."""
    times_s = sorted({time_s for window_s in windows_s for time_s in window_s})
    last = len(times_s) - 1
    num_intervals = min(last, max_intervals)
    return [times_s[round(i * last / num_intervals)] for i in range(num_intervals + 1)] if times_s else []


def _overlaps_s(window_s: tuple[float, float], cuts_s: Sequence[float]) -> Iterator[tuple[int, float]]:
    """The intervals that a window meets, with the seconds they share."""
    for interval, (start_s, end_s) in enumerate(pairwise(cuts_s)):
        shared_s = min(end_s, window_s[1]) - max(start_s, window_s[0])
        if shared_s > 0:
            yield interval, shared_s
