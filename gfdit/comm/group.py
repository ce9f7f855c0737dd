"""Logical groups: ordered ranks, nothing else (paper §4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gfdit.comm.agreement import group_seed


@dataclass(frozen=True, slots=True)
class Group:
    """An ordered set of global ranks as one member sees it. Pure host metadata; free to create and drop.

    ``index`` is the position of the member that made it, ``seed`` the group's identity in tokens, ``peers``
    the other members starting behind the member, so that not everybody sends to the same rank first. Two
    groups of the same ranks in the same order are the same group, whenever they were made.
    """

    ranks: tuple[int, ...]
    index: int
    seed: int
    peers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Global rank of the member that made this object."""
        return self.ranks[self.index]


def make_group(ranks: Sequence[int], *, rank: int, world_size: int, session: int) -> Group:
    """Raises ValueError for duplicates, ranks outside the world, or when ``rank`` is not a member."""
    ranks = tuple(int(member) for member in ranks)
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"group {ranks} names a rank twice")
    if any(not 0 <= member < world_size for member in ranks):
        raise ValueError(f"group {ranks} names a rank outside the world of {world_size}")
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not a member of group {ranks}")
    index = ranks.index(rank)
    return Group(ranks, index, group_seed(session, ranks), ranks[index + 1 :] + ranks[:index])
