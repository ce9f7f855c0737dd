"""Which component is on which rank, what is being loaded, and what cannot be (LegoDiffusion paper, section 5).

The rules:

1. A rank that is free may load a component that it may have, lacks, and has room for beside what it keeps. It runs
   nothing else meanwhile. What is pinned is never dropped; neither is what another rank could not load again.
2. What was measured at loading, bytes and seconds, takes the place of what was declared.
3. A component that failed ``MAX_FAILURES`` times in a row cannot be loaded: the requests that need it and have it
   nowhere end, and so do those that arrive within ``BELIEVED_S``, before which it is not tried again. That its
   rank was lost meanwhile is a failure, too: loading it may be what ends a process, again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from gfdit.core.components import Component, Load
from gfdit.core.policy.interface import PolicyError, RankView

MAX_FAILURES = 3
BELIEVED_S = 60.0
GIB = 2**30


class Residency:
    """The table of components, ``capacity_bytes`` of them fit on a rank; None: however many."""

    def __init__(self, components: Iterable[Component] = (), capacity_bytes: int | None = None) -> None:
        """Raises ``ValueError`` for a component that fits on no rank beside those that are pinned there."""
        self._table = {one.name: one for one in components}
        self.table: Mapping[str, Component] = MappingProxyType(self._table)
        self.capacity_bytes = capacity_bytes
        self.loading: dict[int, Load] = {}  # by number
        self._failures: dict[str, int] = {}  # in a row
        self._broken: dict[str, tuple[float, str]] = {}  # when it failed last, and why
        pinned = sum([one.num_bytes for one in self._table.values() if one.pinned])
        for one in self._table.values():
            needed = pinned + (0 if one.pinned else one.num_bytes)
            if capacity_bytes is not None and one.ranks is None and needed > capacity_bytes:
                raise ValueError(
                    f"component {one.name} takes {one.num_bytes / GIB:.2f} GiB, with what is pinned "
                    f"{needed / GIB:.2f} GiB, and a rank has {capacity_bytes / GIB:.2f} GiB"
                )

    def initial(self, rank: int) -> frozenset[str]:
        """What a rank has from the start: what is pinned."""
        return frozenset(one.name for one in self._table.values() if one.pinned and one.may_be_on(rank))

    def num_bytes(self, names: Iterable[str]) -> int:
        """Of components; what is in no table takes none: it is a whole model, which has its own books."""
        return sum([self._table[name].num_bytes for name in names if name in self._table])

    def free_bytes(self, resident: Iterable[str]) -> float:
        return float("inf") if self.capacity_bytes is None else self.capacity_bytes - self.num_bytes(resident)

    def offered(self, now_s: float) -> Mapping[str, Component]:
        """The table for policies: what cannot be loaded for now may be on no rank."""
        hopeless = [name for name in self._broken if self.why_not(name, now_s)]
        if not hopeless:
            return self.table
        return self._table | {name: replace(self._table[name], ranks=()) for name in hopeless}

    def check(self, load: object, *, policy: str, ranks: Mapping[int, RankView], now_s: float) -> Load:
        """``load``, which keeps rules 1 and 3. Raises :class:`PolicyError` naming policy, component and rule."""

        if not isinstance(load, Load):
            raise PolicyError(f"policy {policy!r} must return loads of type Load, got {type(load).__name__}")

        def broken(rule: str) -> PolicyError:
            return PolicyError(f"policy {policy!r} broke a rule for a load of {load.component}: {rule}")

        if (component := self._table.get(load.component)) is None:
            raise broken(f"there is no such component, components: {', '.join(sorted(self._table))}")
        if (rank := ranks.get(load.rank)) is None:
            raise broken(f"rank {load.rank} does not exist or is lost, ranks: {sorted(ranks)}")
        if rank.running_request is not None:
            raise broken(f"rank {load.rank} is busy with request {rank.running_request}")
        if load.component in rank.resident:
            raise broken(f"it is on rank {load.rank} already")
        if not component.may_be_on(load.rank):
            raise broken(f"it may be on ranks {component.ranks}, not on {load.rank}")
        if reason := self.why_not(load.component, now_s):
            raise broken(reason)
        for name in load.evict:
            if name not in rank.resident:
                raise broken(f"{name} is not on rank {load.rank} and cannot be evicted")
            if name not in self._table or self._table[name].pinned:
                raise broken(f"{name} is pinned on rank {load.rank}")
        left = rank.resident.difference(load.evict)
        if (free := self.free_bytes(left)) < component.num_bytes:
            raise broken(f"it takes {component.num_bytes} bytes, and rank {load.rank} has {free:.0f} left")
        return load

    def may_be_on(self, name: str, rank: int) -> bool:
        """Whether ``rank`` may have ``name``; a whole model is where it is."""
        return name not in self._table or self._table[name].may_be_on(rank)

    def begin(self, load_id: int, load: Load) -> None:
        self.loading[load_id] = load

    def end(self, load_id: int, seconds: float, num_bytes: int, error: str, now_s: float) -> Load | None:
        """Note what has come of a load; None if it was given up before, with its rank."""
        if (load := self.loading.pop(load_id, None)) is None:
            return None
        name = load.component
        if error:
            self._note_failure(name, error, now_s)
        else:
            self._failures.pop(name, None)
            self._broken.pop(name, None)
            known = self._table[name]
            self._table[name] = replace(
                known, load_s=seconds or known.load_s, num_bytes=num_bytes or known.num_bytes
            )
        return load

    def drop_rank(self, rank: int, reason: str, now_s: float) -> list[str]:
        """Of a lost rank nobody will report. Returns what was being loaded there."""
        lost = [number for number, load in self.loading.items() if load.rank == rank]
        names = [self.loading.pop(number).component for number in lost]
        for name in names:
            self._note_failure(name, f"rank {rank} was lost: {reason}", now_s)
        return names

    def _note_failure(self, name: str, error: str, now_s: float) -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        self._broken[name] = now_s, error

    def why_not(self, name: str, now_s: float) -> str:
        """Why ``name`` cannot be loaded, if that is so (rule 3)."""
        if name not in self._table:
            return f"there is no component {name}"
        failed_s, error = self._broken.get(name, (0.0, ""))
        if self._failures.get(name, 0) < MAX_FAILURES:
            return ""
        if now_s - failed_s >= BELIEVED_S:
            self._failures[name] = MAX_FAILURES - 1  # once more
            return ""
        return f"component {name} cannot be loaded: {error}"
