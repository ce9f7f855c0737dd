"""Ranks in nodes: what layouts and copies take more where the links between nodes are slower than those within.

A cost table has times of ranks that one fast link joins. Ulysses attention exchanges queries, keys, values and
results in every layer, each rank the part of its tokens that others compute the heads of (DeepSpeed Ulysses,
section 3). Where some of those are on another node, that part goes over the slower link instead, and every
exchange waits for it:

    seconds = exchanges x (latency + between / rate_between + within / rate_within - all / rate_of_table)

in bytes of the rank with the most to send between nodes. Nothing of it is hidden behind computing. Both branches
of guidance meet once a step, with what a step makes. Nothing else of a layout is priced: the halos of a shared
decode are small.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from gfdit.core.cost.file import StepExchanges
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.tasks import Shape

GIGABIT = 1e9 / 8
BETWEEN_BYTES_PER_S = 320 * GIGABIT
"""80 % of the 400 Gbit/s of one InfiniBand NDR adapter, of which machines with eight GPUs have one for each."""
BETWEEN_LATENCY_S = 20e-6
"""Of one collective, more than within a node: a few network round trips; an assumption."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of ``ranks_per_node`` consecutive ranks, and the rates of one rank's link in bytes per second.

    Within a node it is that of the cost table's hardware, unless ``within_bytes_per_s`` says otherwise. Raises
    ``ValueError`` for numbers that cannot be.
    """

    ranks_per_node: int
    between_bytes_per_s: float = BETWEEN_BYTES_PER_S
    within_bytes_per_s: float | None = None
    between_latency_s: float = BETWEEN_LATENCY_S

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"the number of ranks of a node must be at least 1, got {self.ranks_per_node}")
        for name in ("between_bytes_per_s", "within_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} must be a positive number, got {rate}")
        if not (math.isfinite(self.between_latency_s) and self.between_latency_s >= 0):
            raise ValueError(f"between_latency_s must be a non-negative number, got {self.between_latency_s}")

    @classmethod
    def of_links(cls, ranks_per_node: int, gbps: str | None = None) -> Nodes:
        """``gbps``: ``[WITHIN,]BETWEEN``, in gigabits per second of one rank's link."""
        if gbps is None:
            return cls(ranks_per_node)
        try:
            *within, between = [float(part) * GIGABIT for part in gbps.split(",")]
            (within_bytes_per_s,) = within or (None,)
        except ValueError:
            raise ValueError(f"links must be [WITHIN,]BETWEEN in gigabits a second, got {gbps!r}") from None
        return cls(ranks_per_node, between, within_bytes_per_s)

    def of(self, rank: int) -> int:
        """The node of ``rank``."""
        return rank // self.ranks_per_node

    def crossing(self, layout: ExecutionLayout) -> Crossing:
        sp, ranks = layout.parallel.sp, layout.ranks
        branches = [Counter([self.of(rank) for rank in ranks[at : at + sp]]) for at in range(0, len(ranks), sp)]
        together = min([min(counts.values()) for counts in branches])
        return Crossing(together, len({node for counts in branches for node in counts}) > 1)

    def more_s(
        self,
        crossing: Crossing,
        parallel: ParallelSpec,
        shape: Shape,
        exchanges: StepExchanges | None,
        *,
        branches: int,
        made_bytes: float,
        table_bytes_per_s: float,
    ) -> float:
        """Seconds that a step of ``shape`` takes longer than on one node of the table's hardware, at least 0.

        A rank computes ``branches`` of guidance. With two of them apart, ``made_bytes`` go from one to the other.
        """
        within = self.within_bytes_per_s or table_bytes_per_s
        seconds = 0.0
        if parallel.cfg > 1 and crossing.any:
            seconds += self.between_latency_s + made_bytes / self.between_bytes_per_s
        if parallel.sp > 1 and exchanges is not None:
            sp = parallel.sp
            each = exchanges.bytes_per_token * shape.num_tokens / sp / sp * branches  # from one rank to another
            there, here = (sp - crossing.together) * each, (crossing.together - 1) * each
            one_s = there / self.between_bytes_per_s + here / within - (there + here) / table_bytes_per_s
            if there:
                one_s += self.between_latency_s
            seconds += exchanges.num_all_to_alls * one_s
        return max(0.0, seconds)


@dataclass(frozen=True, slots=True)
class Crossing:
    """How a layout lies on nodes: every rank has at least ``together`` of its branch on its node, itself included.

    ``any``: the ranks are of several nodes.
    """

    together: int
    any: bool
