"""The ranks: which there are, which are free, and the views of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from gfdit.core.control.records import LOADING, RESETTING, SUSPENDED, RankRecord
from gfdit.core.policy import RankView


class RankPool:
    """Ranks by id, in order of id. Views are rebuilt only for ranks that changed."""

    def __init__(self, ranks: Iterable[RankRecord]) -> None:
        self.present = {rank.id: rank for rank in sorted(ranks, key=lambda rank: rank.id)}
        self.lost: dict[int, RankRecord] = {}
        self.views = {rank.id: _view(rank) for rank in self.present.values() if not rank.leaving}
        self._free_views = {rank.id: _view(rank) for rank in self.present.values()}  # freed, always
        self._free = list(self.views)
        self._ordered: list[RankView] = []  # the views: a tuple of a list costs a fifth of one of a dictionary
        self._position: dict[int, int] = {}  # of each rank in it
        self._in_order: tuple[RankView, ...] | None = None
        self._free_in_order: tuple[int, ...] | None = None
        self._set_order()

    @property
    def num_known(self) -> int:
        """Ranks that there are, or were."""
        return len(self.present) + len(self.lost)

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    @property
    def in_order(self) -> tuple[RankView, ...]:
        if self._in_order is None:
            self._in_order = tuple(self._ordered)
        return self._in_order

    @property
    def free_in_order(self) -> tuple[int, ...]:
        if self._free_in_order is None:
            self._free_in_order = tuple(self._free)
        return self._free_in_order

    def in_order_without(self, ending: Iterable[int]) -> tuple[tuple[RankView, ...], tuple[int, ...]]:
        """All ranks and the free ones, as if ``ending``, which are not free, were."""
        ordered = self._ordered.copy()
        for rank_id in ending:
            ordered[self._position[rank_id]] = self._free_views[rank_id]
        return tuple(ordered), tuple(sorted([*self._free, *ending]))

    def views_without(self, ending: Iterable[int]) -> dict[int, RankView]:
        """The views by rank, as if ``ending`` were free."""
        return self.views | {rank_id: self._free_views[rank_id] for rank_id in ending}

    def occupy(self, rank_id: int, dispatch_id: int, request_id: str, busy_until_s: float) -> None:
        """``rank_id``, which is free, runs a dispatch; any may go on to what was queued there."""
        rank = self.present[rank_id]
        if not (rank.leaving or rank.suspended):
            del self._free[bisect_left(self._free, rank_id)]
        rank.dispatch, rank.running_request, rank.busy_until_s = dispatch_id, request_id, busy_until_s
        self._show(rank_id, _view(rank))

    def reset(self, rank_id: int, reset_id: int) -> None:
        """``rank_id``, on which nothing runs, resets its edges."""
        rank = self.present[rank_id]
        if rank.free:
            del self._free[bisect_left(self._free, rank_id)]
        rank.reset, rank.running_request = reset_id, RESETTING
        self._show(rank_id, _view(rank))

    def load(self, rank_id: int, component: str, evicted: Iterable[str], busy_until_s: float) -> None:
        """``rank_id``, which is free, drops some components and loads another one."""
        rank = self.present[rank_id]
        rank.loading, rank.running_request, rank.busy_until_s = component, LOADING, busy_until_s
        self._set_resident(rank, rank.resident.difference(evicted))
        del self._free[bisect_left(self._free, rank_id)]
        self._show(rank_id, _view(rank))

    def end_load(self, rank_id: int, component: str | None) -> None:
        """``rank_id`` is free and has ``component``, unless that failed."""
        rank = self.present[rank_id]
        rank.loading = None
        if component is not None:
            self._set_resident(rank, rank.resident | {component})
        self.release(rank_id)

    def note_resident(self, rank_id: int, components: frozenset[str]) -> None:
        """``rank_id``, which is free, has these."""
        self._set_resident(self.present[rank_id], components)
        self._show(rank_id, self._free_views[rank_id])

    def _set_resident(self, rank: RankRecord, resident: frozenset[str]) -> None:
        rank.resident = resident
        self._free_views[rank.id] = RankView(rank.id, None, None, resident, rank.node)

    def release(self, rank_id: int) -> None:
        """``rank_id``, which runs a dispatch or resets its edges, is free, unless it is suspended."""
        rank = self.present[rank_id]
        rank.clear()
        if rank.suspended or rank.leaving:
            self._show(rank_id, _view(rank))
        else:
            insort(self._free, rank_id)
            self._show(rank_id, self._free_views[rank_id])

    def suspend(self, rank_id: int) -> None:
        """``rank_id`` is given nothing until :meth:`resume`; what runs there goes on."""
        rank = self.present[rank_id]
        if rank.free:
            del self._free[bisect_left(self._free, rank_id)]
        rank.suspended = True
        rank.running_request = rank.running_request or SUSPENDED
        self._show(rank_id, _view(rank))

    def resume(self, rank_id: int) -> None:
        rank = self.present[rank_id]
        rank.suspended = False
        if rank.idle:
            self.release(rank_id)

    def leave(self, rank_id: int) -> None:
        """``rank_id`` is given nothing until :meth:`stay`, and not shown; what goes on there goes on."""
        rank = self.present[rank_id]
        if rank.free:
            self._free.remove(rank_id)
        rank.leaving = True
        del self.views[rank_id]
        self._set_order()

    def stay(self, rank_id: int) -> None:
        rank = self.present[rank_id]
        rank.leaving = False
        self.views[rank_id] = _view(rank)
        self.views = dict(sorted(self.views.items()))
        if rank.free:
            insort(self._free, rank_id)
        self._set_order()

    def drop(self, rank_id: int) -> None:
        rank = self.lost[rank_id] = self.present.pop(rank_id)
        self.views.pop(rank_id, None)
        if rank.free:
            self._free.remove(rank_id)
        self._set_order()

    def restore(self, rank_id: int, resident: Iterable[str] | None = None) -> None:
        """``rank_id`` is back, with ``resident``, or with what a new process has."""
        rank = self.lost.pop(rank_id)
        rank.suspended, rank.leaving, rank.loading = False, False, None
        self._set_resident(rank, rank.initial if resident is None else frozenset(resident))
        rank.clear()
        self.present[rank_id] = rank
        self.views[rank_id] = _view(rank)
        self.present = dict(sorted(self.present.items()))
        self.views = dict(sorted(self.views.items()))
        insort(self._free, rank_id)
        self._set_order()

    def check_integrity(self) -> None:
        assert self._free == [rank.id for rank in self.present.values() if rank.free], (
            "the free ranks are not free"
        )
        shown = {rank.id: _view(rank) for rank in self.present.values() if not rank.leaving}
        assert self.views == shown, "a view of a rank is old"
        assert self._ordered == list(self.views.values()), "a rank is out of order"
        assert self._in_order in (None, tuple(self._ordered)), "the policy sees old ranks"
        assert self._free_in_order in (None, tuple(self._free)), "the policy sees old free ranks"
        for rank in self.present.values():
            assert rank.dispatch is None or rank.reset is None, f"rank {rank.id} runs and resets"

    def _set_order(self) -> None:
        """Ranks have come or gone."""
        self._ordered = list(self.views.values())
        self._position = {rank_id: index for index, rank_id in enumerate(self.views)}
        self._in_order = self._free_in_order = None

    def _show(self, rank_id: int, view: RankView) -> None:
        if rank_id not in self.views:
            return  # it leaves
        self.views[rank_id] = self._ordered[self._position[rank_id]] = view
        self._in_order = self._free_in_order = None


def _view(rank: RankRecord) -> RankView:
    loading = rank.loading or ""
    return RankView(rank.id, rank.busy_until_s, rank.running_request, rank.resident, rank.node, loading=loading)
