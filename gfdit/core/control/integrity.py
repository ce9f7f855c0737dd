"""The books of the control plane, checked against each other: for tests and idle moments, as it looks at all."""

from __future__ import annotations

from collections.abc import Mapping

from gfdit.core.control.records import (
    ArtifactState,
    DispatchRecord,
    DispatchState,
    RequestRecord,
    TaskState,
)
from gfdit.core.control.state import ClusterState


def check_state(state: ClusterState) -> None:
    """Raise ``AssertionError`` if ``state`` contradicts itself."""
    state.ranks.check_integrity()
    state.ready.check_integrity()
    for dispatch in state.dispatches.values():
        ended = dispatch.state in (DispatchState.WITHDRAWN, DispatchState.OVER)
        assert not ended, f"dispatch {dispatch.id} is {dispatch.state} but still open"
        if dispatch.behind is not None:
            _check_queued(dispatch, state)
        else:
            _check_running(dispatch, state)
    for rank_record in state.ranks.present.values():
        assert rank_record.dispatch is None or rank_record.dispatch in state.dispatches
    visible = {name: record.view() for name, record in state.requests.items() if record.visible}
    assert state.request_views == visible, "a view of a request is old"
    dispatched = {
        task.id: TaskState.RUNNING if dispatch.behind is None else TaskState.QUEUED
        for dispatch in state.dispatches.values()
        for task in dispatch.tasks
    }
    for record in state.requests.values():
        _check_tasks(record, state, dispatched)
        _check_artifacts(record)


def _check_running(dispatch: DispatchRecord, state: ClusterState) -> None:
    assert dispatch.waiting_for, f"dispatch {dispatch.id} is done but still open"
    for rank in dispatch.members:
        runs = state.ranks.present[rank].dispatch == dispatch.id
        assert runs is not dispatch.has_left, f"rank {rank} and dispatch {dispatch.id} disagree"
    if dispatch.has_left:
        assert dispatch.waiting_for <= dispatch.delivering, f"dispatch {dispatch.id} has left ranks that are at it"
    if dispatch.followed_by is not None:
        follower = state.dispatches.get(dispatch.followed_by)
        assert follower and follower.behind == dispatch.id, f"nothing is queued behind {dispatch.id}"


def _check_queued(dispatch: DispatchRecord, state: ClusterState) -> None:
    """Ranks that run a task have at most this one behind it: what it is queued behind knows no other."""
    before = state.dispatches.get(dispatch.behind or 0)
    assert before is not None, f"dispatch {dispatch.id} is queued behind nothing"
    assert before.followed_by == dispatch.id, f"{before.id} has two dispatches queued behind it"
    assert before.behind is None, f"dispatch {dispatch.id} is queued behind {before.id}, which is queued itself"
    assert before.layout == dispatch.layout, f"{dispatch.id} is queued on other ranks than {before.id} has"
    assert before.lost == dispatch.lost, f"{dispatch.id} and {before.id} disagree on what ranks were lost"
    followed = {task.request_id for task in before.tasks}
    assert followed.issuperset(task.request_id for task in dispatch.tasks), (
        f"{dispatch.id} is queued behind other requests"
    )


def _check_tasks(record: RequestRecord, state: ClusterState, dispatched: Mapping[str, TaskState]) -> None:
    """Every task is where its state says, and nowhere else."""
    label = f"request {record.request.id}"
    running = {dispatch.id for dispatch in state.dispatches.values() if _runs(dispatch, record)}
    assert running == record.running, f"{label} and its dispatches disagree"
    assert record.num_finished == list(record.states.values()).count(TaskState.FINISHED), f"{label} miscounts"
    ready = record.ready
    assert record.ending is None or running, f"{label} has ended but is alive"
    assert record.ending is None or not ready, f"{label} is ending but offers tasks"
    assert record.ending or ready or running or not record.visible, f"{label} can never go on"
    if record.ending is not None:
        return
    unblocked = {task.id for task in record.unblocked}
    for task in record.graph.tasks:
        now = record.states[task.id]
        assert (now is TaskState.READY) == (task.id in state.ready.by_id), f"{task.id}, {now}, is offered wrongly"
        assert (now is TaskState.UNBLOCKED) == (task.id in unblocked), f"{task.id}, {now}, is unblocked wrongly"
        in_flight = now in (TaskState.RUNNING, TaskState.QUEUED)
        assert dispatched.get(task.id) == (now if in_flight else None), f"{task.id}, {now}, is dispatched wrongly"
        missing = record.num_lacking(task)
        if now in (TaskState.WAITING, TaskState.QUEUED):
            assert record.missing.get(task.id) == missing > 0, f"{task.id}, {now}, lacks {missing} inputs"
        else:
            assert task.id not in record.missing, f"{task.id}, {now}, counts missing inputs"


def _check_artifacts(record: RequestRecord) -> None:
    for art in record.artifacts.values():
        live = art.state is ArtifactState.MATERIALIZED
        whole = art.layout is not None and art.view.covered_by(art.holders)
        assert live == whole or record.ending, f"{art.id} is not whole on its holders"
        assert art.state is not ArtifactState.FREED or art.readers == 0, f"{art.id} freed with readers"
        assert art.holders.keys() <= record.touched, f"{art.id} is on a rank its request never touched"


def _runs(dispatch: DispatchRecord, record: RequestRecord) -> bool:
    return dispatch.behind is None and any(task.request_id == record.request.id for task in dispatch.tasks)
