"""Cluster state: requests, artifacts and dispatches, with the views a policy sees of them.

Views are rebuilt only where something changed: asking a policy costs what changed, not what exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType

from msgspec.structs import replace

from gfdit.core import commands as cmd
from gfdit.core.artifact_views import UNKNOWN, ArtifactView
from gfdit.core.cost import CostModel
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.policy import RequestView, SchedulerView
from gfdit.core.ranks import RankPool
from gfdit.core.ready import ReadyTasks
from gfdit.core.records import ArtifactState, DispatchRecord, RankRecord, RequestRecord
from gfdit.core.recovery import is_lacking, rewind
from gfdit.core.tasks import Request, Task, TaskGraph, TaskKind, artifact_kind
from gfdit.core.transfers import plan_transfers


class ClusterState:
    """Bookkeeping without decisions; :class:`~gfdit.core.control.ControlPlane` decides."""

    def __init__(self, ranks: Iterable[RankRecord], *, counts_bytes: bool = False) -> None:
        """``counts_bytes``: of artifacts, for every request."""
        self.counts_bytes = counts_bytes
        self.ranks = RankPool(ranks)
        self.ready = ReadyTasks()
        self.requests: dict[str, RequestRecord] = {}
        self.dispatches: dict[int, DispatchRecord] = {}
        self.last_id = 0  # of dispatches, copies and resets, which share one count
        self._num_arrived = 0
        self._request_views: dict[str, RequestView] = {}
        self.request_views = MappingProxyType(self._request_views)

    # Requests

    def new_record(self, request: Request, graph: TaskGraph) -> RequestRecord:
        self._num_arrived += 1
        return RequestRecord(request, graph, self._num_arrived)

    def add(self, record: RequestRecord) -> None:
        """A request has arrived; the policy does not see it before :meth:`let_in`."""
        self.requests[record.request.id] = record

    def let_in(self, record: RequestRecord) -> None:
        record.let_in = True
        self._refresh(record)
        self.offer_ready(record)

    def remove(self, record: RequestRecord) -> cmd.FreeArtifacts | None:
        """Forget a request none of whose tasks runs; returns what is left to free on the ranks."""
        artifacts = record.artifacts.values()
        left = [
            art
            for art in artifacts
            if art.state is not ArtifactState.FREED or record.scattered or art.kept or art.keeping
        ]
        ranks = tuple(sorted(record.touched & self.ranks.present.keys()))
        del self.requests[record.request.id]
        self._request_views.pop(record.request.id, None)
        return cmd.FreeArtifacts(ranks, tuple(art.id for art in left), self.last_id) if left and ranks else None

    def _refresh(self, record: RequestRecord) -> None:
        self._request_views[record.request.id] = record.view()

    # Tasks and artifacts

    def offer_ready(self, record: RequestRecord) -> None:
        """Make every unblocked task ready."""
        for task in record.unblocked:
            record.offered[task.id] = task
            self.ready.add(record.task_view(task), record.place(task.id))
        record.unblocked.clear()

    def withdraw_ready(self, record: RequestRecord) -> None:
        for task_id in [task_id for task_id in record.offered if task_id in self.ready.by_id]:
            self.ready.remove(task_id, record.place(task_id))
            del record.offered[task_id]

    def oldest_ready(self) -> RequestRecord:
        return self.requests[self.ready.in_order[0].request_id]

    def move_inputs(self, task: Task, layout: ExecutionLayout, new_id: Callable[[], int]) -> list[cmd.Migrate]:
        """The migrations after which every rank of ``layout`` holds what it needs of the task's inputs.

        It counts as a holder at once: the task waits for the migrations it takes part in.
        """
        moves = []
        artifacts = self.requests[task.request_id].artifacts
        for name in task.inputs:
            art = artifacts[name]
            if art.view.fits(art.holders, layout):
                continue
            idle = [rank for rank in art.holders if self.ranks.present[rank].free]
            plan = plan_transfers(art.view, art.holders, layout, idle)
            held = tuple([(rank, art.holders[rank]) for rank in plan.ranks if rank in art.holders])
            moves.append(
                cmd.Migrate(new_id(), task.request_id, name, plan.ranks, plan.transfers, layout, held, art.view)
            )
            art.holders.update(dict.fromkeys(layout.ranks, layout))
        return moves

    def last_reads(self, task: Task, before: tuple[Task, ...] = ()) -> list[str]:
        """The inputs of ``task`` that no other task has still to read once those ``before`` it have run."""
        artifacts = self.requests[task.request_id].artifacts
        if not before:
            return [name for name in task.inputs if artifacts[name].readers == 1]
        return [
            name
            for name in task.inputs
            if artifacts[name].readers - sum([name in earlier.inputs for earlier in before]) == 1
        ]

    # Dispatches

    def occupy(self, dispatch: DispatchRecord, ends_s: float) -> None:
        """``dispatch``, whose tasks are ready and whose ranks are free, runs and should end at ``ends_s``."""
        self.dispatches[dispatch.id] = dispatch
        for task in dispatch.tasks:
            self.ready.remove(task.id, self.requests[task.request_id].place(task.id))
        self._occupy(dispatch, ends_s)

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
        dispatch.behind, running.followed_by = running.id, dispatch.id

    def promote(self, dispatch: DispatchRecord, now_s: float) -> None:
        """What ``dispatch`` was queued behind has ended and left its ranks free: it runs now.

        Its tasks have become unblocked, unless that failed.
        """
        dispatch.behind = None
        for task in dispatch.tasks:
            record = self.requests[task.request_id]
            if task in record.unblocked:
                record.unblocked.remove(task)
                record.offered[task.id] = task
            record.waiting.pop(task.id, None)  # for what it has on its ranks, but is lost elsewhere
        self._occupy(dispatch, now_s + dispatch.expected_s)

    def unqueue(self, dispatch: DispatchRecord) -> None:
        """``dispatch`` was withdrawn while it was queued."""
        assert dispatch.behind is not None
        before = self.dispatches[dispatch.behind]
        before.followed_by, before.looked_ahead = None, -1
        del self.dispatches[dispatch.id]

    def undo(self, dispatch: DispatchRecord) -> None:
        """``dispatch`` was withdrawn when it had its ranks already, but none had begun."""
        self.release(dispatch)
        for task in dispatch.tasks:
            record = self.requests[task.request_id]
            record.running.discard(dispatch.id)
            if record.offered.pop(task.id, None):
                record.unblocked.append(task)
            self._refresh(record)

    def release(self, dispatch: DispatchRecord) -> None:
        for rank in dispatch.members:
            self.ranks.release(rank)
        del self.dispatches[dispatch.id]

    def finish_task(self, record: RequestRecord, task: Task, dispatch: DispatchRecord) -> list[cmd.Command]:
        """Materialize the outputs and free inputs without readers left.

        Ranks that finished the dispatch have dropped those that it consumes themselves (``RunTask.consumes``).
        Of two tasks that read an artifact at the same time neither consumes it.
        """
        freed: list[cmd.Command] = []
        finished = dispatch.finished.difference(dispatch.lost)
        for name in task.outputs:
            record.materialize(name, dispatch.layout, finished, _view_of(name, record, task, dispatch))
            if not record.artifacts[name].readers and record.consumers[name]:
                freed += self._free(record, name, set())  # made again beside what was lost
        if self.counts_bytes:
            record.peak_bytes = max(record.peak_bytes, sum([art.view.num_bytes for art in record.live_artifacts]))
        for name in task.inputs:
            art = record.artifacts[name]
            art.readers -= 1
            dropped_by = finished if name in dispatch.consumes else set()
            if art.readers == 0:
                freed += self._free(record, name, dropped_by)
            else:  # dropped all the same if another task has to run again that reads it
                art.drop_from(dropped_by)
        record.offered.pop(task.id, None)  # not there if what ran before it failed: then its request ends
        if record.scattered:
            self._refresh_ready(record)
        record.finished.add(task.id)
        record.steps_done += task.kind is TaskKind.DENOISE
        counts = record.tasks_left
        record.tasks_left = MappingProxyType({**counts, task.kind: counts[task.kind] - 1})
        self._refresh(record)
        return freed

    def has_succeeded(self, record: RequestRecord, task: Task, dispatch: DispatchRecord) -> bool:
        """Whether ``task``, of a dispatch that is over, needs not run again.

        Where only peers of a member that finished have failed, what was made counts if it is whole all the same,
        and if its first rank has said what it is; or has handed the result on. Never after a task that failed.
        """
        if dispatch.out_of_step or (dispatch.error is not None and not dispatch.secondary):
            return False
        if dispatch.error is None and not dispatch.lost:
            return True
        if not task.outputs:
            return dispatch.layout.ranks[0] in dispatch.finished
        held = dict.fromkeys(dispatch.finished.intersection(dispatch.members), dispatch.layout)
        views = [_view_of(name, record, task, dispatch) for name in task.outputs]
        if UNKNOWN in views and dispatch.layout.ranks[0] not in dispatch.finished:
            return False
        return all([view.covered_by(held) for view in views])

    def _free(self, record: RequestRecord, name: str, dropped_by: set[int]) -> list[cmd.Command]:
        art = record.artifacts[name]
        holders = record.touched & self.ranks.present.keys() if record.scattered else art.holders.keys()
        left = holders - dropped_by
        art.drop_from(dropped_by)
        art.state, art.holders = ArtifactState.FREED, {}
        if left:
            left = left - art.kept.keys() - art.keeping
        return [cmd.FreeArtifacts(tuple(sorted(left)), (name,), self.last_id)] if left else []

    def give_up(self, record: RequestRecord, task: Task, dispatch: DispatchRecord) -> None:
        """``task`` did not succeed and is not in flight any more; it will run again if anything of it will."""
        for name in task.inputs:
            if name in dispatch.consumes:
                record.artifacts[name].drop_from(dispatch.finished)
        record.offered.pop(task.id, None)  # what was queued behind a failed task never was

    def recover(self, record: RequestRecord) -> None:
        """After artifacts or a dispatch of it were lost: make ready what has to run, perhaps again."""
        running = {task.id for dispatch_id in record.running for task in self.dispatches[dispatch_id].tasks}
        for task_id in rewind(record, running):
            self.ready.remove(task_id, record.place(task_id))
            del record.offered[task_id]
        self._refresh_ready(record)
        self._refresh(record)
        self.offer_ready(record)

    def keep_copies(self, record: RequestRecord, new_id: Callable[[], int]) -> list[cmd.Migrate]:
        """Copies to fall back on, on the next rank, of what only one rank holds and is still to be read."""
        moves = []
        ranks = list(self.ranks.present)
        for art in record.live_artifacts:
            if not art.readers or len(art.holders) > 1 or len(ranks) < 2 or art.kept or art.keeping:
                continue
            (holder,) = art.holders
            keeper = ranks[(ranks.index(holder) + 1) % len(ranks)]
            target = ExecutionLayout((keeper,))
            plan = plan_transfers(art.view, art.holders, target)
            held = tuple(art.holders.items())
            number = new_id()
            moves.append(
                cmd.Migrate(
                    number,
                    record.request.id,
                    art.id,
                    plan.ranks,
                    plan.transfers,
                    target,
                    held,
                    art.view,
                    keep=True,
                )
            )
            art.keeping.add(keeper)
            record.touched.add(keeper)
        return moves

    def note_kept(self, command: cmd.Migrate, rank: int, *, arrived: bool) -> list[cmd.Command]:
        """A copy to fall back on is there, or is not; older ones of its kind are freed for it."""
        if (record := self.requests.get(command.request_id)) is None or rank not in command.target.ranks:
            return []
        art = record.artifacts[command.artifact]
        art.keeping.discard(rank)
        if not arrived:
            return []
        art.kept[rank] = command.target
        kind = artifact_kind(record.request.id, art.id)
        freed: list[cmd.Command] = []
        for other in record.artifacts.values():
            if other is art or not other.kept or artifact_kind(record.request.id, other.id) != kind:
                continue
            # Where it is being made again it takes the copy's place, and must not be freed in its stead.
            if old := other.kept.keys() - other.holders.keys() - self._makers(record, other.id):
                freed.append(cmd.FreeArtifacts(tuple(sorted(old)), (other.id,), self.last_id))
            other.kept.clear()
        return freed

    def _makers(self, record: RequestRecord, artifact: str) -> set[int]:
        """The ranks on which a task that makes ``artifact`` runs, or is queued."""
        running = [self.dispatches[dispatch_id] for dispatch_id in record.running]
        queued = [follower for dispatch in running if (follower := self.follower(dispatch)) is not None]
        makers: set[int] = set()
        for dispatch in (*running, *queued):
            if any([artifact in task.outputs for task in dispatch.tasks]):
                makers.update(dispatch.layout.ranks)
        return makers

    def set_holder(
        self, request_id: str, artifact: str, rank: int, layout: ExecutionLayout | None
    ) -> RequestRecord | None:
        """``rank`` holds its part of ``artifact`` under ``layout`` after all, or nothing of it.

        Returns the request if something of the artifact is on no rank any more.
        """
        if (record := self.requests.get(request_id)) is None:
            return None
        record.scattered = True
        art = record.artifacts[artifact]
        if art.state is ArtifactState.MATERIALIZED:
            art.drop_from((rank,))
            if layout is not None:
                art.holders[rank] = layout
            self._refresh_ready(record)
        return record if is_lacking(record) else None

    def _refresh_ready(self, record: RequestRecord) -> None:
        for task_id in record.offered.keys() & self.ready.by_id.keys():
            self.ready.replace(record.task_view(record.offered[task_id]), record.place(task_id))

    # Ranks

    def drop_rank(self, rank_id: int) -> None:
        """Take a lost rank out, and all it holds."""
        self.ranks.drop(rank_id)
        for dispatch in self.dispatches.values():
            if rank_id in dispatch.layout.ranks:
                dispatch.lost.add(rank_id)
        for record in self.requests.values():
            for art in record.artifacts.values():
                art.drop_from((rank_id,))
            self._refresh_ready(record)

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

    def has_work(self) -> bool:
        return bool(self.ready.by_id) and self.ranks.any_free

    def view(self, now_s: float, cost: CostModel) -> SchedulerView:
        return SchedulerView(
            now_s,
            self.ready.in_order,
            self.request_views,
            self.ranks.in_order,
            self.ranks.free_in_order,
            cost,
        )

    def check_integrity(self) -> None:
        self.ranks.check_integrity()
        self.ready.check_integrity()
        for dispatch in self.dispatches.values():
            if dispatch.behind is not None:
                _check_queued(dispatch, self)
                continue
            assert dispatch.waiting_for, f"dispatch {dispatch.id} is done but still open"
            for rank in dispatch.members:
                assert self.ranks.present[rank].dispatch == dispatch.id, f"rank {rank} does not run {dispatch.id}"
            if dispatch.followed_by is not None:
                follower = self.dispatches.get(dispatch.followed_by)
                assert follower and follower.behind == dispatch.id, f"nothing is queued behind {dispatch.id}"
        for rank_record in self.ranks.present.values():
            assert rank_record.dispatch is None or rank_record.dispatch in self.dispatches
        let_in = {name: record.view() for name, record in self.requests.items() if record.let_in}
        assert self._request_views == let_in, "a view of a request is old"
        for record in self.requests.values():
            _check_request(record, self)


def _view_of(name: str, record: RequestRecord, task: Task, dispatch: DispatchRecord) -> ArtifactView:
    """What an output consists of: as reported, or like the input of the same kind."""
    if (view := dispatch.made.get(name)) is not None:
        return view
    kind = ""
    for other in task.inputs:
        if (view := record.artifacts[other].view) is not UNKNOWN:
            kind = kind or artifact_kind(task.request_id, name)
            if artifact_kind(task.request_id, other) == kind:
                return view
    return UNKNOWN


def _check_request(record: RequestRecord, state: ClusterState) -> None:
    label = f"request {record.request.id}"
    running = {dispatch.id for dispatch in state.dispatches.values() if _runs(dispatch, record)}
    assert running == record.running, f"{label} and its dispatches disagree"
    in_flight = sum(
        sum(task.request_id == record.request.id for task in state.dispatches[d].tasks) for d in running
    )
    ready = [task_id for task_id in record.offered if task_id in state.ready.by_id]
    assert record.ending is None or record.running, f"{label} has ended but is alive"
    assert record.ending is None or not ready, f"{label} is ending but offers tasks"
    assert record.ending or ready or running or not record.let_in, f"{label} can never go on"
    if record.ending is None:
        total = len(record.finished) + len(record.waiting) + len(record.unblocked) + len(ready) + in_flight
        assert total == len(record.graph.tasks), f"{label} lost a task"
    for art in record.artifacts.values():
        live = art.state is ArtifactState.MATERIALIZED
        whole = art.layout is not None and art.view.covered_by(art.holders)
        assert live == whole or record.ending, f"{art.id} is not whole on its holders"
        assert art.state is not ArtifactState.FREED or art.readers == 0, f"{art.id} freed with readers"
        assert art.holders.keys() <= record.touched, f"{art.id} is on a rank its request never touched"


def _check_queued(dispatch: DispatchRecord, state: ClusterState) -> None:
    """Ranks that run a task have at most this one behind it: what it is queued behind knows no other."""
    before = state.dispatches.get(dispatch.behind or 0)
    assert before is not None, f"dispatch {dispatch.id} is queued behind nothing"
    assert before.followed_by == dispatch.id, f"{before.id} has two dispatches queued behind it"
    assert before.behind is None, f"dispatch {dispatch.id} is queued behind {before.id}, which is queued itself"
    assert before.layout == dispatch.layout, f"{dispatch.id} is queued on other ranks than {before.id} has"
    assert before.lost == dispatch.lost, f"{dispatch.id} and {before.id} disagree on what ranks were lost"
    followed = {task.request_id for task in before.tasks}
    for task in dispatch.tasks:
        assert task.request_id in followed, f"{task.id} is queued behind other requests"
        record = state.requests[task.request_id]
        assert task.id not in record.offered, f"{task.id} is queued and offered"


def _runs(dispatch: DispatchRecord, record: RequestRecord) -> bool:
    return dispatch.behind is None and any(task.request_id == record.request.id for task in dispatch.tasks)
