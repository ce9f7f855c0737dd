"""Running ahead: the next step of a request is queued behind the running one, and taken back if need be."""

from __future__ import annotations

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control.artifacts import Artifacts
from gfdit.core.control.look_ahead import LookAhead, NextStep
from gfdit.core.control.records import DispatchRecord
from gfdit.core.control.state import ClusterState
from gfdit.core.control.turn import Turn
from gfdit.core.policy.rules import describe_mistake


class RunAhead:
    """Acts on what the policy says when it is asked ahead of time.

    What comes of a queued step that is not taken back is up to :class:`~gfdit.core.control.outcomes.Outcomes`.
    """

    def __init__(self, look_ahead: LookAhead, state: ClusterState, artifacts: Artifacts, turn: Turn) -> None:
        self._look_ahead = look_ahead
        self._state = state
        self._artifacts = artifacts
        self._turn = turn

    def on_look_ahead(self, event: ev.LookAhead) -> bool:
        """Ask the policy about the step after one that runs; queue it, leave it queued or take it back."""
        if (running := self._look_ahead.next_due(self._turn.now_s)) is None:
            return False
        following = None
        try:
            following = self._look_ahead.ask(running, self._turn.now_s)
        except Exception as error:
            # Nobody is harmed: the policy is asked again when the step has ended.
            message = describe_mistake(self._look_ahead.policy.name, error)
            self._turn.commands.append(cmd.ReportFault(message))
        if (follower := self._state.follower(running)) is not None:
            if following is None or following.tasks != follower.tasks:
                self.withdraw_follower(running)
        elif following is not None:
            self._queue(following, running)
        return False

    def withdraw_follower(self, dispatch: DispatchRecord) -> None:
        """Take back what is queued behind ``dispatch``, if anything is and no rank is known to have begun it."""
        follower = self._state.follower(dispatch)
        if follower is not None and not (follower.begun or follower.withdrawing):
            follower.withdrawing = True
            self._turn.commands.append(cmd.WithdrawTask(follower.id))

    def _queue(self, following: NextStep, running: DispatchRecord) -> None:
        tasks, layout = following.tasks, running.layout
        consumes = tuple([name for task in tasks for name in self._artifacts.last_reads(task, running.tasks)])
        record = DispatchRecord(
            self._state.new_id(), tasks, following.views, layout, set(layout.ranks), consumes, following.expected_s
        )
        self._state.queue(record, running)
        self._turn.commands.append(cmd.RunTask(record.id, tasks, layout, (), consumes, after=running.id))
