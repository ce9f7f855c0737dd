"""Copies to fall back on: what only one rank holds is copied to another one every so many steps."""

from __future__ import annotations

from gfdit.core import commands as cmd
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.control.records import DispatchRecord, RequestRecord
from gfdit.core.control.state import ClusterState
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import TaskKind, artifact_kind


class Checkpoints:
    """When to make such copies, and which there are: ``kept`` and ``keeping`` of an artifact's record."""

    def __init__(self, state: ClusterState, every_steps: int) -> None:
        """``every_steps`` 0: never."""
        self._state = state
        self.every_steps = every_steps

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
        if layout is None or not arrived:
            return []
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

    def _copies(self, record: RequestRecord) -> list[cmd.Migrate]:
        """To the next rank, of what only one rank holds and is still to be read."""
        moves = []
        ranks = list(self._state.ranks.present)
        for art in record.live_artifacts:
            if art.id in record.streamed:  # what it is made from is kept
                continue
            if not art.readers or len(art.holders) > 1 or len(ranks) < 2 or art.kept or art.keeping:
                continue
            (holder,) = art.holders
            keeper = ranks[(ranks.index(holder) + 1) % len(ranks)]
            target = ExecutionLayout((keeper,))
            plan = plan_transfers(art.view, art.holders, target)
            held = tuple(art.holders.items())
            number = self._state.new_id()
            moves.append(
                cmd.Migrate(
                    number,
                    record.request.id,
                    art.id,
                    plan.ranks,
                    plan.transfers,
                    target,
                    held,
                    art.view,
                    keep=True,
                )
            )
            art.keeping[keeper] = target
            record.touched.add(keeper)
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
