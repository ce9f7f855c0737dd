"""Does a policy keep the rules? A call for the tests of authors runs it under what it may meet while serving."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gfdit.core import Policy
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.rank_faults import RankFailure, SlowRank
from gfdit.sim.simulator import SimulationRun, Simulator, Status
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS, generate, workload_classes

LOAD = 1.3  # more than can be done: requests wait, deadlines are missed


def check_policy(
    make: Callable[[], Policy],
    *,
    table: CostTable | None = None,
    num_ranks: int = 4,
    num_requests: int = 12,
    num_steps: int = 4,
    seeds: Iterable[int] = range(5),
) -> None:
    """Serve bursts of small, middle and large requests: quietly, asked ahead, and with ranks slow or lost.

    ``make`` gives a new policy each time. ``table`` is by default one of a video model with guidance and degrees
    up to 8. Raises ``AssertionError`` naming seed, condition and the first rule that was broken (what the server
    would replace by first come, first served), a request that was never finished, or a run that came out
    otherwise when it was repeated.
    """
    table = load_cost_table("wan2.2-synthetic") if table is None else table
    pattern, cost = PATTERNS["gamma"], TableCostModel(table)
    classes = workload_classes(pattern, cost, num_steps=num_steps)
    for seed in seeds:
        trace = generate(pattern, classes, num_ranks=num_ranks, seed=seed, load=LOAD, num_requests=num_requests)
        for condition, options in _conditions(num_ranks, trace[-1].arrival_s).items():
            where = f"seed {seed}, {condition}"
            done = Simulator(make(), table, trace, options).run()
            if done.faults:
                raise AssertionError(f"{where}: {done.faults[0]}")
            if left := [request.trace.id for request in done.requests if request.status is Status.STARVED]:
                raise AssertionError(f"{where}: policy {done.policy!r} never finished {left[0]}")
            again = Simulator(make(), table, trace, options).run()
            if (other := _first_difference(done, again)) is not None:
                raise AssertionError(
                    f"{where}: policy {done.policy!r} decides otherwise when it is run again, first for "
                    f"{other.id}: time may come from view.now_s only, chance from a seed"
                )


def _conditions(num_ranks: int, span_s: float) -> dict[str, SimulationOptions]:
    quiet = SimulationOptions(num_ranks, check_every_event=True)
    lost = RankFailure(num_ranks - 1, span_s / 3, span_s / 3)
    return {
        "quiet": quiet,
        "asked ahead": replace(quiet, run_ahead=1, dispatch_latency_s=0.01),
        "task times off by a fifth": replace(quiet, jitter=0.2),
        "a slow rank": replace(quiet, slow_ranks=(SlowRank(0, 2.0),)),
        "a rank lost and back": replace(quiet, failures=(lost,) if num_ranks > 1 else ()),
    }


def _first_difference(one: SimulationRun, other: SimulationRun) -> TraceRequest | None:
    for mine, theirs in zip(one.requests, other.requests, strict=True):
        if (mine.end_s, mine.rank_seconds) != (theirs.end_s, theirs.rank_seconds):
            return mine.trace
    return None
