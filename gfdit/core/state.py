"""Cluster state: requests, artifacts, dispatches and ranks, with the views a policy sees of them.

Views are rebuilt only where something changed: asking a policy costs what changed, not what exists.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gfdit.core import commands as cmd
from gfdit.core.cost import CostModel
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec
from gfdit.core.policy import RankView, RequestView, SchedulerView, TaskView
from gfdit.core.records import ArtifactRecord, ArtifactState, DispatchRecord, RankRecord, RequestRecord
from gfdit.core.tasks import Request, Task, TaskGraph, TaskKind


class ClusterState:
    """Bookkeeping without decisions; :class:`~gfdit.core.control.ControlPlane` decides."""

    def __init__(self, ranks: Iterable[RankRecord]) -> None:
        self.ranks: dict[int, RankRecord] = {rank.id: rank for rank in sorted(ranks, key=lambda rank: rank.id)}
        self.lost: dict[int, RankRecord] = {}
        self.requests: dict[str, RequestRecord] = {}
        self.dispatches: dict[int, DispatchRecord] = {}
        self.ready: dict[str, TaskView] = {}
        self.rank_views: dict[int, RankView] = {rank.id: _rank_view(rank, self) for rank in self.ranks.values()}
        self._request_views: dict[str, RequestView] = {}
        self._order: list[tuple[int, int, str]] = []  # ready tasks as (arrival sequence, position, task id)
        self._num_arrived = 0
        self._view_parts: tuple[tuple[RankView, ...], tuple[int, ...]] | None = None

    # Requests

    def new_record(self, request: Request, graph: TaskGraph) -> RequestRecord:
        self._num_arrived += 1
        return RequestRecord(request, graph, self._num_arrived, _first_view(request, graph))

    def add(self, record: RequestRecord) -> None:
        self.requests[record.request.id] = record
        self._request_views[record.request.id] = record.view
        self.offer_ready(record)

    def remove(self, record: RequestRecord) -> cmd.FreeArtifacts | None:
        """Forget a request none of whose tasks runs; returns what is left to free on the ranks."""
        left = [art for art in record.artifacts.values() if art.state is not ArtifactState.FREED]
        ranks = tuple(sorted(record.touched & self.ranks.keys()))
        del self.requests[record.request.id]
        del self._request_views[record.request.id]
        return cmd.FreeArtifacts(ranks, tuple(art.id for art in left)) if left and ranks else None

    def _update_view(self, record: RequestRecord, **changes: Any) -> None:
        record.view = replace(record.view, **changes)
        self._request_views[record.request.id] = record.view

    # Tasks and artifacts

    def task(self, task_id: str) -> Task:
        return self.requests[self.ready[task_id].request_id].offered[task_id]

    def artifact(self, task: Task, name: str) -> ArtifactRecord:
        return self.requests[task.request_id].artifacts[name]

    def offer_ready(self, record: RequestRecord) -> None:
        """Make every unblocked task ready."""
        for task in record.unblocked:
            record.offered[task.id] = task
            self.ready[task.id] = _task_view(record, task)
            insort(self._order, (record.sequence, record.position[task.id], task.id))
        record.unblocked.clear()

    def withdraw_ready(self, record: RequestRecord) -> None:
        for task_id in list(record.offered):
            if task_id in self.ready:
                self._withdraw(record, task_id)
                del record.offered[task_id]

    def _withdraw(self, record: RequestRecord, task_id: str) -> None:
        del self.ready[task_id]
        self._order.remove((record.sequence, record.position[task_id], task_id))

    def oldest_ready(self) -> RequestRecord:
        return self.requests[self.ready[self._order[0][2]].request_id]

    def plan_moves(self, task: Task, layout: ExecutionLayout) -> list[tuple[str, int, tuple[int, ...]]]:
        """Which inputs must be copied: (artifact, source, destinations). Newcomers only, one source each.

        A source inside the layout is preferred, since it is free by the time the task runs; then an idle
        holder, then any. The copies become holders at once: the task that needs them waits for them.
        """
        moves = []
        for name in task.inputs:
            art = self.artifact(task, name)
            newcomers = tuple(rank for rank in layout.ranks if rank not in art.holders)
            if not newcomers:
                continue
            inside = [rank for rank in layout.ranks if rank in art.holders]
            idle = [rank for rank in sorted(art.holders) if self.ranks[rank].free]
            source = (inside or idle or sorted(art.holders))[0]
            moves.append((name, source, newcomers))
            art.holders.update(newcomers)
        return moves

    # Dispatches

    def occupy(self, dispatch: DispatchRecord, busy_until_s: float) -> None:
        self.dispatches[dispatch.id] = dispatch
        for task in dispatch.tasks:
            record = self.requests[task.request_id]
            self._withdraw(record, task.id)
            record.running.add(dispatch.id)
            record.touched.update(dispatch.layout.ranks)
            self._update_view(record, last_layout=dispatch.layout, running=True)
        for rank in dispatch.layout.ranks:
            self.set_rank(rank, dispatch=dispatch.id, busy_until_s=busy_until_s)

    def release(self, dispatch: DispatchRecord) -> None:
        for rank in dispatch.members:
            self.set_rank(rank, dispatch=None, busy_until_s=None)
        del self.dispatches[dispatch.id]

    def finish_task(self, record: RequestRecord, task: Task, dispatch: DispatchRecord) -> list[cmd.Command]:
        """Materialize the outputs and free inputs without readers left.

        Ranks of the dispatch have dropped those that it consumes themselves (``RunTask.consumes``). Of two
        tasks that read an artifact at the same time neither consumes it.
        """
        freed: list[cmd.Command] = []
        members = set(dispatch.members)
        for name in task.outputs:
            record.materialize(name, dispatch.layout, members)
        for name in task.inputs:
            art = record.artifacts[name]
            art.readers -= 1
            if art.readers == 0:
                art.state = ArtifactState.FREED
                if left := tuple(sorted(art.holders - (members if name in dispatch.consumes else set()))):
                    freed.append(cmd.FreeArtifacts(left, (name,)))
                art.holders = set()
        del record.offered[task.id]
        record.num_finished += 1
        tasks_left = dict(record.view.tasks_left)
        tasks_left[task.kind] -= 1
        self._update_view(
            record,
            steps_done=record.view.steps_done + (task.kind is TaskKind.DENOISE),
            tasks_left=MappingProxyType(tasks_left),
            running=bool(record.running),
        )
        return freed

    # Ranks

    def set_rank(self, rank_id: int, **changes: Any) -> None:
        record = self.ranks.get(rank_id) or self.lost[rank_id]
        for name, value in changes.items():
            setattr(record, name, value)
        if rank_id in self.ranks:
            self.rank_views[rank_id] = _rank_view(record, self)
        self._view_parts = None

    def drop_rank(self, rank_id: int) -> list[str]:
        """Take a lost rank out; returns the requests left without a copy of something they still need."""
        self.lost[rank_id] = self.ranks.pop(rank_id)
        for dispatch in self.dispatches.values():
            if rank_id in dispatch.layout.ranks:
                dispatch.lost.add(rank_id)
        del self.rank_views[rank_id]
        self._view_parts = None
        orphans = []
        for request_id, record in self.requests.items():
            for art in record.artifacts.values():
                art.holders.discard(rank_id)
            live = [art for art in record.artifacts.values() if art.state is ArtifactState.MATERIALIZED]
            if any(not art.holders for art in live):
                orphans.append(request_id)
            for task_id in record.offered.keys() & self.ready.keys():
                self.ready[task_id] = _task_view(record, record.offered[task_id])
        return orphans

    def restore_rank(self, rank_id: int) -> None:
        if rank_id in self.lost:
            record = self.lost.pop(rank_id)
            record.dispatch = record.reset = record.busy_until_s = None
            self.ranks[rank_id] = record
            self.ranks = dict(sorted(self.ranks.items()))
            self.rank_views[rank_id] = _rank_view(record, self)
            self.rank_views = dict(sorted(self.rank_views.items()))
            self._view_parts = None

    # The policy's view

    def has_work(self) -> bool:
        return bool(self.ready) and any(rank.free for rank in self.ranks.values())

    def view(self, now_s: float, cost: CostModel) -> SchedulerView:
        if self._view_parts is None:
            free = tuple(rank.id for rank in self.ranks.values() if rank.free)
            self._view_parts = (tuple(self.rank_views.values()), free)
        ranks, free = self._view_parts
        ready = tuple(self.ready[task_id] for _, _, task_id in self._order)
        return SchedulerView(now_s, ready, MappingProxyType(self._request_views), ranks, free, cost)

    def check_integrity(self) -> None:
        assert [task_id for _, _, task_id in sorted(self._order)] == [key[2] for key in self._order]
        assert {task_id for _, _, task_id in self._order} == self.ready.keys(), (
            "ready order and ready set disagree"
        )
        for dispatch in self.dispatches.values():
            assert dispatch.waiting_for, f"dispatch {dispatch.id} is done but still open"
            for rank in dispatch.members:
                assert self.ranks[rank].dispatch == dispatch.id, f"rank {rank} does not run {dispatch.id}"
        for rank_record in self.ranks.values():
            assert rank_record.dispatch is None or rank_record.dispatch in self.dispatches
            assert not (rank_record.dispatch and rank_record.reset), f"rank {rank_record.id} runs and resets"
        for record in self.requests.values():
            _check_request(record, self)


def _first_view(request: Request, graph: TaskGraph) -> RequestView:
    denoise = [task.candidates for task in graph.tasks if task.kind is TaskKind.DENOISE]
    candidates: tuple[ParallelSpec, ...] = denoise[0] if denoise else (SINGLE,)
    tasks_left = Counter(task.kind for task in graph.tasks)
    return RequestView(
        id=request.id,
        model=request.model,
        shape=request.shape,
        cfg=request.cfg,
        steps_done=0,
        num_steps=request.num_steps,
        arrival_s=request.arrival_s,
        deadline_s=request.deadline_s,
        priority=request.priority,
        slo_class=request.slo_class,
        candidates=candidates,
        tasks_left=MappingProxyType(dict(tasks_left)),
        last_layout=None,
        running=False,
    )


def _task_view(record: RequestRecord, task: Task) -> TaskView:
    held = tuple((name, tuple(sorted(record.artifacts[name].holders))) for name in task.inputs)
    return TaskView.of(record.request, task, held)


def _rank_view(rank: RankRecord, state: ClusterState) -> RankView:
    request = None
    if rank.dispatch is not None:
        request = state.dispatches[rank.dispatch].tasks[0].request_id
    elif rank.reset is not None:
        request = "(edge reset)"
    return RankView(rank.id, rank.busy_until_s, request, rank.resident, rank.node)


def _check_request(record: RequestRecord, state: ClusterState) -> None:
    label = f"request {record.request.id}"
    running = {dispatch.id for dispatch in state.dispatches.values() if _runs(dispatch, record)}
    assert running == record.running, f"{label} and its dispatches disagree"
    in_flight = sum(
        sum(task.request_id == record.request.id for task in state.dispatches[d].tasks) for d in running
    )
    ready = [task_id for task_id in record.offered if task_id in state.ready]
    assert record.ending is None or record.running, f"{label} has ended but is alive"
    assert record.ending is None or not ready, f"{label} is ending but offers tasks"
    assert record.ending or ready or running, f"{label} can never go on"
    if record.ending is None:
        total = record.num_finished + len(record.waiting) + len(record.unblocked) + len(ready) + in_flight
        assert total == len(record.graph.tasks), f"{label} lost a task"
    for art in record.artifacts.values():
        live = art.state is ArtifactState.MATERIALIZED
        assert live == (art.layout is not None and bool(art.holders)) or record.ending, f"{art.id} has no holder"
        assert art.state is not ArtifactState.FREED or art.readers == 0, f"{art.id} freed with readers"
        assert art.holders <= record.touched, f"{art.id} is on a rank its request never touched"


def _runs(dispatch: DispatchRecord, record: RequestRecord) -> bool:
    return any(task.request_id == record.request.id for task in dispatch.tasks)
