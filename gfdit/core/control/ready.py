"""Ready tasks in order of arrival and by request, and the view a policy sees of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from gfdit.core.policy import TaskView
from gfdit.core.policy.changes import ChangeLog

Place = tuple[int, int]
"""Where a task stands: arrival number of its request, position in the request's graph."""


class ReadyTasks:
    """Tasks by id, by request and in order. Adding and removing cost a binary search."""

    def __init__(self) -> None:
        self.by_id: dict[str, TaskView] = {}
        self._by_request: dict[str, tuple[TaskView, ...]] = {}
        self.by_request = MappingProxyType(self._by_request)
        self.log = ChangeLog()
        self._places: list[Place] = []
        self._views: list[TaskView] = []  # parallel to ``_places``
        self._in_order: tuple[TaskView, ...] | None = None

    @property
    def in_order(self) -> tuple[TaskView, ...]:
        if self._in_order is None:
            self._in_order = tuple(self._views)
        return self._in_order

    def with_more(
        self, more: Iterable[tuple[Place, TaskView]]
    ) -> tuple[tuple[TaskView, ...], Mapping[str, tuple[TaskView, ...]]]:
        """In order and by request, as if these were ready too."""
        later = ReadyTasks()
        later._by_request |= self._by_request
        later._places, later._views = self._places.copy(), self._views.copy()
        for place, view in more:
            later.add(view, place)
        return later.in_order, later.by_request

    def add(self, view: TaskView, place: Place) -> None:
        index = bisect_left(self._places, place)
        self._places.insert(index, place)
        self._views.insert(index, view)
        self.by_id[view.id] = view
        self._has_changed(view.request_id, index)

    def remove(self, task_id: str, place: Place) -> None:
        index = bisect_left(self._places, place)
        del self._places[index], self._views[index]
        self._has_changed(self.by_id.pop(task_id).request_id, index)

    def replace(self, view: TaskView, place: Place) -> None:
        index = bisect_left(self._places, place)
        self._views[index] = self.by_id[view.id] = view
        self._has_changed(view.request_id, index)

    def _has_changed(self, name: str, index: int) -> None:
        """A task of the request ``name`` is, or was, at ``index``; its others are beside it."""
        self._in_order = None
        self.log.note(name)
        views, first, end = self._views, index, index
        while first and views[first - 1].request_id == name:
            first -= 1
        while end < len(views) and views[end].request_id == name:
            end += 1
        if first < end:
            self._by_request[name] = tuple(views[first:end])
        else:
            del self._by_request[name]

    def check_integrity(self) -> None:
        assert self._places == sorted(set(self._places)), "ready tasks are out of order"
        assert {view.id: view for view in self._views} == self.by_id, "ready order and ready set disagree"
        assert self._in_order in (None, tuple(self._views)), "the policy sees old tasks"
        by_request: dict[str, list[TaskView]] = {}
        for view in self._views:
            by_request.setdefault(view.request_id, []).append(view)
        assert {name: list(views) for name, views in self.by_request.items()} == by_request, (
            "ready tasks and those of their requests disagree"
        )
