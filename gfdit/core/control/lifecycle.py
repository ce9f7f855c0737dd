"""The way of a request: it arrives, is let in, goes on after each of its tasks or tries again, and ends once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control.artifact_budget import ArtifactBudget
from gfdit.core.control.checkpoints import Checkpoints
from gfdit.core.control.migrations import Migrations
from gfdit.core.control.records import DispatchRecord, RequestRecord
from gfdit.core.control.recovery import is_lacking
from gfdit.core.control.run_ahead import RunAhead
from gfdit.core.control.state import ClusterState
from gfdit.core.control.turn import Turn
from gfdit.core.cost import CostModel
from gfdit.core.policy import Admission, Policy

LOST_PART = "a rank was lost with its part of what was made"


class Lifecycle:
    """Owns every request from its arrival to its one terminal command.

    Of a request whose task was lost with a rank, or with a copy, at most ``max_retries`` dispatches are repeated.
    A task that failed by itself ends its request.
    """

    def __init__(
        self,
        policy: Policy,
        cost: CostModel,
        state: ClusterState,
        budget: ArtifactBudget,
        checkpoints: Checkpoints,
        migrations: Migrations,
        run_ahead: RunAhead,
        turn: Turn,
        *,
        max_retries: int,
    ) -> None:
        self.at_the_door: deque[RequestRecord] = deque()  # have arrived, and some have ended since
        self._policy = policy
        self._cost = cost
        self._state = state
        self._budget = budget
        self._checkpoints = checkpoints
        self._migrations = migrations
        self._run_ahead = run_ahead
        self._turn = turn
        self._max_retries = max_retries
        self._admit: Callable[..., Any] | None = getattr(policy, "admit", None)

    def on_arrived(self, event: ev.RequestArrived) -> bool:
        """Raises ``ValueError`` for a malformed graph or a request id that is still alive."""
        event.graph.check()
        request_id = event.request.id
        if request_id in self._state.requests:
            raise ValueError(f"request id {request_id!r} is already alive")
        record = self._state.new_record(event.request, event.graph)
        if self._admit is not None and (refusal := self._ask_admission(record)):
            self._turn.commands.append(refusal)
            return False
        self._state.add(record)
        self.at_the_door.append(record)
        return False

    def on_cancelled(self, event: ev.RequestCancelled) -> bool:
        if (record := self._state.requests.get(event.request_id)) is None:
            return False
        self.end(record, cmd.CancelRequest(event.request_id))
        return True

    def let_in(self) -> bool:
        """Show the policy the requests for whose artifacts there is room; say whether there are any."""
        any_new = False
        while self.at_the_door:
            record = self.at_the_door[0]
            if self._state.requests.get(record.request.id) is record:
                if self._budget.limited:
                    if not self._budget.fits(record.request):
                        break
                    self._budget.reserve(record.request)
                self._state.let_in(record)
                any_new = True
            self.at_the_door.popleft()
        return any_new

    def go_on(self, dispatch: DispatchRecord, failed: set[str]) -> None:
        """With every request of a dispatch that is over; those in ``failed`` have tasks that did not succeed."""
        for request_id in dict.fromkeys([task.request_id for task in dispatch.tasks]):
            record = self._state.requests[request_id]
            if record.ending is None:
                if request_id in failed:
                    self._retry_or_fail(record, dispatch)
                elif record.scattered and is_lacking(record):
                    self._state.recover(record)
                if self._checkpoints.every_steps and request_id not in failed:
                    self._migrations.begin(self._checkpoints.after(dispatch, record))
            self.settle(record)

    def settle(self, record: RequestRecord) -> None:
        """End the request if it is over, else offer its next tasks."""
        if record.ending is not None:
            self.end(record, record.ending)
        elif len(record.finished) == len(record.graph.tasks):
            self.end(record, cmd.CompleteRequest(record.request.id))
        else:
            self._state.offer_ready(record)

    def end(self, record: RequestRecord, terminal: cmd.Command) -> None:
        """Emit the terminal command and free everything, once no task of the request runs any more."""
        record.ending = record.ending or terminal
        self._state.withdraw_ready(record)
        for dispatch_id in record.running:
            self._run_ahead.withdraw_follower(self._state.dispatches[dispatch_id])
        if record.running:
            return
        if freed := self._state.remove(record):
            self._turn.commands.append(freed)
        self._budget.release(record.request.id)
        self._turn.commands.append(record.ending)

    def check_integrity(self) -> None:
        self._budget.check_integrity({name for name, record in self._state.requests.items() if record.let_in})

    def _retry_or_fail(self, record: RequestRecord, dispatch: DispatchRecord) -> None:
        error = dispatch.error or LOST_PART
        if dispatch.error is not None and not dispatch.secondary:
            record.ending = cmd.FailRequest(record.request.id, error, dispatch.status_code)
        elif dispatch.out_of_step:
            self._state.recover(record)  # it never had a chance
        elif record.num_retries == self._max_retries:
            message = f"{error} (after {record.num_retries} retries)"
            record.ending = cmd.FailRequest(record.request.id, message, status_code=503)
        else:
            record.num_retries += 1
            self._state.recover(record)

    def _ask_admission(self, record: RequestRecord) -> cmd.Command | None:
        assert self._admit is not None
        try:
            answer = self._admit(record.view(), self._state.view(self._turn.now_s, self._cost))
            if not isinstance(answer, Admission):
                raise TypeError(f"admit returned {type(answer).__name__}, not Admission")
        except Exception as error:
            message = f"policy {self._policy.name!r} raised in admit: {error!r}"
            self._turn.commands.append(cmd.ReportFault(message))
            return None
        if answer.accepted:
            return None
        return cmd.RejectRequest(record.request.id, answer.reason, answer.retry_after_s)
