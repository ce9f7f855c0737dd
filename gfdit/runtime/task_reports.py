"""What ranks report, joined with the commands it answers, for the timeline and for traces."""

from __future__ import annotations

from gfdit.core import ControlPlane
from gfdit.core import commands as cmd
from gfdit.core.events import MigrationFinished, TaskFailed, TaskFinished, TaskWithdrawn
from gfdit.observe.timeline import TimelineWriter
from gfdit.observe.traces import CopySpan, Fact, RequestEvent, TaskSpan, Traces

MAX_FACTS = 16384


class _InFlight:
    """Of a command when it was sent, and what its ranks have said so far."""

    __slots__ = ("at_s", "end_s", "error", "num_done", "num_left", "start_s")

    def __init__(self, num_ranks: int, at_s: float) -> None:
        self.at_s = at_s
        self.num_left, self.num_done = num_ranks, 0
        self.start_s, self.end_s = float("inf"), 0.0
        self.error = ""

    def done(self, start_s: float, end_s: float) -> None:
        """By a rank."""
        self.num_left -= 1
        self.num_done += 1
        self.start_s = min(self.start_s, start_s)
        self.end_s = max(self.end_s, end_s)


class _Run(_InFlight):
    """``attempts`` of its tasks; None: it is the first of each."""

    __slots__ = ("attempts", "command")

    def __init__(self, command: cmd.RunTask, at_s: float) -> None:
        super().__init__(len(command.layout.ranks), at_s)
        self.command = command
        self.attempts: list[int] | None = None


class _Copy(_InFlight):
    __slots__ = ("command", "num_bytes")

    def __init__(self, command: cmd.Migrate, at_s: float) -> None:
        super().__init__(len(command.ranks), at_s)
        self.command = command
        self.num_bytes = 0


class TaskReports:
    """Keeps the commands that ranks have still to report on, to tell what they say of them.

    Every task passes here several times on the thread that dispatches, so what can be left for later is.
    """

    def __init__(self, plane: ControlPlane, timeline: TimelineWriter | None, *, traces: bool) -> None:
        self.timeline = timeline  # may be another one from now on
        self._plane = plane
        self._traces = traces
        self._runs: dict[int, _Run] = {}
        self._copies: dict[int, _Copy] = {}
        self._facts: list[Fact] = []  # until somebody takes them
        self._num_dropped = 0
        self._tasks: dict[str, set[str]] = {}  # of live requests: those that were sent
        self._attempts: dict[str, int] = {}  # of those that were sent more than once

    # Commands

    def sent(self, command: cmd.RunTask, at_s: float) -> None:
        run = self._runs[command.dispatch_id] = _Run(command, at_s)
        if not self._traces:
            return
        for task in command.tasks:
            if (known := self._tasks.get(task.request_id)) is None:
                self._tasks[task.request_id] = {task.id}
            elif task.id not in known:
                known.add(task.id)
            else:
                self._attempts[task.id] = self._attempts.get(task.id, 1) + 1
                self._add(RequestEvent(task.request_id, "retry", at_s, task.id))
        if self._attempts:
            run.attempts = [self._attempts.get(task.id, 1) for task in command.tasks]

    def sent_copy(self, command: cmd.Migrate, at_s: float) -> None:
        self._copies[command.migration_id] = _Copy(command, at_s)

    def ended(self, request_id: str) -> None:
        """Nothing of it is sent any more."""
        tasks = self._tasks.pop(request_id, ())
        if self._attempts:
            for task in tasks:
                self._attempts.pop(task, None)

    # What ranks say

    def ran(self, done: TaskFinished) -> None:
        if (run := self._runs.get(done.dispatch_id)) is None:
            return  # the last word of a rank that was lost
        start_s = done.finished_s - done.seconds
        run.done(start_s, done.finished_s)
        if self.timeline is not None:
            self._draw(self.timeline, run, done, start_s)
        if not run.num_left:
            self._tell_run(self._runs.pop(done.dispatch_id), done.finished_s)

    def failed(self, message: TaskFailed, now_s: float) -> None:
        if (run := self._runs.get(message.dispatch_id)) is None:
            return
        run.num_left -= 1
        if not run.error or not message.caused_by_peer:
            run.error = message.error
        if not message.caused_by_peer:
            self._tell_requests(run, "task_failed", now_s, message.rank, message.error)
        if not run.num_left:
            self._tell_run(self._runs.pop(message.dispatch_id), now_s)

    def lost(self, rank: int, reason: str, now_s: float) -> None:
        for run in self._runs.values():
            if rank in run.command.layout.ranks:
                run.error = f"rank {rank} was lost: {reason}"
                self._tell_requests(run, "rank_lost", now_s, rank, reason)

    def moved(self, done: MigrationFinished) -> None:
        if (copy := self._copies.get(done.migration_id)) is None:
            return
        start_s = done.finished_s - done.seconds
        copy.done(start_s, done.finished_s)
        copy.num_bytes += done.num_bytes
        copy.error = copy.error or done.error
        command = copy.command
        if self.timeline is not None and not done.error:
            self.timeline.record_migration(
                rank=done.rank,
                artifact=command.artifact,
                request_id=command.request_id,
                ranks=command.ranks,
                start_s=start_s,
                end_s=done.finished_s,
                num_bytes=done.num_bytes,
            )
        if not copy.num_left:
            self._tell_copy(self._copies.pop(done.migration_id))

    def withdrawn(self, event: TaskWithdrawn) -> None:
        """It never ran, and is sent again as if it had never been."""
        if (run := self._runs.pop(event.dispatch_id, None)) is None:
            return
        for task in run.command.tasks:
            if task.id in self._attempts:
                self._attempts[task.id] -= 1
            elif (known := self._tasks.get(task.request_id)) is not None:
                known.discard(task.id)

    # What is told of it

    def take(self, now_s: float) -> Traces | None:
        """What has been collected for traces; None if there are none to be."""
        self._forget_closed(now_s)
        if not self._traces:
            return None
        taken = Traces(self._facts, self._num_dropped)
        self._facts, self._num_dropped = [], 0
        return taken

    def _forget_closed(self, now_s: float) -> None:
        """What the control plane has closed without a word of every rank: one was lost, or passed it over."""
        for dispatch_id in self._runs.keys() - self._plane.state.dispatches.keys():
            self._tell_run(self._runs.pop(dispatch_id), now_s)
        for migration_id in self._copies.keys() - self._plane.migrations.keys():
            self._tell_copy(self._copies.pop(migration_id))

    def _draw(self, timeline: TimelineWriter, run: _Run, done: TaskFinished, start_s: float) -> None:
        command = run.command
        for task in command.tasks:
            timeline.record(
                rank=done.rank,
                task_id=task.id,
                request_id=task.request_id,
                kind=str(task.kind),
                step_index=task.step_index,
                layout=command.layout,
                start_s=start_s,
                end_s=done.finished_s,
                decided_s=run.at_s,
                dispatched_s=done.dispatched_s,
                run_ahead=command.after is not None,
            )

    def _add(self, fact: Fact) -> None:
        if len(self._facts) < MAX_FACTS:
            self._facts.append(fact)
        else:
            self._num_dropped += 1

    def _tell_requests(self, run: _Run, name: str, now_s: float, rank: int, detail: str) -> None:
        if self._traces:
            for task in run.command.tasks:
                self._add(RequestEvent(task.request_id, name, now_s, task.id, rank, detail))

    def _tell_run(self, run: _Run, now_s: float) -> None:
        if not self._traces:
            return
        command, error, start_s, end_s = run.command, run.error, run.start_s, run.end_s
        layout, tasks = command.layout, command.tasks
        if run.num_done < len(layout.ranks):
            if not run.num_done and not error:
                return  # queued behind one that failed
            error = error or "it was given up"
            start_s, end_s = run.at_s, now_s
        (sp, cfg), batch, run_ahead = layout.parallel, len(tasks), command.after is not None
        for number, task in enumerate(tasks):
            self._add(
                TaskSpan(
                    task.request_id,
                    task.id,
                    task.kind._value_,
                    task.component,
                    task.step_index,
                    layout.ranks,
                    sp,
                    cfg,
                    batch,
                    1 if run.attempts is None else run.attempts[number],
                    run_ahead,
                    run.at_s,
                    start_s,
                    end_s,
                    error,
                )
            )

    def _tell_copy(self, copy: _Copy) -> None:
        if not self._traces or not copy.num_done:
            return
        command = copy.command
        self._add(
            CopySpan(
                command.request_id,
                command.artifact,
                tuple(dict.fromkeys([one.source for one in command.transfers])),
                tuple(dict.fromkeys([rank for one in command.transfers for rank in one.destinations])),
                copy.num_bytes,
                command.keep,
                copy.start_s,
                copy.end_s,
                copy.error,
            )
        )
