"""What is possible on a trace: what no schedule exceeds, and what is met with and without knowing all arrivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gfdit.core.cost.file import CostTable
from gfdit.sim.bounds.best_known import KnownSchedule, best_known
from gfdit.sim.bounds.fluid import AttainmentBound, attainment_bound
from gfdit.sim.bounds.rolling import rolling
from gfdit.sim.trace import TraceRequest

UPPER, KNOWN, ROLLING = "upper bound", "clairvoyant search", "planned at each arrival"
SIDES: Mapping[str, Callable[..., AttainmentBound | KnownSchedule]] = {
    UPPER: attainment_bound,
    KNOWN: best_known,
    ROLLING: rolling,
}


def possible(
    side: str, trace: Sequence[TraceRequest], table: CostTable, *, num_ranks: int, grace_s: float = 0.0
) -> dict[str, float]:
    """``slo_attainment`` and ``slo_attainment_grace`` of one of :data:`SIDES`; takes seconds for each.

    The optimum is between :data:`UPPER` and :data:`KNOWN`: of a policy that is between them as well it is not
    known how far it is below. What is met by :data:`ROLLING` took no knowledge of what was to come.
    Raises ``ValueError`` for a request that the table or the ranks cannot serve.
    """

    def attainment(grace_s: float) -> float:
        return SIDES[side](trace, table, num_ranks=num_ranks, grace_s=grace_s).attainment

    in_time = attainment(0.0)
    with_grace = attainment(grace_s) if grace_s else in_time
    return {"slo_attainment": in_time, "slo_attainment_grace": with_grace}
