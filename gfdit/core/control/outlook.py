"""What a policy is shown ahead of time: the state as it should be once a running dispatch has ended.

Nothing else is assumed to happen meanwhile. What the policy then goes on with, on the same layout, can be queued
behind the dispatch.
"""

from __future__ import annotations

from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from gfdit.core.control.records import DispatchRecord
from gfdit.core.control.state import ClusterState
from gfdit.core.cost import CostModel
from gfdit.core.policy import SchedulerView, TaskView
from gfdit.core.policy.changes import Offers
from gfdit.core.tasks import Task, TaskKind


class NextStep(Struct, frozen=True, gc=False):
    """What follows a dispatch on its own layout; ``views`` are what the policy saw of ``tasks``."""

    tasks: tuple[Task, ...]
    views: tuple[TaskView, ...]
    expected_s: float


class Outlook:
    """The state once ``dispatch`` has ended well.

    ``views`` are the tasks that become ready by that and can go on where they are: nothing is to be copied.
    """

    def __init__(self, state: ClusterState, dispatch: DispatchRecord) -> None:
        self._state = state
        self._dispatch = dispatch
        self._requests = dict(state.request_views)
        self._ready: list[tuple[tuple[int, int], TaskView]] = []
        self.views: dict[str, TaskView] = {}
        self.tasks: dict[str, Task] = {}
        for request_id in dict.fromkeys([task.request_id for task in dispatch.tasks]):
            self._end_tasks_of(request_id)

    def view(self, now_s: float, cost: CostModel) -> SchedulerView:
        ranks, free_ranks = self._state.ranks.in_order_without(self._dispatch.layout.ranks)
        ready, by_request = self._state.ready.with_more(self._ready)
        requests = MappingProxyType(self._requests)
        ahead = {task.request_id for task in self._dispatch.tasks}
        held = self._state.residency
        view = SchedulerView(
            now_s,
            ready,
            requests,
            ranks,
            free_ranks,
            cost,
            held.table,
            held.capacity_bytes,
            Offers(ready, requests, by_request, self._state.ready.log, ahead),
        )
        return self._state.with_bytes(view) if self._state.shows_bytes else view

    def _end_tasks_of(self, request_id: str) -> None:
        record = self._state.requests[request_id]
        done = [task for task in self._dispatch.tasks if task.request_id == request_id]
        if record.num_finished + len(done) == len(record.graph.tasks):
            del self._requests[request_id]
            return
        left = dict(record.tasks_left)
        for task in done:
            left[task.kind] -= 1
        parts = None
        if record.parts_left is not None:
            parts = dict(record.parts_left)
            for task in done:
                parts[task.component, task.kind] -= 1
        self._requests[request_id] = replace(
            self._requests[request_id],
            parts=None if parts is None else MappingProxyType(parts),
            steps_done=record.steps_done + sum([task.kind is TaskKind.DENOISE for task in done]),
            tasks_left=MappingProxyType(left),
            running=len(record.running) > 1,
        )
        made = {name for task in done for name in task.outputs}
        ranks = self._dispatch.layout.ranks
        for task in record.unblocked_by(made):
            view = record.task_view(task, made, ranks)
            self._ready.append((record.place(task.id), view))
            others = [record.artifacts[name] for name in task.inputs if name not in made]
            if record.streamed and (task.deferred or not record.streamed.keys().isdisjoint(task.outputs)):
                continue  # who waits for another rank must not be waited for by one
            if all([art.view.fits(art.holders, self._dispatch.layout) for art in others]):
                self.views[task.id], self.tasks[task.id] = view, task
