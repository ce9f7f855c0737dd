"""Who holds which part of an artifact: what a task reads is brought to it, and freed after its last reader."""

from __future__ import annotations

from gfdit.core import commands as cmd
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.artifacts.views import UNKNOWN, ArtifactView
from gfdit.core.control.records import ArtifactState, DispatchRecord, RequestRecord
from gfdit.core.control.recovery import is_lacking
from gfdit.core.control.state import ClusterState
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Task, artifact_kind


class Holders:
    """Keeps the books on holders and readers, in the records of ``state``, and says what is to move or to go."""

    def __init__(self, state: ClusterState, *, counts_bytes: bool) -> None:
        """``counts_bytes``: note for every request the most bytes its artifacts take at one time."""
        self._state = state
        self._counts_bytes = counts_bytes

    def move_inputs(self, task: Task, layout: ExecutionLayout) -> list[cmd.Migrate]:
        """The migrations after which every rank of ``layout`` holds what it needs of the task's inputs.

        It counts as a holder at once: the task waits for the migrations it takes part in.
        """
        moves = []
        state = self._state
        artifacts = state.requests[task.request_id].artifacts
        for name in task.reads if task.deferred else task.inputs:
            art = artifacts[name]
            if name in task.deferred and art.state is not ArtifactState.MATERIALIZED:
                moves.append(self._stream(task, name, layout))
                continue
            if art.view.fits(art.holders, layout):
                continue
            idle = [rank for rank in art.holders if state.ranks.present[rank].free]
            plan = plan_transfers(art.view, art.holders, layout, idle)
            held = tuple([(rank, art.holders[rank]) for rank in plan.ranks if rank in art.holders])
            moves.append(
                cmd.Migrate(
                    state.new_id(), task.request_id, name, plan.ranks, plan.transfers, layout, held, art.view
                )
            )
            art.replace_on(layout)
            art.holders.update(dict.fromkeys(layout.ranks, layout))
        return moves

    def _stream(self, task: Task, name: str, layout: ExecutionLayout) -> cmd.Migrate:
        """The migration that brings ``name`` to ``layout`` part by part, while it is made on other ranks."""
        state = self._state
        running = [state.dispatches[dispatch_id] for dispatch_id in state.requests[task.request_id].running]
        making = next(d for d in running if any([name in maker.outputs for maker in d.tasks]))
        source = making.layout.ranks[0]
        ranks, held = (source, *layout.ranks), ((source, making.layout),)
        return cmd.Migrate(state.new_id(), task.request_id, name, ranks, (), layout, held, streamed=making.id)

    def last_reads(self, task: Task, before: tuple[Task, ...] = ()) -> list[str]:
        """The inputs of ``task`` that no other task has still to read once those ``before`` it have run.

        What is still being made is none that its ranks could drop.
        """
        artifacts = self._state.requests[task.request_id].artifacts
        if not before:
            names = task.inputs
            if task.deferred:
                there = [n for n in task.deferred if artifacts[n].state is ArtifactState.MATERIALIZED]
                names = (*names, *there)
            return [name for name in names if artifacts[name].readers == 1]
        return [
            name
            for name in task.inputs
            if artifacts[name].readers - sum([name in earlier.inputs for earlier in before]) == 1
        ]

    def task_succeeded(self, record: RequestRecord, task: Task, dispatch: DispatchRecord) -> list[cmd.Command]:
        """Materialize the outputs and free inputs without readers left.

        Ranks that finished the dispatch have dropped those that it consumes themselves (``RunTask.consumes``).
        Of two tasks that read an artifact at the same time neither consumes it.
        """
        freed: list[cmd.Command] = []
        finished = dispatch.finished.difference(dispatch.lost) if dispatch.lost else dispatch.finished
        for name in task.outputs:
            record.materialize(name, dispatch.layout, finished, _view_of(name, record, task, dispatch))
            if not record.artifacts[name].readers and record.consumers[name]:
                freed += self._free(record, name, set())  # made again beside what was lost
        if self._counts_bytes:
            record.peak_bytes = max(record.peak_bytes, sum([art.view.num_bytes for art in record.live_artifacts]))
        for name in task.reads if task.deferred else task.inputs:
            art = record.artifacts[name]
            art.readers -= 1
            dropped_by = finished if name in dispatch.consumes else set()
            if art.readers == 0:
                freed += self._free(record, name, dropped_by)
            else:  # dropped all the same if another task has to run again that reads it
                art.drop_from(dropped_by)
        return freed

    def task_failed(self, record: RequestRecord, task: Task, dispatch: DispatchRecord) -> None:
        """``task`` will run again if anything of its request will; ranks that finished have dropped its inputs.

        How far the others got is open: they may have its outputs.
        """
        for name in task.outputs:
            record.artifacts[name].replace_on(dispatch.layout)
        for name in dispatch.consumes:
            if name in task.reads:
                record.artifacts[name].drop_from(dispatch.finished)

    def set_holder(
        self, request_id: str, artifact: str, rank: int, layout: ExecutionLayout | None
    ) -> RequestRecord | None:
        """``rank`` holds its part of ``artifact`` under ``layout`` after all, or nothing of it.

        Returns the request if something of the artifact is on no rank any more.
        """
        if (record := self._state.requests.get(request_id)) is None:
            return None
        record.has_strays = True
        art = record.artifacts[artifact]
        if art.state is ArtifactState.MATERIALIZED:
            art.drop_from((rank,))
            if layout is not None:
                art.holders[rank] = layout
            self._state.refresh_ready(record)
        return record if is_lacking(record) else None

    def _free(self, record: RequestRecord, name: str, dropped_by: set[int]) -> list[cmd.Command]:
        art = record.artifacts[name]
        state = self._state
        holders = record.touched & state.ranks.present.keys() if record.has_strays else art.holders.keys()
        left = holders - dropped_by
        if name in record.streamed:  # who makes it still would be told once it is, when it may be wanted again
            left = left - self._making(record, name)
        art.drop_from(dropped_by)
        art.state, art.holders = ArtifactState.FREED, {}
        if left:
            coming = {rank for rank, layout in art.keeping.items() if layout is not None}
            left = left - art.kept.keys() - coming
        return [cmd.FreeArtifacts(tuple(sorted(left)), (name,), state.last_id)] if left else []

    def _making(self, record: RequestRecord, name: str) -> set[int]:
        """The ranks on which a task runs that makes ``name``; once it has, it is freed there."""
        running = [self._state.dispatches[dispatch_id] for dispatch_id in record.running]
        makers = [d for d in running if any([name in task.outputs for task in d.tasks])]
        return {rank for dispatch in makers for rank in dispatch.layout.ranks}


def has_succeeded(record: RequestRecord, task: Task, dispatch: DispatchRecord) -> bool:
    """Whether ``task``, of a dispatch that is over, needs not run again.

    Where only peers of a member that finished have failed, what was made counts if it is whole all the same, and
    if its first rank has said what it is; or has handed the result on. Never after a task that failed.
    """
    is_streamed = record.streamed and any([name in record.streamed for name in task.outputs])
    if is_streamed and all([not record.artifacts[name].readers for name in task.outputs]):
        return True  # it has been read on its way
    if dispatch.doomed or (dispatch.error is not None and not dispatch.caused_by_peer):
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
