"""The timeline of a runtime: each report of a rank is joined with the command it answers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gfdit.core import ControlPlane
from gfdit.core import commands as cmd
from gfdit.core.events import MigrationFinished, TaskFinished
from gfdit.observe.timeline import TimelineWriter


class _Sent(NamedTuple):
    """A dispatch in flight and when it was sent."""

    command: cmd.RunTask
    at_s: float


class TaskTimeline:
    """Keeps the commands that ``plane`` has still to hear of, to write what ranks say of them."""

    def __init__(self, path: str | Path, num_ranks: int, plane: ControlPlane) -> None:
        self._writer = TimelineWriter(path, num_ranks, serving=True)
        self._plane = plane
        self._runs: dict[int, _Sent] = {}
        self._copies: dict[int, cmd.Migrate] = {}

    def sent(self, command: cmd.RunTask, at_s: float) -> None:
        self._runs[command.dispatch_id] = _Sent(command, at_s)

    def sent_copy(self, command: cmd.Migrate) -> None:
        self._copies[command.migration_id] = command

    def forget_ended(self) -> None:
        """What the control plane has closed is not reported on any more."""
        for dispatch_id in self._runs.keys() - self._plane.state.dispatches.keys():
            del self._runs[dispatch_id]
        for migration_id in self._copies.keys() - self._plane.migrations.keys():
            del self._copies[migration_id]

    def ran(self, done: TaskFinished) -> None:
        if (sent := self._runs.get(done.dispatch_id)) is None:
            return  # the last word of a rank that was lost
        run = sent.command
        for task in run.tasks:
            self._writer.record(
                rank=done.rank,
                task_id=task.id,
                request_id=task.request_id,
                kind=str(task.kind),
                step_index=task.step_index,
                layout=run.layout,
                start_s=done.finished_s - done.seconds,
                end_s=done.finished_s,
                decided_s=sent.at_s,
                dispatched_s=done.dispatched_s,
                run_ahead=run.after is not None,
            )

    def moved(self, done: MigrationFinished) -> None:
        move = self._copies.get(done.migration_id)
        if move is None or done.error:
            return
        self._writer.record_migration(
            rank=done.rank,
            artifact=move.artifact,
            request_id=move.request_id,
            ranks=move.ranks,
            start_s=done.finished_s - done.seconds,
            end_s=done.finished_s,
            num_bytes=done.num_bytes,
        )

    def close(self) -> None:
        self._writer.close()
