"""The control plane: a sans-I/O state machine from events to commands (design: GF-DiT paper, section 5.1).

``handle(event, now_s)`` is the whole interface. Sockets, clocks, devices and vLLM-Omni are the driver's
business; the online runtime and the simulator drive this same object.

Two rules keep group-free collectives safe. Commands come out in one order, and a driver hands each rank its
commands first in, first out: any two ranks therefore see the collectives they share in the same order. And a
rank runs one task at a time, so a group's members are all on the same task.
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifact_budget import ArtifactBudget
from gfdit.core.cost import CostModel, UnknownCostError
from gfdit.core.edges import EdgeResets
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.look_ahead import LookAhead, NextStep
from gfdit.core.policy import Admission, Decision, Dispatch, Policy, PolicyError, SchedulerView
from gfdit.core.records import DispatchRecord, MigrationRecord, RankRecord, RequestRecord
from gfdit.core.recovery import is_lacking
from gfdit.core.rules import check_decision, check_dispatch
from gfdit.core.state import ClusterState
from gfdit.core.tasks import TaskKind

LOST_PART = "a rank was lost with its part of what was made"


class ControlPlane:
    """Owns every request from arrival to its one terminal command.

    Of a request whose task was lost with a rank, or with a copy, at most ``max_retries`` dispatches are repeated.
    Every ``checkpoint_every_steps`` steps, unless that is 0, what only one rank holds is copied to another.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Iterable[RankRecord],
        cost: CostModel,
        *,
        run_ahead: int = 0,
        max_artifact_bytes: int | None = None,
        max_retries: int = 3,
        checkpoint_every_steps: int = 0,
    ) -> None:
        """With ``run_ahead`` 1 a request's next step may be queued behind the running one, if the policy agrees;
        with 0 every step waits for a decision. With ``max_artifact_bytes`` requests start, in order of arrival,
        only when a rank has room for all they will hold. Raises ``ValueError`` for other numbers.
        """
        if run_ahead not in (0, 1):
            raise ValueError(f"run_ahead must be 0 or 1, got {run_ahead}")
        self.policy = policy
        self.cost = cost
        self.max_retries = max_retries
        self.checkpoint_every_steps = checkpoint_every_steps
        self._budget = ArtifactBudget(max_artifact_bytes)
        self._at_the_door: deque[RequestRecord] = deque()  # have arrived, and some have ended since
        self.state = ClusterState(ranks, counts_bytes=self._budget.limited)
        self._look_ahead = LookAhead(policy, self.state, cost, enabled=run_ahead > 0)
        self._admit: Callable[..., Any] | None = getattr(policy, "admit", None)
        self._shows_bytes = bool(getattr(policy, "sees_memory", False))
        self._now_s = 0.0
        self._out: list[cmd.Command] = []
        self._resets = EdgeResets()
        self.migrations: dict[int, MigrationRecord] = {}
        # A handler says whether there is anything new for the policy.
        self._handlers: dict[type, Callable[[Any], bool]] = {
            ev.RequestArrived: self._on_arrived,
            ev.RequestCancelled: self._on_cancelled,
            ev.TaskDispatched: self._on_begun,
            ev.TaskStarted: self._on_begun,
            ev.TaskWithdrawn: self._on_withdrawn,
            ev.TaskFinished: self._on_finished,
            ev.TaskFailed: self._on_failed,
            ev.MigrationFinished: self._on_migrated,
            ev.EdgesReset: self._on_edges_reset,
            ev.RankLost: self._on_rank_lost,
            ev.RankJoined: self._on_rank_joined,
            ev.WakeUp: lambda event: True,
            ev.LookAhead: self._on_look_ahead,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        """Take one event in and return the commands that follow from it, in the order to emit them.

        Late events (of a task or request that has ended) are ignored. Raises ``ValueError`` for a malformed
        graph or a request id that is still alive.
        """
        self._now_s = now_s
        self._out = []
        news = self._handlers[type(event)](event)
        if (self._at_the_door and self._let_in()) or news:
            self._look_ahead.outdate()
            self._schedule()
        return self._out

    @property
    def wants_to_look_ahead(self) -> bool:
        """Whether a :class:`~events.LookAhead` would be of use, once nothing more urgent is to be handed in."""
        return self._look_ahead.next_due(self._now_s) is not None

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the bookkeeping contradicts itself."""
        self.state.check_integrity()
        self._budget.check_integrity({name for name, record in self.state.requests.items() if record.let_in})
        resetting = self._resets.held
        for rank in self.state.ranks.present.values():
            assert (rank.reset is None) == (rank.id not in resetting), (
                f"rank {rank.id} and its edge reset disagree"
            )

    @property
    def idle(self) -> bool:
        """Nothing is alive: no request, dispatch, migration or edge reset."""
        state = self.state
        return not (state.requests or state.dispatches or self.migrations or self._resets.any_open)

    # Events

    def _on_arrived(self, event: ev.RequestArrived) -> bool:
        event.graph.check()
        request_id = event.request.id
        if request_id in self.state.requests:
            raise ValueError(f"request id {request_id!r} is already alive")
        record = self.state.new_record(event.request, event.graph)
        if self._admit is not None and (refusal := self._ask_admission(record)):
            self._out.append(refusal)
            return False
        self.state.add(record)
        self._at_the_door.append(record)
        return False

    def _let_in(self) -> bool:
        """Show the policy the requests for whose artifacts there is room; say whether there are any."""
        any_new = False
        while self._at_the_door:
            record = self._at_the_door[0]
            if self.state.requests.get(record.request.id) is record:
                if self._budget.limited:
                    if not self._budget.fits(record.request):
                        break
                    self._budget.reserve(record.request)
                self.state.let_in(record)
                any_new = True
            self._at_the_door.popleft()
        return any_new

    def _ask_admission(self, record: RequestRecord) -> cmd.Command | None:
        assert self._admit is not None
        try:
            answer = self._admit(record.view(), self._view())
            if not isinstance(answer, Admission):
                raise TypeError(f"admit returned {type(answer).__name__}, not Admission")
        except Exception as error:
            self._out.append(cmd.ReportFault(f"policy {self.policy.name!r} raised in admit: {error!r}"))
            return None
        if answer.accepted:
            return None
        return cmd.RejectRequest(record.request.id, answer.reason, answer.retry_after_s)

    def _on_cancelled(self, event: ev.RequestCancelled) -> bool:
        if (record := self.state.requests.get(event.request_id)) is None:
            return False
        self._end(record, cmd.CancelRequest(event.request_id))
        return True

    def _on_begun(self, event: ev.TaskDispatched | ev.TaskStarted) -> bool:
        self._note_begun(event.dispatch_id)
        return False

    def _on_finished(self, event: ev.TaskFinished) -> bool:
        dispatch = self._note_begun(event.dispatch_id)
        if dispatch is None or not _report(dispatch, event.rank):
            return False
        dispatch.finished.add(event.rank)
        dispatch.seconds = max(dispatch.seconds, event.seconds)
        dispatch.made.update(event.views)
        return self._close_if_done(dispatch)

    def _on_failed(self, event: ev.TaskFailed) -> bool:
        dispatch = self._note_begun(event.dispatch_id)
        if dispatch is None or not _report(dispatch, event.rank):
            return False
        _take_error(dispatch, event)
        self._withdraw_follower(dispatch)
        return self._close_if_done(dispatch)

    def _note_begun(self, dispatch_id: int) -> DispatchRecord | None:
        """A rank has begun a dispatch: too late to take it back. None for one that is over."""
        if dispatch := self.state.dispatches.get(dispatch_id):
            dispatch.begun, dispatch.withdrawing = True, False
        return dispatch

    def _on_migrated(self, event: ev.MigrationFinished) -> bool:
        migration = self.migrations.get(event.migration_id)
        if migration is None or event.rank not in migration.waiting_for:
            return False
        migration.waiting_for.discard(event.rank)
        migration.broken |= bool(event.error) and event.secondary
        recovered = False
        if migration.command.keep:
            self._out += self.state.note_kept(migration.command, event.rank, arrived=not event.error)
        if event.rank in migration.doubtful:
            layout = migration.doubtful.pop(event.rank)
            recovered = bool(event.error) and self._forget_copy(migration, event.rank, layout)
        self._close_migration_if_done(migration)
        return recovered

    def _close_migration_if_done(self, migration: MigrationRecord) -> None:
        if migration.waiting_for:
            return
        del self.migrations[migration.command.migration_id]
        if migration.broken and len(migration.members) > 1:
            ranks = [rank for rank in migration.command.ranks if rank in migration.members]
            self._out.append(self._resets.among(self._new_id(), "migration", ranks, hold=False))

    def _forget_copy(self, migration: MigrationRecord, rank: int, layout: ExecutionLayout | None) -> bool:
        """A destination did not get its part, and has what it had before. Say whether that made tasks ready."""
        record = self.state.set_holder(migration.command.request_id, migration.command.artifact, rank, layout)
        if record is None or record.ending is not None:
            return False
        self.state.recover(record)
        return True

    def _on_edges_reset(self, event: ev.EdgesReset) -> bool:
        return self._release(self._resets.report(event.reset_id, event.rank))

    def _release(self, ranks: list[int]) -> bool:
        for rank in ranks:
            self.state.ranks.release(rank)
        return bool(ranks)

    def _on_rank_lost(self, event: ev.RankLost) -> bool:
        if event.rank not in self.state.ranks.present:
            return False
        self.state.drop_rank(event.rank)
        self._release(self._resets.drop(event.rank))
        for migration in list(self.migrations.values()):
            if event.rank in migration.members:
                migration.members.discard(event.rank)
                migration.waiting_for.discard(event.rank)
                migration.doubtful.pop(event.rank, None)
                if migration.command.keep:
                    self.state.note_kept(migration.command, event.rank, arrived=False)
                self._close_migration_if_done(migration)
        message = f"rank {event.rank} was lost: {event.reason}"
        for dispatch in list(self.state.dispatches.values()):
            if _report(dispatch, event.rank):
                if dispatch.error is None or dispatch.secondary:  # it explains the echoes
                    dispatch.error, dispatch.status_code, dispatch.secondary = message, 503, True
                self._withdraw_follower(dispatch)
                self._close_if_done(dispatch)
        for record in self.state.lacking():
            self.state.recover(record)
        return True

    def _on_rank_joined(self, event: ev.RankJoined) -> bool:
        """The rank is empty and its edges are those of a new process: it is used once all peers know."""
        if event.rank not in self.state.ranks.lost:
            return False
        peers = tuple(self.state.ranks.present)
        self.state.ranks.restore(event.rank)
        if not peers:
            return True
        resets = [self._resets.of(self._new_id(), lane, event.rank, peers) for lane in ("compute", "migration")]
        self.state.ranks.reset(event.rank, resets[0].reset_id)
        self._out.extend(resets)
        return False

    # Completion

    def _close_if_done(self, dispatch: DispatchRecord) -> bool:
        """End a dispatch on which every rank has reported; False if one has not.

        Ranks that report out of order may be done with a dispatch before the one that it is queued behind.
        """
        if dispatch.waiting_for or dispatch.behind is not None:
            return False
        follower = self.state.follower(dispatch)
        self.state.release(dispatch)
        if dispatch.error is None:
            self.cost.observe(dispatch.views[0], dispatch.layout, dispatch.seconds, len(dispatch.tasks))
        else:
            self._forget_doubtful(dispatch)
        failed: set[str] = set()
        for task in dispatch.tasks:
            record = self.state.requests[task.request_id]
            record.running.discard(dispatch.id)
            record.scattered |= dispatch.error is not None or bool(dispatch.lost)
            if self.state.has_succeeded(record, task, dispatch):
                self._out.extend(self.state.finish_task(record, task, dispatch))
                if self._budget.limited:
                    self._budget.observe(record.request, record.peak_bytes, record.steps_done)
            else:
                self.state.give_up(record, task, dispatch)
                failed.add(task.request_id)
        # A member that failed may have stopped in the middle of a collective: its edges are out of step.
        out_of_step = dispatch.out_of_step or not dispatch.finished.issuperset(dispatch.members)
        if follower is not None:
            if out_of_step or failed:
                self._doom(follower, dispatch)
            self.state.promote(follower, self._now_s)
        elif out_of_step:
            self._reset_edges(dispatch.members)
        self._go_on(dispatch, failed)
        if follower is not None:
            self._close_if_done(follower)
        return True

    def _doom(self, follower: DispatchRecord, failed: DispatchRecord) -> None:
        """A rank may have begun ``follower``, whose inputs it lacks: it fails too, and edges wait for it."""
        follower.out_of_step = True
        if follower.error is None:
            follower.error, follower.status_code, follower.secondary = failed.error or LOST_PART, 503, True

    def _forget_doubtful(self, dispatch: DispatchRecord) -> None:
        """Of a failed dispatch: reports overtake each other, so its copies may have failed as well."""
        for migration_id in dispatch.migrations:
            if (migration := self.migrations.get(migration_id)) is not None:
                for rank in migration.doubtful.keys() - dispatch.finished:
                    self.state.set_holder(migration.command.request_id, migration.command.artifact, rank, None)
                migration.doubtful.clear()

    def _go_on(self, dispatch: DispatchRecord, failed: set[str]) -> None:
        """With every request of a dispatch that is over; those in ``failed`` have tasks that did not succeed."""
        for request_id in dict.fromkeys([task.request_id for task in dispatch.tasks]):
            record = self.state.requests[request_id]
            if record.ending is None:
                if request_id in failed:
                    self._retry_or_fail(record, dispatch)
                elif record.scattered and is_lacking(record):
                    self.state.recover(record)
                if self.checkpoint_every_steps and request_id not in failed:
                    self._checkpoint(record, dispatch)
            self._settle(record)

    def _checkpoint(self, record: RequestRecord, dispatch: DispatchRecord) -> None:
        """After the last of every so many steps."""
        task = dispatch.tasks[0]
        if task.kind is TaskKind.DENOISE and (task.step_index + 1) % self.checkpoint_every_steps == 0:
            for migration in self.state.keep_copies(record, self._new_id):
                self.migrations[migration.migration_id] = MigrationRecord.of(migration)
                self._out.append(migration)

    def _retry_or_fail(self, record: RequestRecord, dispatch: DispatchRecord) -> None:
        error = dispatch.error or LOST_PART
        if dispatch.error is not None and not dispatch.secondary:
            record.ending = cmd.FailRequest(record.request.id, error, dispatch.status_code)
        elif dispatch.out_of_step:
            self.state.recover(record)  # it never had a chance
        elif record.num_retries == self.max_retries:
            message = f"{error} (after {record.num_retries} retries)"
            record.ending = cmd.FailRequest(record.request.id, message, status_code=503)
        else:
            record.num_retries += 1
            self.state.recover(record)

    def _settle(self, record: RequestRecord) -> None:
        """End the request if it is over, else offer its next tasks."""
        if record.ending is not None:
            self._end(record, record.ending)
        elif len(record.finished) == len(record.graph.tasks):
            self._end(record, cmd.CompleteRequest(record.request.id))
        else:
            self.state.offer_ready(record)

    def _end(self, record: RequestRecord, terminal: cmd.Command) -> None:
        """Emit the terminal command and free everything, once no task of the request runs any more."""
        record.ending = record.ending or terminal
        self.state.withdraw_ready(record)
        for dispatch_id in record.running:
            self._withdraw_follower(self.state.dispatches[dispatch_id])
        if record.running:
            return
        if freed := self.state.remove(record):
            self._out.append(freed)
        self._budget.release(record.request.id)
        self._out.append(record.ending)

    def _reset_edges(self, ranks: tuple[int, ...]) -> None:
        """Nothing to do for a single rank: it has no edges."""
        if len(ranks) < 2:
            return
        reset = self._resets.among(self._new_id(), "compute", ranks, hold=True)
        for rank in ranks:
            self.state.ranks.reset(rank, reset.reset_id)
        self._out.append(reset)

    # Running ahead

    def _on_look_ahead(self, event: ev.LookAhead) -> bool:
        """Ask the policy about the step after one that runs; queue it, leave it queued or take it back."""
        if (running := self._look_ahead.next_due(self._now_s)) is None:
            return False
        following = None
        try:
            following = self._look_ahead.ask(running, self._now_s)
        except Exception as error:
            # Nobody is harmed: the policy is asked again when the step has ended.
            self._out.append(cmd.ReportFault(self._fault(error)))
        if (follower := self.state.follower(running)) is not None:
            if following is None or following.tasks != follower.tasks:
                self._withdraw_follower(running)
        elif following is not None:
            self._queue(following, running)
        return False

    def _queue(self, following: NextStep, running: DispatchRecord) -> None:
        tasks, layout = following.tasks, running.layout
        consumes = tuple([name for task in tasks for name in self.state.last_reads(task, running.tasks)])
        record = DispatchRecord(
            self._new_id(), tasks, following.views, layout, set(layout.ranks), consumes, following.expected_s
        )
        self.state.queue(record, running)
        self._out.append(cmd.RunTask(record.id, tasks, layout, (), consumes, after=running.id))

    def _withdraw_follower(self, dispatch: DispatchRecord) -> None:
        """Take back what is queued behind ``dispatch``, if anything is and no rank is known to have begun it."""
        follower = self.state.follower(dispatch)
        if follower is not None and not (follower.begun or follower.withdrawing):
            follower.withdrawing = True
            self._out.append(cmd.WithdrawTask(follower.id))

    def _on_withdrawn(self, event: ev.TaskWithdrawn) -> bool:
        dispatch = self.state.dispatches.get(event.dispatch_id)
        if dispatch is None or not dispatch.withdrawing:
            return False
        if dispatch.behind is not None:
            self.state.unqueue(dispatch)
            return False
        self.state.undo(dispatch)
        if dispatch.out_of_step:
            self._reset_edges(dispatch.members)
        for request_id in dict.fromkeys([task.request_id for task in dispatch.tasks]):
            record = self.state.requests[request_id]
            if record.scattered and record.ending is None:
                self.state.recover(record)
            self._settle(record)
        return True

    # Scheduling

    def _view(self) -> SchedulerView:
        view = self.state.view(self._now_s, self.cost)
        return self.state.with_bytes(view) if self._shows_bytes else view

    def _schedule(self) -> None:
        """Ask the policy and carry its decision out; its mistakes are contained here."""
        while self.state.has_work():
            try:
                decision = self.policy.schedule(self._view())
                check_decision(decision, policy=self.policy.name)
                ask_again = self._carry_out(decision)
            except Exception as error:
                ask_again = self._contain(error)
            if not ask_again:
                return

    def _contain(self, error: Exception) -> bool:
        """A policy made a mistake that no request can be named for. Say whether to ask it again at once.

        While something runs, its end brings another view. When nothing does, no event would ever come: the
        oldest waiting request fails with the policy's error, so that the server goes on.
        """
        message = self._fault(error)
        self._out.append(cmd.ReportFault(message))
        if isinstance(error, UnknownCostError) and (culprit := self.state.requests.get(error.request_id or "")):
            self._end(culprit, cmd.FailRequest(culprit.request.id, message))
            return True
        if self.state.dispatches or self._resets.held:
            return False
        oldest = self.state.oldest_ready()
        self._end(oldest, cmd.FailRequest(oldest.request.id, message))
        return True

    def _fault(self, error: Exception) -> str:
        if isinstance(error, PolicyError):
            return str(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        return f"policy {self.policy.name!r} failed in schedule at {place}: {error!r}"

    def _carry_out(self, decision: Decision) -> bool:
        """Dispatch what keeps the rules. Say whether to ask again, since a refusal has changed the view."""
        refused = False
        ready = self.state.ready.by_id
        for dispatch in decision.dispatches:
            try:
                check_dispatch(dispatch, policy=self.policy.name, ready=ready, ranks=self.state.ranks.views)
            except PolicyError as error:
                self._refuse(dispatch, error)
                refused = True
            else:
                self._dispatch(dispatch)
        if refused:
            return True
        if decision.wake_at_s is not None:
            if decision.wake_at_s <= self._now_s:
                raise PolicyError(
                    f"policy {self.policy.name!r} must return a wake_at_s later than now, "
                    f"{self._now_s}, got {decision.wake_at_s}"
                )
            self._out.append(cmd.WakeAt(decision.wake_at_s))
        elif ready and not (self.state.dispatches or self._resets.held):
            message = f"policy {self.policy.name!r} left every rank idle with {len(ready)} tasks ready"
            self._out.append(cmd.ReportFault(message))
        return False

    def _refuse(self, dispatch: Dispatch, error: PolicyError) -> None:
        """A dispatch broke a rule: the requests it names fail with that rule, the others are untouched."""
        ready = self.state.ready.by_id
        named = {ready[task].request_id for task in dispatch.tasks if task in ready}
        if not named:
            raise error
        self._out.append(cmd.ReportFault(str(error)))
        for request_id in sorted(named):
            self._end(self.state.requests[request_id], cmd.FailRequest(request_id, str(error)))

    def _dispatch(self, dispatch: Dispatch) -> None:
        layout = dispatch.layout
        views = tuple([self.state.ready.by_id[name] for name in dispatch.tasks])
        tasks = tuple([self.state.requests[view.request_id].offered[view.id] for view in views])
        busy_until_s = self._now_s + self.cost.task_s(views[0], layout, len(tasks))
        migrations = [move for task in tasks for move in self.state.move_inputs(task, layout, self._new_id)]
        for migration in migrations:
            self.migrations[migration.migration_id] = MigrationRecord.of(migration)
        self._out.extend(migrations)
        if migrations:
            busy_until_s += sum(self.cost.migration_s(view, layout) for view in views)
        consumes = tuple([name for task in tasks for name in self.state.last_reads(task)])
        moves = tuple([migration.migration_id for migration in migrations])
        record = DispatchRecord(
            self._new_id(), tasks, views, layout, set(layout.ranks), consumes, migrations=moves
        )
        for task in tasks:
            owner = self.state.requests[task.request_id]
            if not owner.started:
                owner.started = True
                self._out.append(cmd.StartRequest(owner.request.id, self._now_s - owner.request.arrival_s))
        self.state.occupy(record, busy_until_s)
        self._out.append(cmd.RunTask(record.id, tasks, layout, tuple(migrations), consumes))

    def _new_id(self) -> int:
        self.state.last_id += 1
        return self.state.last_id


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
