"""Copies of artifacts under way: whose report is missing, and who is counted as a holder but may never be one."""

from __future__ import annotations

from collections.abc import Sequence

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control.artifacts import Artifacts
from gfdit.core.control.checkpoints import Checkpoints
from gfdit.core.control.edges import EdgeResets
from gfdit.core.control.records import DispatchRecord, MigrationRecord
from gfdit.core.control.state import ClusterState
from gfdit.core.control.turn import Turn
from gfdit.core.layouts import ExecutionLayout


class Migrations:
    """Those that some rank has still to report on are ``open``, by id."""

    def __init__(
        self,
        state: ClusterState,
        artifacts: Artifacts,
        checkpoints: Checkpoints,
        resets: EdgeResets,
        turn: Turn,
    ) -> None:
        self.open: dict[int, MigrationRecord] = {}
        self._state = state
        self._artifacts = artifacts
        self._checkpoints = checkpoints
        self._resets = resets
        self._turn = turn

    def begin(self, commands: Sequence[cmd.Migrate]) -> None:
        for command in commands:
            self.open[command.migration_id] = MigrationRecord.of(command)
        self._turn.commands.extend(commands)

    def on_finished(self, event: ev.MigrationFinished) -> bool:
        """Say whether tasks are ready that were not."""
        migration = self.open.get(event.migration_id)
        if migration is None or event.rank not in migration.waiting_for:
            return False
        migration.waiting_for.discard(event.rank)
        migration.broken |= bool(event.error) and event.secondary
        recovered = False
        if migration.command.keep:
            self._turn.commands += self._checkpoints.note(migration.command, event.rank, arrived=not event.error)
        if event.rank in migration.doubtful:
            layout = migration.doubtful.pop(event.rank)
            recovered = bool(event.error) and self._forget_copy(migration, event.rank, layout)
        self._close_if_done(migration)
        return recovered

    def drop(self, rank: int) -> None:
        """``rank`` is lost."""
        for migration in list(self.open.values()):
            if rank in migration.members:
                migration.members.discard(rank)
                migration.waiting_for.discard(rank)
                migration.doubtful.pop(rank, None)
                if migration.command.keep:
                    self._checkpoints.note(migration.command, rank, arrived=False)
                self._close_if_done(migration)

    def forget_doubtful(self, dispatch: DispatchRecord) -> None:
        """Of a failed dispatch: reports overtake each other, so its copies may have failed as well."""
        for migration_id in dispatch.migrations:
            if (migration := self.open.get(migration_id)) is not None:
                command = migration.command
                for rank in migration.doubtful.keys() - dispatch.finished:
                    self._artifacts.set_holder(command.request_id, command.artifact, rank, None)
                migration.doubtful.clear()

    def _forget_copy(self, migration: MigrationRecord, rank: int, layout: ExecutionLayout | None) -> bool:
        """A destination did not get its part, and has what it had before. Say whether that made tasks ready."""
        command = migration.command
        record = self._artifacts.set_holder(command.request_id, command.artifact, rank, layout)
        if record is None or record.ending is not None:
            return False
        self._state.recover(record)
        return True

    def _close_if_done(self, migration: MigrationRecord) -> None:
        if migration.waiting_for:
            return
        del self.open[migration.command.migration_id]
        if migration.broken and len(migration.members) > 1:
            ranks = [rank for rank in migration.command.ranks if rank in migration.members]
            reset = self._resets.among(self._state.new_id(), "migration", ranks, hold=False)
            self._turn.commands.append(reset)
