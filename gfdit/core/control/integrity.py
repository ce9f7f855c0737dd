"""The books of the control plane, checked against each other: for tests and idle moments, as it looks at all."""

from __future__ import annotations

from gfdit.core.control.records import ArtifactState, DispatchRecord, RequestRecord
from gfdit.core.control.state import ClusterState


def check_state(state: ClusterState) -> None:
    """Raise ``AssertionError`` if ``state`` contradicts itself."""
    state.ranks.check_integrity()
    state.ready.check_integrity()
    for dispatch in state.dispatches.values():
        if dispatch.behind is not None:
            _check_queued(dispatch, state)
        else:
            _check_running(dispatch, state)
    for rank_record in state.ranks.present.values():
        assert rank_record.dispatch is None or rank_record.dispatch in state.dispatches
    let_in = {name: record.view() for name, record in state.requests.items() if record.let_in}
    assert state.request_views == let_in, "a view of a request is old"
    for record in state.requests.values():
        _check_tasks(record, state)
        _check_artifacts(record)


def _check_running(dispatch: DispatchRecord, state: ClusterState) -> None:
    assert dispatch.waiting_for, f"dispatch {dispatch.id} is done but still open"
    for rank in dispatch.members:
        assert state.ranks.present[rank].dispatch == dispatch.id, f"rank {rank} does not run {dispatch.id}"
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
    for task in dispatch.tasks:
        assert task.request_id in followed, f"{task.id} is queued behind other requests"
        record = state.requests[task.request_id]
        assert task.id not in record.offered, f"{task.id} is queued and offered"


def _check_tasks(record: RequestRecord, state: ClusterState) -> None:
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


def _check_artifacts(record: RequestRecord) -> None:
    for art in record.artifacts.values():
        live = art.state is ArtifactState.MATERIALIZED
        whole = art.layout is not None and art.view.covered_by(art.holders)
        assert live == whole or record.ending, f"{art.id} is not whole on its holders"
        assert art.state is not ArtifactState.FREED or art.readers == 0, f"{art.id} freed with readers"
        assert art.holders.keys() <= record.touched, f"{art.id} is on a rank its request never touched"


def _runs(dispatch: DispatchRecord, record: RequestRecord) -> bool:
    return dispatch.behind is None and any(task.request_id == record.request.id for task in dispatch.tasks)
