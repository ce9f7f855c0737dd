"""Components: models that are loaded each on its own, and shared by workflows (LegoDiffusion paper, section 5)."""

from __future__ import annotations

from msgspec import Struct


class Component(Struct, frozen=True, gc=False):
    """What a rank can hold, or not. ``load_s`` it takes to load, until that was measured.

    ``ranks`` are those that may hold it, by default all. What is ``pinned`` is there from the start and stays.
    """

    name: str
    num_bytes: int
    load_s: float = 0.0
    pinned: bool = False
    ranks: tuple[int, ...] | None = None

    def may_be_on(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


class Load(Struct, frozen=True, gc=False):
    """A decision: ``rank``, which is free, loads ``component``, and before that drops those in ``evict``."""

    rank: int
    component: str
    evict: tuple[str, ...] = ()
