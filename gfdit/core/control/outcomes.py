"""What comes of a dispatch: from the reports of its ranks to the books on tasks, artifacts and edges."""

from __future__ import annotations

from gfdit.core import events as ev
from gfdit.core.control.artifact_budget import ArtifactBudget
from gfdit.core.control.artifacts import Artifacts, has_succeeded
from gfdit.core.control.edges import EdgeResets
from gfdit.core.control.lifecycle import LOST_PART, Lifecycle
from gfdit.core.control.migrations import Migrations
from gfdit.core.control.records import DispatchRecord
from gfdit.core.control.run_ahead import RunAhead
from gfdit.core.control.state import ClusterState
from gfdit.core.control.turn import Turn
from gfdit.core.cost import CostModel


class Outcomes:
    """A dispatch is over when each of its ranks has reported or was lost, or when it was withdrawn."""

    def __init__(
        self,
        cost: CostModel,
        state: ClusterState,
        artifacts: Artifacts,
        budget: ArtifactBudget,
        resets: EdgeResets,
        migrations: Migrations,
        run_ahead: RunAhead,
        lifecycle: Lifecycle,
        turn: Turn,
    ) -> None:
        self._cost = cost
        self._state = state
        self._artifacts = artifacts
        self._budget = budget
        self._resets = resets
        self._migrations = migrations
        self._run_ahead = run_ahead
        self._lifecycle = lifecycle
        self._turn = turn

    # What ranks say

    def on_begun(self, event: ev.TaskDispatched | ev.TaskStarted) -> bool:
        self._note_begun(event.dispatch_id)
        return False

    def on_finished(self, event: ev.TaskFinished) -> bool:
        dispatch = self._note_begun(event.dispatch_id)
        if dispatch is None or not _report(dispatch, event.rank):
            return False
        dispatch.finished.add(event.rank)
        dispatch.seconds = max(dispatch.seconds, event.seconds)
        dispatch.made.update(event.views)
        return self._close_if_done(dispatch)

    def on_failed(self, event: ev.TaskFailed) -> bool:
        dispatch = self._note_begun(event.dispatch_id)
        if dispatch is None or not _report(dispatch, event.rank):
            return False
        _take_error(dispatch, event)
        self._run_ahead.withdraw_follower(dispatch)
        return self._close_if_done(dispatch)

    def on_withdrawn(self, event: ev.TaskWithdrawn) -> bool:
        dispatch = self._state.dispatches.get(event.dispatch_id)
        if dispatch is None or not dispatch.withdrawing:
            return False
        if dispatch.behind is not None:
            self._state.unqueue(dispatch)
            return False
        self._state.undo(dispatch)
        if dispatch.out_of_step:
            self._reset_edges(dispatch.members)
        for request_id in dict.fromkeys([task.request_id for task in dispatch.tasks]):
            record = self._state.requests[request_id]
            if record.scattered and record.ending is None:
                self._state.recover(record)
            self._lifecycle.settle(record)
        return True

    def drop(self, rank: int, reason: str) -> None:
        """``rank`` is lost, and will not report any more."""
        message = f"rank {rank} was lost: {reason}"
        for dispatch in list(self._state.dispatches.values()):
            if _report(dispatch, rank):
                if dispatch.error is None or dispatch.secondary:  # it explains the echoes
                    dispatch.error, dispatch.status_code, dispatch.secondary = message, 503, True
                self._run_ahead.withdraw_follower(dispatch)
                self._close_if_done(dispatch)

    def _note_begun(self, dispatch_id: int) -> DispatchRecord | None:
        """A rank has begun a dispatch: too late to take it back. None for one that is over."""
        if dispatch := self._state.dispatches.get(dispatch_id):
            dispatch.begun, dispatch.withdrawing = True, False
        return dispatch

    # The end of a dispatch

    def _close_if_done(self, dispatch: DispatchRecord) -> bool:
        """End a dispatch on which every rank has reported; False if one has not.

        Ranks that report out of order may be done with a dispatch before the one that it is queued behind.
        """
        if dispatch.waiting_for or dispatch.behind is not None:
            return False
        state = self._state
        follower = state.follower(dispatch)
        state.release(dispatch)
        if dispatch.error is None:
            self._cost.observe(dispatch.views[0], dispatch.layout, dispatch.seconds, len(dispatch.tasks))
        else:
            self._migrations.forget_doubtful(dispatch)
        failed = self._account(dispatch)
        # A member that failed may have stopped in the middle of a collective: its edges are out of step.
        out_of_step = dispatch.out_of_step or not dispatch.finished.issuperset(dispatch.members)
        if follower is not None:
            if out_of_step or failed:
                _doom(follower, dispatch)
            state.promote(follower, self._turn.now_s)
        elif out_of_step:
            self._reset_edges(dispatch.members)
        self._lifecycle.go_on(dispatch, failed)
        if follower is not None:
            self._close_if_done(follower)
        return True

    def _account(self, dispatch: DispatchRecord) -> set[str]:
        """Book what was made and read; returns the requests with tasks that did not succeed."""
        state = self._state
        failed: set[str] = set()
        for task in dispatch.tasks:
            record = state.requests[task.request_id]
            record.running.discard(dispatch.id)
            record.scattered |= dispatch.error is not None or bool(dispatch.lost)
            if has_succeeded(record, task, dispatch):
                self._turn.commands.extend(self._artifacts.task_succeeded(record, task, dispatch))
                state.finish_task(record, task)
                if self._budget.limited:
                    self._budget.observe(record.request, record.peak_bytes, record.steps_done)
            else:
                self._artifacts.task_failed(record, task, dispatch)
                record.offered.pop(task.id, None)  # what was queued behind a failed task never was
                failed.add(task.request_id)
        return failed

    def _reset_edges(self, ranks: tuple[int, ...]) -> None:
        """Nothing to do for a single rank: it has no edges."""
        if len(ranks) > 1:
            reset = self._resets.among(self._state.new_id(), "compute", ranks, hold=True)
            self._turn.commands.append(reset)


def _report(dispatch: DispatchRecord, rank: int) -> bool:
    """Note that ``rank`` is done with ``dispatch``; False for a repeated report."""
    if rank not in dispatch.waiting_for:
        return False
    dispatch.waiting_for.discard(rank)
    return True


def _take_error(dispatch: DispatchRecord, event: ev.TaskFailed) -> None:
    """The first error counts, but one of its own before an echo."""
    if dispatch.error is None or (dispatch.secondary and not event.secondary):
        dispatch.error, dispatch.status_code = event.error, event.status_code
        dispatch.secondary = event.secondary


def _doom(follower: DispatchRecord, failed: DispatchRecord) -> None:
    """A rank may have begun ``follower``, whose inputs it lacks: it fails too, and edges wait for it."""
    follower.out_of_step = True
    if follower.error is None:
        follower.error, follower.status_code, follower.secondary = failed.error or LOST_PART, 503, True
