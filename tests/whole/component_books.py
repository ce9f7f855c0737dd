"""What must hold of components and of what is read while it is made: a part of the books of one control plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.components import Load
from gfdit.core.control import ControlPlane
from gfdit.core.control.residency import BELIEVED_S, MAX_FAILURES
from tests.whole.contract import ContractError
from tests.whole.workflows import WHOLE_MODEL, Pool

if TYPE_CHECKING:
    from tests.whole.books import Life, Operation


class ComponentBooks:
    """Which rank has what, as far as anybody has told, and what has become of loads."""

    def __init__(self, pool: Pool, num_ranks: int) -> None:
        self._pool = pool
        self._held = {rank: pool.pinned_on(rank) for rank in range(num_ranks)}
        self.ever_drained: set[int] = set()  # ranks, which may not count
        self._loading: dict[int, Load] = {}  # by number
        self._bytes = {name: one.num_bytes for name, one in pool.components.items()}  # as far as it was told
        self._failures: dict[str, int] = {}  # in a row
        self._hopeless: dict[str, float] = {}  # what failed too often while nobody had it, and when
        self._ever_hopeless: set[str] = set()  # for which a request may end, once nothing of it runs any more

    def num_places(self, name: str) -> int:
        """Ranks that may have it."""
        component = self._pool.components.get(name)
        return len([rank for rank in self._held if component is None or component.may_be_on(rank)])

    def before(self, event: ev.Event, now_s: float) -> None:
        """The control plane is about to hear of ``event``."""
        match event:
            case ev.ComponentLoaded(number):
                if (load := self._loading.pop(number, None)) is not None:
                    self._note_end(load, event, now_s)
            case ev.RankLost(rank):
                self._held[rank] = set()
                for number, load in list(self._loading.items()):
                    if load.rank == rank:
                        del self._loading[number]
                        self._note_failure(load.component, now_s)
            case ev.RankJoined(rank, resident):
                self._held[rank] = self._pool.pinned_on(rank) if resident is None else set(resident)
            case ev.Reconnected(resident=resident):
                for rank, names in resident:
                    self._held[rank] = set(names)

    def _note_failure(self, name: str, now_s: float) -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        if self._failures[name] >= MAX_FAILURES and not self._is_anywhere(name):
            self._hopeless[name] = now_s
            self._ever_hopeless.add(name)

    def _is_anywhere(self, name: str) -> bool:
        return any(name in held for rank, held in self._held.items() if rank not in self.ever_drained)

    def _note_end(self, load: Load, event: ev.ComponentLoaded, now_s: float) -> None:
        name = load.component
        if event.error:
            self._note_failure(name, now_s)
            return
        self._failures.pop(name, None)
        self._hopeless.pop(name, None)
        self._held[load.rank].add(name)
        self._bytes[name] = event.num_bytes

    def after(
        self, command: cmd.Command, lives: Mapping[str, Life], operations: Mapping[int, Operation], now_s: float
    ) -> None:
        """The control plane has answered with ``command``, among others."""
        match command:
            case cmd.LoadComponent(_, _, name):
                self._check_load(command, operations)
                if now_s < self._hopeless.get(name, -BELIEVED_S) + BELIEVED_S:
                    raise ContractError(f"{command} after {self._failures[name]} failures, the last one just now")
            case cmd.RunTask():
                self._check_run(command, lives, operations)
            case cmd.FailRequest(request_id, error) if error.startswith("component "):
                if request_id in lives:
                    self._check_end(command, lives[request_id])

    def _check_load(self, command: cmd.LoadComponent, operations: Mapping[int, Operation]) -> None:
        rank, name = command.rank, command.component
        component, held = self._pool.components[name], self._held[rank]
        if any(load.rank == rank for load in self._loading.values()):
            raise ContractError(f"{command} although another one is under way there")
        for operation in operations.values():
            other = operation.command
            runs = isinstance(other, cmd.RunTask) and any(task.outputs for task in other.tasks)
            if runs and rank in operation.unreported:
                raise ContractError(f"{command} although {other} runs there")
        if name in held or not component.may_be_on(rank):
            raise ContractError(f"{command}, which is there or must not be")
        if not held.issuperset(command.evict) or self._pool.pinned_on(rank).intersection(command.evict):
            raise ContractError(f"{command} drops what is not there or has to stay")
        held.difference_update(command.evict)
        self._check_room(rank, {*held, name})
        self._loading[command.load_id] = Load(rank, name, command.evict)

    def _check_room(self, rank: int, names: set[str]) -> None:
        limit = self._pool.component_bytes
        if limit is not None and (needed := sum(self._bytes[name] for name in names)) > limit:
            raise ContractError(f"{sorted(names)} take {needed} bytes on rank {rank}, which has {limit}")

    def _check_run(
        self, command: cmd.RunTask, lives: Mapping[str, Life], operations: Mapping[int, Operation]
    ) -> None:
        ranks = command.layout.ranks
        for load in self._loading.values():
            if load.rank in ranks:
                raise ContractError(f"dispatch {command.dispatch_id} is for rank {load.rank}, which loads")
        for task in command.tasks:
            component = task.component or WHOLE_MODEL
            if lacking := [rank for rank in ranks if component not in self._held[rank]]:
                raise ContractError(f"dispatch {command.dispatch_id} needs {component} on ranks {lacking}")
            streamed = {move.artifact: move for move in command.migrations if move.streamed}
            for name in task.deferred:
                if (move := streamed.get(name)) is not None:
                    self._check_stream(command, move, operations)

    @staticmethod
    def _check_stream(command: cmd.RunTask, move: cmd.Migrate, operations: Mapping[int, Operation]) -> None:
        """Its maker is under way, elsewhere."""
        maker = operations.get(move.streamed)
        makes = [] if maker is None or not isinstance(maker.command, cmd.RunTask) else maker.command.tasks
        if maker is None or not any(move.artifact in task.outputs for task in makes):
            raise ContractError(f"dispatch {command.dispatch_id} reads {move.artifact}, which nobody makes")
        if set(maker.ranks) & set(command.layout.ranks):
            raise ContractError(f"dispatch {command.dispatch_id} is in the way of who makes {move.artifact}")
        if move.ranks != (maker.ranks[0], *command.layout.ranks):
            raise ContractError(f"{move} does not bring it from {maker.ranks} to {command.layout}")

    def _check_end(self, command: cmd.FailRequest, life: Life) -> None:
        """It needs a component that was tried often enough in vain, and on more ranks than have it."""
        name = command.error.split()[1]
        sizes = [[spec.size for spec in task.candidates] for task in life.graph.tasks if task.component == name]
        if not sizes:
            raise ContractError(f"{command}, which does not need it")
        if name in self._ever_hopeless:
            return
        there = [name in held for rank, held in self._held.items() if rank not in self.ever_drained]
        if sum(there) >= max(map(max, sizes)):  # narrower ones may take too much memory
            raise ContractError(f"{command} although ranks enough have it")
        if self._failures.get(name, 0) < MAX_FAILURES:
            raise ContractError(f"{command} after {self._failures.get(name, 0)} failures")

    def check(self, plane: ControlPlane) -> None:
        """After every event."""
        for rank, record in plane.state.ranks.present.items():
            if record.resident != self._held[rank]:
                raise ContractError(f"rank {rank} has {sorted(self._held[rank])}, not {sorted(record.resident)}")
        if plane._residency.loading != self._loading:
            raise ContractError(f"{self._loading} are under way, not {plane._residency.loading}")
