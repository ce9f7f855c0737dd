"""The ranks of a simulation: what runs and what is copied on them, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.core import commands as cmd
from gfdit.sim.options import SimulationOptions
from gfdit.sim.rank_faults import Slowness


@dataclass(slots=True)
class Execution:
    """A dispatch on its ranks; ``start_s`` is in the future while it waits for copies.

    ``seconds`` is what it takes, without the rounding of end minus start: a right cost model stays as it is.
    """

    command: cmd.RunTask
    start_s: float
    end_s: float
    seconds: float


@dataclass(slots=True)
class Copy:
    command: cmd.Migrate
    start_s: float
    end_s: float


class Devices:
    """Each rank has a lane for tasks and one for copies, which overlap. Lanes work in the order of commands.

    The control plane never queues tasks, so their lane needs no order.
    """

    def __init__(self, options: SimulationOptions) -> None:
        self._options = options
        self._slowness = Slowness(options.slow_ranks)
        self._executions: dict[int, Execution] = {}
        self._copies: dict[int, Copy] = {}
        self._copies_end_s = [0.0] * options.num_ranks
        self._last_on: dict[int, Execution] = {}

    def copy(self, command: cmd.Migrate, seconds: float, now_s: float) -> Copy:
        """Its source and destinations are at it together, once each is done with its copies so far."""
        start_s = now_s + self._options.dispatch_latency_s
        start_s = max(start_s, *[self._copies_end_s[rank] for rank in command.ranks])
        copy = Copy(command, start_s, start_s + seconds)
        for rank in command.ranks:
            self._copies_end_s[rank] = copy.end_s
        self._copies[command.migration_id] = copy
        return copy

    def execute(self, command: cmd.RunTask, seconds: float, now_s: float) -> Execution:
        """``seconds`` at full speed, once its copies are there."""
        start_s = now_s if self._was_queued(command, now_s) else now_s + self._options.dispatch_latency_s
        for migration in command.migrations:
            start_s = max(start_s, self._copies[migration.migration_id].end_s)
        end_s = start_s + seconds
        if self._options.slow_ranks:
            end_s = self._slowness.end_s(start_s, seconds, command.layout.ranks)
            seconds = end_s - start_s
        execution = self._executions[command.dispatch_id] = Execution(command, start_s, end_s, seconds)
        return execution

    def finish(self, execution: Execution) -> bool:
        """False if a lost rank has ended it before."""
        if self._executions.pop(execution.command.dispatch_id, None) is None:
            return False
        self._last_on[execution.command.layout.ranks[0]] = execution
        return True

    def finish_copy(self, copy: Copy) -> bool:
        """False if a lost rank has ended it before."""
        return self._copies.pop(copy.command.migration_id, None) is not None

    def lose(self, rank: int, now_s: float) -> tuple[list[Execution], list[Copy]]:
        """What ends now without success: what ``rank`` takes part in, and what waits for a copy that it does."""
        copies = [copy for copy in self._copies.values() if rank in copy.command.ranks]
        broken = {copy.command for copy in copies}
        executions = [
            execution
            for execution in self._executions.values()
            if rank in execution.command.layout.ranks or not broken.isdisjoint(execution.command.migrations)
        ]
        for copy in copies:
            copy.end_s = now_s
            del self._copies[copy.command.migration_id]
        for execution in executions:
            execution.end_s, execution.seconds = now_s, max(0.0, now_s - execution.start_s)
            del self._executions[execution.command.dispatch_id]
        self._copies_end_s[rank] = now_s
        return executions, copies

    def _was_queued(self, command: cmd.RunTask, now_s: float) -> bool:
        """A control plane that runs ahead would have queued the dispatch behind the one that has just ended."""
        if not self._options.run_ahead or command.migrations:
            return False
        last = self._last_on.get(command.layout.ranks[0])
        return (
            last is not None
            and last.end_s == now_s
            and last.command.layout == command.layout
            and [task.request_id for task in last.command.tasks] == [task.request_id for task in command.tasks]
        )
