"""Where and how a task runs: ordered ranks and a parallel specification."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct


class ParallelSpec(NamedTuple):
    """Degrees of sequence (``sp``) and classifier-free-guidance (``cfg``) parallelism.

    A tuple since it is part of every key of the cost model, which policies ask all the time.
    """

    sp: int = 1
    cfg: int = 1

    @property
    def size(self) -> int:
        """Number of ranks the specification occupies."""
        return self.sp * self.cfg

    def __str__(self) -> str:
        return f"sp{self.sp}" if self.cfg == 1 else f"cfg{self.cfg}xsp{self.sp}"


SINGLE = ParallelSpec()


def widest(specs: Iterable[ParallelSpec], num_ranks: int) -> ParallelSpec | None:
    """The specification that uses most of ``num_ranks`` ranks; of two, the one with more sequence shards."""
    return max((s for s in specs if s.size <= num_ranks), key=lambda s: (s.size, s.sp), default=None)


def not_wider(spec: ParallelSpec, other: ParallelSpec) -> bool:
    """Whether a rank has at least as much to do at ``spec`` as at ``other``."""
    return spec.sp <= other.sp and spec.size <= other.size


class ExecutionLayout(Struct, frozen=True, gc=False):
    """Ordered global ranks under a :class:`ParallelSpec`.

    The rank of CFG branch ``c`` and sequence shard ``s`` is ``ranks[c * sp + s]``. A layout is a plain
    record: the control plane checks it against the rules when a policy hands it in.
    """

    ranks: tuple[int, ...]
    parallel: ParallelSpec = SINGLE

    def sp_ranks(self, rank: int) -> tuple[int, ...]:
        """Ordered global ranks that share ``rank``'s CFG branch and split its sequence."""
        sp = self.parallel.sp
        start = self.ranks.index(rank) // sp * sp
        return self.ranks[start : start + sp]

    def cfg_ranks(self, rank: int) -> tuple[int, ...]:
        """Ordered global ranks that hold ``rank``'s sequence shard, one per CFG branch."""
        sp = self.parallel.sp
        return self.ranks[self.ranks.index(rank) % sp :: sp]

    def __str__(self) -> str:
        return f"{self.parallel}@{','.join(map(str, self.ranks))}"
