"""What is possible on a trace: what no schedule exceeds, and what is met with and without knowing all arrivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gfdit.core.cost.file import CostTable
from gfdit.sim.bounds.best_known import best_known
from gfdit.sim.bounds.fluid import attainment_bound
from gfdit.sim.bounds.rolling import rolling
from gfdit.sim.trace import TraceRequest

UPPER, KNOWN, ROLLING = "upper bound", "clairvoyant search", "planned at each arrival"


def _upper(trace: Sequence[TraceRequest], table: CostTable, num_ranks: int, grace_s: float) -> float:
    return attainment_bound(trace, table, num_ranks=num_ranks, grace_s=grace_s).attainment


def _known(trace: Sequence[TraceRequest], table: CostTable, num_ranks: int, grace_s: float) -> float:
    return best_known(trace, table, num_ranks=num_ranks, grace_s=grace_s).attainment


def _rolling(trace: Sequence[TraceRequest], table: CostTable, num_ranks: int, grace_s: float) -> float:
    return rolling(trace, table, num_ranks=num_ranks, grace_s=grace_s).attainment


SIDES: Mapping[str, Callable[[Sequence[TraceRequest], CostTable, int, float], float]] = {
    UPPER: _upper,
    KNOWN: _known,
    ROLLING: _rolling,
}


def possible(
    side: str, trace: Sequence[TraceRequest], table: CostTable, *, num_ranks: int, grace_s: float = 0.0
) -> dict[str, float]:
    """``slo_attainment`` and ``slo_attainment_grace`` of one of :data:`SIDES`; takes seconds for each.

    The optimum is between :data:`UPPER` and :data:`KNOWN`: of a policy that is between them as well it is not
    known how far it is below. What is met by :data:`ROLLING` took no knowledge of what was to come.
    Raises ``ValueError`` for a request that the table or the ranks cannot serve.
    """
    in_time = SIDES[side](trace, table, num_ranks, 0.0)
    with_grace = SIDES[side](trace, table, num_ranks, grace_s) if grace_s else in_time
    return {"slo_attainment": in_time, "slo_attainment_grace": with_grace}
