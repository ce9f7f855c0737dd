"""The policy is asked, and what it decides is carried out; its mistakes are contained here."""

from __future__ import annotations

from gfdit.core import commands as cmd
from gfdit.core.control.artifacts import Artifacts
from gfdit.core.control.edges import EdgeResets
from gfdit.core.control.lifecycle import Lifecycle
from gfdit.core.control.migrations import Migrations
from gfdit.core.control.records import DispatchRecord
from gfdit.core.control.state import ClusterState
from gfdit.core.control.turn import Turn
from gfdit.core.cost import CostModel, UnknownCostError
from gfdit.core.policy import Decision, Dispatch, Policy, PolicyError
from gfdit.core.policy.rules import check_decision, check_dispatch, describe_mistake


class Scheduler:
    """Turns decisions into dispatches."""

    def __init__(
        self,
        policy: Policy,
        cost: CostModel,
        state: ClusterState,
        artifacts: Artifacts,
        resets: EdgeResets,
        migrations: Migrations,
        lifecycle: Lifecycle,
        turn: Turn,
    ) -> None:
        self._policy = policy
        self._cost = cost
        self._state = state
        self._artifacts = artifacts
        self._resets = resets
        self._migrations = migrations
        self._lifecycle = lifecycle
        self._turn = turn

    def schedule(self) -> None:
        """Ask the policy while tasks are ready and ranks free, again if its answer could not be carried out."""
        state = self._state
        while state.has_work():
            try:
                decision = self._policy.schedule(state.view(self._turn.now_s, self._cost))
                check_decision(decision, policy=self._policy.name)
                ask_again = self._carry_out(decision)
            except Exception as error:
                ask_again = self._contain(error)
            if not ask_again:
                return

    def _carry_out(self, decision: Decision) -> bool:
        """Dispatch what keeps the rules. Say whether to ask again, since a refusal has changed the view."""
        refused = False
        ready = self._state.ready.by_id
        for dispatch in decision.dispatches:
            try:
                check_dispatch(dispatch, policy=self._policy.name, ready=ready, ranks=self._state.ranks.views)
            except PolicyError as error:
                self._refuse(dispatch, error)
                refused = True
            else:
                self._dispatch(dispatch)
        if refused:
            return True
        if decision.wake_at_s is not None:
            if decision.wake_at_s <= self._turn.now_s:
                raise PolicyError(
                    f"policy {self._policy.name!r} must return a wake_at_s later than now, "
                    f"{self._turn.now_s}, got {decision.wake_at_s}"
                )
            self._turn.commands.append(cmd.WakeAt(decision.wake_at_s))
        elif ready and not (self._state.dispatches or self._resets.held):
            message = f"policy {self._policy.name!r} left every rank idle with {len(ready)} tasks ready"
            self._turn.commands.append(cmd.ReportFault(message))
        return False

    def _dispatch(self, dispatch: Dispatch) -> None:
        state, layout, now_s = self._state, dispatch.layout, self._turn.now_s
        views = tuple([state.ready.by_id[name] for name in dispatch.tasks])
        tasks = tuple([state.requests[view.request_id].offered[view.id] for view in views])
        busy_until_s = now_s + self._cost.task_s(views[0], layout, len(tasks))
        migrations = [move for task in tasks for move in self._artifacts.move_inputs(task, layout)]
        if migrations:
            self._migrations.begin(migrations)
            busy_until_s += sum(self._cost.migration_s(view, layout) for view in views)
        consumes = tuple([name for task in tasks for name in self._artifacts.last_reads(task)])
        moves = tuple([migration.migration_id for migration in migrations])
        record = DispatchRecord(
            state.new_id(), tasks, views, layout, set(layout.ranks), consumes, migrations=moves
        )
        for task in tasks:
            owner = state.requests[task.request_id]
            if not owner.started:
                owner.started = True
                self._turn.commands.append(cmd.StartRequest(owner.request.id, now_s - owner.request.arrival_s))
        state.occupy(record, busy_until_s)
        self._turn.commands.append(cmd.RunTask(record.id, tasks, layout, tuple(migrations), consumes))

    # Mistakes

    def _refuse(self, dispatch: Dispatch, error: PolicyError) -> None:
        """A dispatch broke a rule: the requests it names fail with that rule, the others are untouched."""
        ready = self._state.ready.by_id
        named = {ready[task].request_id for task in dispatch.tasks if task in ready}
        if not named:
            raise error
        self._turn.commands.append(cmd.ReportFault(str(error)))
        for request_id in sorted(named):
            self._lifecycle.end(self._state.requests[request_id], cmd.FailRequest(request_id, str(error)))

    def _contain(self, error: Exception) -> bool:
        """A policy made a mistake that no request can be named for. Say whether to ask it again at once.

        While something runs, its end brings another view. When nothing does, no event would ever come: the
        oldest waiting request fails with the policy's error, so that the server goes on.
        """
        message = describe_mistake(self._policy.name, error)
        self._turn.commands.append(cmd.ReportFault(message))
        if isinstance(error, UnknownCostError) and (culprit := self._state.requests.get(error.request_id or "")):
            self._lifecycle.end(culprit, cmd.FailRequest(culprit.request.id, message))
            return True
        if self._state.dispatches or self._resets.held:
            return False
        oldest = self._state.oldest_ready()
        self._lifecycle.end(oldest, cmd.FailRequest(oldest.request.id, message))
        return True
