"""Cluster state: requests, dispatches and ranks, with the views a policy sees of them.

Views are rebuilt only where something changed: asking a policy costs what changed, not what exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from gfdit.core import commands as cmd
from gfdit.core.components import Load
from gfdit.core.control.ranks import RankPool
from gfdit.core.control.ready import ReadyTasks
from gfdit.core.control.records import (
    ArtifactState,
    DispatchRecord,
    DispatchState,
    RankRecord,
    RequestRecord,
    TaskState,
)
from gfdit.core.control.recovery import is_lacking, rewind
from gfdit.core.control.residency import Residency
from gfdit.core.cost import CostModel
from gfdit.core.layouts import ParallelSpec
from gfdit.core.policy import RequestView, SchedulerView, TaskView
from gfdit.core.policy.changes import Offers
from gfdit.core.tasks import Request, Task, TaskGraph, TaskKind


class ClusterState:
    """Bookkeeping without decisions; :class:`~gfdit.core.control.ControlPlane` decides.

    Who holds which artifact is the business of :class:`~gfdit.core.control.artifacts.Artifacts`.
    """

    def __init__(
        self, ranks: Iterable[RankRecord], *, shows_bytes: bool = False, residency: Residency | None = None
    ) -> None:
        """``shows_bytes``: to the policy, what each rank holds of artifacts."""
        self.shows_bytes = shows_bytes
        self.residency = residency or Residency()
        self.ranks = RankPool(ranks)
        self.ready = ReadyTasks()
        self.requests: dict[str, RequestRecord] = {}
        self.dispatches: dict[int, DispatchRecord] = {}
        self.last_id = 0
        self._num_arrived = 0
        self._streams_began = False
        self._request_views: dict[str, RequestView] = {}
        self.request_views = MappingProxyType(self._request_views)

    def new_id(self) -> int:
        """Of a dispatch, copy or reset: they share one count."""
        self.last_id += 1
        return self.last_id

    # Requests

    def new_record(self, request: Request, graph: TaskGraph) -> RequestRecord:
        self._num_arrived += 1
        return RequestRecord(request, graph, self._num_arrived)

    def add(self, record: RequestRecord) -> None:
        """A request has arrived; the policy does not see it before :meth:`show`."""
        self.requests[record.request.id] = record

    def show(self, record: RequestRecord) -> None:
        """From now on the policy sees a request."""
        record.visible = True
        self._refresh(record)
        self.offer_ready(record)

    def remove(self, record: RequestRecord) -> cmd.FreeArtifacts | None:
        """Forget a request none of whose tasks runs; returns what is left to free on the ranks."""
        artifacts = record.artifacts.values()
        left = [
            art
            for art in artifacts
            if art.state is not ArtifactState.FREED or record.has_strays or art.kept or art.keeping
        ]
        ranks = tuple(sorted(record.touched & self.ranks.present.keys()))
        del self.requests[record.request.id]
        if self._request_views.pop(record.request.id, None) is not None:
            self.ready.log.note(record.request.id)
        return cmd.FreeArtifacts(ranks, tuple(art.id for art in left), self.last_id) if left and ranks else None

    def _refresh(self, record: RequestRecord) -> None:
        self._request_views[record.request.id] = record.view()
        self.ready.log.note(record.request.id)

    # Tasks

    def offer_ready(self, record: RequestRecord) -> None:
        """Make every unblocked task ready."""
        for task in record.unblocked:
            record.move(task, TaskState.READY)
            self.ready.add(record.task_view(task), record.place(task.id))
        record.unblocked.clear()

    def withdraw_ready(self, record: RequestRecord) -> None:
        """The request ends: no more of its tasks are to run."""
        for task in record.ready:
            self._block(record, task, TaskState.UNBLOCKED)
            record.unblocked.append(task)

    def _block(self, record: RequestRecord, task: Task, to: TaskState) -> None:
        self.ready.remove(task.id, record.place(task.id))
        record.move(task, to)

    def oldest_ready(self) -> RequestRecord:
        return self.requests[self.ready.in_order[0].request_id]

    def finish_task(self, record: RequestRecord, task: Task) -> None:
        """``task`` has succeeded, and what it has made and read is accounted for."""
        if record.has_strays:
            self.refresh_ready(record)
        record.move(task, TaskState.FINISHED)
        record.num_finished += 1
        record.steps_done += task.kind is TaskKind.DENOISE
        counts = record.tasks_left
        record.tasks_left = MappingProxyType({**counts, task.kind: counts[task.kind] - 1})
        if record.parts_left is not None:
            part = (task.component, task.kind)
            record.parts_left = MappingProxyType({**record.parts_left, part: record.parts_left[part] - 1})
        self._refresh(record)

    def refresh_ready(self, record: RequestRecord) -> None:
        """Show anew where the inputs of its ready tasks are."""
        for task in record.ready:
            self.ready.replace(record.task_view(task), record.place(task.id))

    def drop_specs(self, record: RequestRecord, dropped: Mapping[TaskKind, frozenset[ParallelSpec]]) -> None:
        """``dropped`` does not fit into memory: it is not offered any more."""
        record.drop(dropped)
        if record.visible:
            self.refresh_ready(record)
            self._refresh(record)

    def recover(self, record: RequestRecord) -> None:
        """After artifacts or a dispatch of it were lost: make ready what has to run, perhaps again."""
        for task in rewind(record):
            self._block(record, task, TaskState.WAITING)
        if not record.visible:
            return  # it has come from the last control plane, and waits for memory still
        self.refresh_ready(record)
        self._refresh(record)
        self.offer_ready(record)

    # Dispatches

    def occupy(self, dispatch: DispatchRecord, ends_s: float) -> None:
        """``dispatch``, whose tasks are ready and whose ranks are free, runs and should end at ``ends_s``."""
        self.dispatches[dispatch.id] = dispatch
        for task in dispatch.tasks:
            record = self.requests[task.request_id]
            self.ready.remove(task.id, record.place(task.id))
            record.move(task, TaskState.RUNNING)
            if record.streamed:
                record.begin_streams(task)
                self._streams_began |= bool(record.unblocked)
                self.offer_ready(record)
        self._occupy(dispatch, ends_s)

    def take_streams_began(self) -> bool:
        """Whether tasks are ready, since it was last asked, because what they read on their way is being made."""
        began, self._streams_began = self._streams_began, False
        return began

    def _occupy(self, dispatch: DispatchRecord, ends_s: float) -> None:
        dispatch.ends_s = ends_s
        for task in dispatch.tasks:
            record = self.requests[task.request_id]
            record.running.add(dispatch.id)
            record.touched.update(dispatch.layout.ranks)
            record.last_layout = dispatch.layout
            self._refresh(record)
        for rank in dispatch.members:
            self.ranks.occupy(rank, dispatch.id, dispatch.tasks[0].request_id, ends_s)

    # The dispatch queued behind another one

    def follower(self, dispatch: DispatchRecord) -> DispatchRecord | None:
        return None if dispatch.followed_by is None else self.dispatches[dispatch.followed_by]

    def queue(self, dispatch: DispatchRecord, running: DispatchRecord) -> None:
        """``dispatch``, on the same layout, comes behind ``running``; its tasks are not ready yet."""
        self.dispatches[dispatch.id] = dispatch
        for task in dispatch.tasks:
            self.requests[task.request_id].move(task, TaskState.QUEUED)
        dispatch.behind, running.followed_by = running.id, dispatch.id

    def promote(self, dispatch: DispatchRecord, now_s: float) -> None:
        """What ``dispatch`` was queued behind has ended and left its ranks free: it runs now."""
        dispatch.behind = None
        for task in dispatch.tasks:
            record = self.requests[task.request_id]
            record.move(task, TaskState.RUNNING)
            record.missing.pop(task.id, None)  # for what it has on its ranks, but is lost elsewhere
        self._occupy(dispatch, now_s + dispatch.expected_s)

    def unqueue(self, dispatch: DispatchRecord) -> None:
        """``dispatch`` was withdrawn while it was queued."""
        assert dispatch.behind is not None
        before = self.dispatches[dispatch.behind]
        before.followed_by, before.asked_version = None, -1
        for task in dispatch.tasks:
            self.requests[task.request_id].move(task, TaskState.WAITING)
        dispatch.move(DispatchState.WITHDRAWN)
        del self.dispatches[dispatch.id]

    def undo(self, dispatch: DispatchRecord) -> None:
        """``dispatch`` was withdrawn when it had its ranks already, but none had begun."""
        self.release(dispatch, DispatchState.WITHDRAWN)
        for task in dispatch.tasks:
            record = self.requests[task.request_id]
            record.running.discard(dispatch.id)
            record.move(task, TaskState.UNBLOCKED)
            record.unblocked.append(task)
            self._refresh(record)

    def release(self, dispatch: DispatchRecord, ending: DispatchState) -> None:
        """``dispatch`` has come to its end, and leaves its ranks."""
        dispatch.move(ending)
        if not dispatch.has_left:
            self.leave(dispatch)
        del self.dispatches[dispatch.id]

    def leave(self, dispatch: DispatchRecord) -> None:
        """``dispatch`` needs its ranks no more."""
        dispatch.has_left = True
        for rank in dispatch.members:
            self.ranks.release(rank)

    # Ranks

    def drop_rank(self, rank_id: int) -> None:
        """Take a lost rank out, and all it holds."""
        self.ranks.drop(rank_id)
        for dispatch in self.dispatches.values():
            if rank_id in dispatch.layout.ranks:
                dispatch.lost |= {rank_id}
        for record in self.requests.values():
            for art in record.artifacts.values():
                art.drop_from((rank_id,))
            self.refresh_ready(record)

    def lacking(self) -> list[RequestRecord]:
        """Requests without a part of something, in order of arrival."""
        return [record for record in self.requests.values() if record.ending is None and is_lacking(record)]

    def artifact_bytes(self) -> dict[int, int]:
        """Bytes that each rank holds of artifacts, metadata left out."""
        held = dict.fromkeys(self.ranks.present, 0)
        for record in self.requests.values():
            for art in record.live_artifacts if record.touched else ():
                for rank, layout in art.holders.items():
                    held[rank] += art.view.held_bytes(layout, rank)
        return held

    # The policy's view

    def with_bytes(self, view: SchedulerView) -> SchedulerView:
        """``view`` with what each rank holds of artifacts."""
        held = self.artifact_bytes()
        ranks = tuple([replace(rank, artifact_bytes=held[rank.id]) for rank in view.ranks])
        return replace(view, ranks=ranks)

    def runnable(self) -> list[TaskView]:
        """The ready tasks for which there are ranks enough, now that no other runs."""
        return [task for task in self.ready.in_order if self._has_room(task.candidates, task.model)]

    # Components

    def begin_load(self, load: Load, ends_s: float) -> cmd.LoadComponent:
        command = cmd.LoadComponent(self.new_id(), load.rank, load.component, load.evict)
        self.residency.begin(command.load_id, load)
        self.ranks.load(load.rank, load.component, load.evict, ends_s)
        return command

    def needing(self, component: str) -> list[RequestRecord]:
        """Requests with a task of ``component`` that has not finished, in order of arrival."""
        return [
            record
            for record in self.requests.values()
            if record.ending is None
            and any(
                task.component == component and record.states[task.id] is not TaskState.FINISHED
                for task in record.graph.tasks
            )
        ]

    def can_denoise(self, task: TaskView) -> bool:
        """Whether there are ranks enough for the steps of the request of ``task`` as well."""
        request = self.request_views[task.request_id]
        parts = request.parts or {(task.model, TaskKind.DENOISE): 1}
        models = [model for (model, kind), left in parts.items() if left and kind is TaskKind.DENOISE]
        return all([self._has_room(request.candidates, model) for model in models])

    def _has_room(self, specs: Iterable[ParallelSpec], model: str) -> bool:
        able = [rank for rank in self.ranks.free_in_order if self.residency.may_be_on(model, rank)]
        return min([spec.size for spec in specs]) <= len(able)

    def has_work(self) -> bool:
        return bool(self.ready.by_id) and self.ranks.any_free

    def view(self, now_s: float, cost: CostModel) -> SchedulerView:
        ready = self.ready.in_order
        view = SchedulerView(
            now_s,
            ready,
            self.request_views,
            self.ranks.in_order,
            self.ranks.free_in_order,
            cost,
            self.residency.offered(now_s),
            self.residency.capacity_bytes,
            Offers(ready, self.request_views, self.ready.by_request, self.ready.log),
        )
        return self.with_bytes(view) if self.shows_bytes else view
