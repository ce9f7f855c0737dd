"""Copies to fall back on: what only one rank holds is copied to another one every so many steps.

So is, at once, what a rank holds or keeps alone that is to be drained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gfdit.core import commands as cmd
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.control.records import ArtifactRecord, ArtifactState, DispatchRecord, RequestRecord
from gfdit.core.control.state import ClusterState
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import TaskKind, artifact_kind

MAX_TRIES = 3
"""To copy something from a rank that is drained; then it is made again."""


class Checkpoints:
    """When to make such copies, and which there are: ``kept`` and ``keeping`` of an artifact's record."""

    def __init__(self, state: ClusterState, every_steps: int) -> None:
        """``every_steps`` 0: never."""
        self._state = state
        self.every_steps = every_steps
        self._handing_on: set[int] = set()  # copies under way that will be held as their original is
        self._tries: Counter[tuple[int, str]] = Counter()  # by rank and artifact

    def after(self, dispatch: DispatchRecord, record: RequestRecord) -> list[cmd.Migrate]:
        """The copies of what ``record`` holds that are due now that ``dispatch`` has succeeded for it."""
        task = dispatch.tasks[0]
        if task.kind is not TaskKind.DENOISE or (task.step_index + 1) % self.every_steps:
            return []
        return self._copies(record)

    def note(self, command: cmd.Migrate, rank: int, *, arrived: bool) -> list[cmd.Command]:
        """A copy to fall back on is there, or is not; older ones of its kind are freed for it."""
        state = self._state
        if (record := state.requests.get(command.request_id)) is None or rank not in command.target.ranks:
            return []
        art = record.artifacts[command.artifact]
        layout = art.keeping.pop(rank, None)
        is_handed_on = command.migration_id in self._handing_on
        self._handing_on.discard(command.migration_id)
        if layout is None or not arrived:
            return []
        if is_handed_on:
            return self._hold(record, art, rank, layout)
        art.kept[rank] = layout
        kind = artifact_kind(record.request.id, art.id)
        freed: list[cmd.Command] = []
        for other in record.artifacts.values():
            if other is art or not other.kept or artifact_kind(record.request.id, other.id) != kind:
                continue
            # Where it is being made again it takes the copy's place, and must not be freed in its stead.
            if old := other.kept.keys() - other.holders.keys() - self._makers(record, other.id):
                freed.append(cmd.FreeArtifacts(tuple(sorted(old)), (other.id,), state.last_id))
            other.kept.clear()
        return freed

    def hand_on(self, rank: int) -> tuple[list[cmd.Migrate], bool]:
        """Copies to other ranks of what would be lost with ``rank``, which is drained; whether to wait as well.

        That is for tasks that read what all ranks hold parts of: a copy would take the place of such a part.
        """
        moves, waits = [], False
        for record in self._state.requests.values():
            for art in record.artifacts.values() if record.ending is None else ():
                if art.id in record.streamed or any(art.keeping.values()):
                    continue  # what it is made from is handed on; a copy of it is on its way
                others = {holder: layout for holder, layout in art.holders.items() if holder != rank}
                is_live = art.state is ArtifactState.MATERIALIZED and art.readers > 0
                is_needed = is_live and rank in art.holders and not art.view.covered_by(others)
                if art.kept.keys() - {rank} or not (is_needed or rank in art.kept):
                    continue
                if self._tries[rank, art.id] == MAX_TRIES:
                    continue
                if (keeper := self._place_for(rank, others)) is None:
                    waits |= is_needed
                    continue
                self._tries[rank, art.id] += 1
                move = self._copy(record, art, art.holders if is_needed else art.kept, keeper)
                record.has_strays = True  # it may come when nobody counts on it any more
                if is_needed:
                    self._handing_on.add(move.migration_id)
                moves.append(move)
        return moves, waits

    def _place_for(self, rank: int, others: Iterable[int]) -> int | None:
        """The next rank after ``rank`` that has nothing of an artifact, and is neither drained nor suspected."""
        present = self._state.ranks.present
        places = [one for one in present if not present[one].leaving and one not in others]
        return min(places, key=lambda one: (present[one].suspended, one < rank, one), default=None)

    def forget(self, rank: int) -> None:
        """``rank`` is drained."""
        self._tries = Counter({key: count for key, count in self._tries.items() if key[0] != rank})

    def _hold(
        self, record: RequestRecord, art: ArtifactRecord, rank: int, layout: ExecutionLayout
    ) -> list[cmd.Command]:
        """A copy is there that is as good as its original, if that is still wanted."""
        if art.state is ArtifactState.MATERIALIZED:
            art.holders[rank] = layout
            self._state.refresh_ready(record)
        elif art.state is ArtifactState.FREED and rank not in self._makers(record, art.id):
            return [cmd.FreeArtifacts((rank,), (art.id,), self._state.last_id)]
        return []

    def _copy(
        self, record: RequestRecord, art: ArtifactRecord, holders: dict[int, ExecutionLayout], keeper: int
    ) -> cmd.Migrate:
        target = ExecutionLayout((keeper,))
        plan = plan_transfers(art.view, holders, target)
        held = tuple([(rank, holders[rank]) for rank in plan.ranks if rank in holders])
        art.keeping[keeper] = target
        record.touched.add(keeper)
        number, name = self._state.new_id(), record.request.id
        return cmd.Migrate(number, name, art.id, plan.ranks, plan.transfers, target, held, art.view, keep=True)

    def _copies(self, record: RequestRecord) -> list[cmd.Migrate]:
        """To the next rank, of what only one rank holds and is still to be read."""
        present = self._state.ranks.present
        ranks = [rank for rank in present if not present[rank].leaving]
        moves = []
        for art in record.live_artifacts:
            if art.id in record.streamed:  # what it is made from is kept
                continue
            if not art.readers or len(art.holders) > 1 or art.kept or art.keeping:
                continue
            (holder,) = art.holders
            later = [rank for rank in ranks if rank > holder]
            keeper = (later or ranks)[0] if ranks else holder
            if keeper != holder:
                moves.append(self._copy(record, art, art.holders, keeper))
        return moves

    def _makers(self, record: RequestRecord, artifact: str) -> set[int]:
        """The ranks on which a task that makes ``artifact`` runs, or is queued."""
        state = self._state
        running = [state.dispatches[dispatch_id] for dispatch_id in record.running]
        queued = [follower for dispatch in running if (follower := state.follower(dispatch)) is not None]
        makers: set[int] = set()
        for dispatch in (*running, *queued):
            if any([artifact in task.outputs for task in dispatch.tasks]):
                makers.update(dispatch.layout.ranks)
        return makers
