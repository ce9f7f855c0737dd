"""Ready tasks in order of arrival, and the view a policy sees of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from gfdit.core.policy import TaskView

Place = tuple[int, int]
"""Where a task stands: arrival number of its request, position in the request's graph."""


class ReadyTasks:
    """Tasks by id and in order. Adding and removing cost a binary search."""

    def __init__(self) -> None:
        self.by_id: dict[str, TaskView] = {}
        self._places: list[Place] = []
        self._views: list[TaskView] = []  # parallel to ``_places``
        self._in_order: tuple[TaskView, ...] | None = None

    @property
    def in_order(self) -> tuple[TaskView, ...]:
        if self._in_order is None:
            self._in_order = tuple(self._views)
        return self._in_order

    def in_order_with(self, more: Iterable[tuple[Place, TaskView]]) -> tuple[TaskView, ...]:
        """In order, as if these were ready too."""
        places, views = self._places.copy(), self._views.copy()
        for place, view in more:
            index = bisect_left(places, place)
            places.insert(index, place)
            views.insert(index, view)
        return tuple(views)

    def add(self, view: TaskView, place: Place) -> None:
        index = bisect_left(self._places, place)
        self._places.insert(index, place)
        self._views.insert(index, view)
        self.by_id[view.id] = view
        self._in_order = None

    def remove(self, task_id: str, place: Place) -> None:
        index = bisect_left(self._places, place)
        del self._places[index], self._views[index]
        del self.by_id[task_id]
        self._in_order = None

    def replace(self, view: TaskView, place: Place) -> None:
        self._views[bisect_left(self._places, place)] = self.by_id[view.id] = view
        self._in_order = None

    def check_integrity(self) -> None:
        assert self._places == sorted(set(self._places)), "ready tasks are out of order"
        assert {view.id: view for view in self._views} == self.by_id, "ready order and ready set disagree"
        assert self._in_order in (None, tuple(self._views)), "the policy sees old tasks"
