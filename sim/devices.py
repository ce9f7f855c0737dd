"""The ranks of a simulation: what runs and what is copied on them, and until when."""

from __future__ import annotations

from msgspec import Struct

from gfdit.core import commands as cmd
from gfdit.sim.options import SimulationOptions
from gfdit.sim.rank_faults import Slowness

LAST_PART = 0.05
"""The share of a task that follows on the last part of a deferred input: one block of twenty."""


class Execution(Struct, gc=False):
    """A dispatch on its ranks; ``start_s`` is in the future while it waits for copies.

    ``seconds`` is what it takes, without the rounding of end minus start: a right cost model stays as it is.
    """

    command: cmd.RunTask
    start_s: float
    end_s: float
    seconds: float


class Copy(Struct):
    command: cmd.Migrate
    start_s: float
    end_s: float


class Devices:
    """Each rank has a lane for tasks and one for copies, which overlap. Lanes work in the order of commands.

    The only task that waits behind another is one that was queued behind it.
    """

    def __init__(self, options: SimulationOptions) -> None:
        self._options = options
        self._slowness = Slowness(options.slow_ranks)
        self._executions: dict[int, Execution] = {}
        self._copies: dict[int, Copy] = {}
        self._copies_end_s = [0.0] * options.num_ranks
        self._cut_off: set[int] = set()  # queued executions that cannot begin, since what was before them failed

    def copy(self, command: cmd.Migrate, seconds: float, now_s: float) -> Copy:
        """Its source and destinations are at it together, once each is done with its copies so far."""
        start_s = now_s + self._options.dispatch_latency_s
        start_s = max(start_s, *[self._copies_end_s[rank] for rank in command.ranks])
        copy = Copy(command, start_s, start_s + seconds)
        for rank in command.ranks:
            self._copies_end_s[rank] = copy.end_s
        self._copies[command.migration_id] = copy
        return copy

    def stream(self, command: cmd.Migrate, now_s: float) -> Copy:
        """Parts go as they are made: the last one when the task ends that makes them, or at once if it has."""
        end_s = now_s + self._options.dispatch_latency_s
        for execution in self._executions.values():
            if any([command.artifact in task.outputs for task in execution.command.tasks]):
                end_s = max(end_s, execution.end_s)
        copy = self._copies[command.migration_id] = Copy(command, now_s, end_s)
        return copy

    def execute(self, command: cmd.RunTask, seconds: float, now_s: float) -> Execution:
        """``seconds`` at full speed, once its copies are there and what it is queued behind has ended."""
        start_s = now_s + self._options.dispatch_latency_s
        if (before := self._before(command)) is not None:
            start_s = max(start_s, before.end_s)
        streamed_s = start_s
        for migration in command.migrations:
            arrival_s = self._copies[migration.migration_id].end_s
            if migration.streamed:
                streamed_s = max(streamed_s, arrival_s)
            else:
                start_s = max(start_s, arrival_s)
        # What comes last is used last: then this much of the task is still to do.
        end_s = max(start_s + seconds, streamed_s + seconds * LAST_PART)
        if self._options.slow_ranks:
            end_s = self._slowness.end_s(start_s, seconds, command.layout.ranks)
            seconds = end_s - start_s
        execution = self._executions[command.dispatch_id] = Execution(command, start_s, end_s, seconds)
        return execution

    def finish(self, execution: Execution) -> bool:
        """False if a lost rank has ended it before, or it was withdrawn."""
        return self._executions.pop(execution.command.dispatch_id, None) is not None

    def withdraw(self, dispatch_id: int) -> bool:
        """Forget a queued execution; False if it has begun."""
        execution = self._executions.get(dispatch_id)
        if execution is None:
            return False
        if dispatch_id not in self._cut_off and self._before(execution.command) is None:
            return False
        self._cut_off.discard(dispatch_id)
        del self._executions[dispatch_id]
        return True

    def finish_copy(self, copy: Copy) -> bool:
        """False if a lost rank has ended it before."""
        return self._copies.pop(copy.command.migration_id, None) is not None

    def lose(self, rank: int, now_s: float) -> tuple[list[Execution], list[Copy]]:
        """What ends now without success: what ``rank`` takes part in, and what waits for a copy that it does.

        What is queued behind another execution has not begun: the control plane withdraws it.
        """
        copies = [copy for copy in self._copies.values() if rank in copy.command.ranks]
        broken = {copy.command for copy in copies}
        executions = [
            execution
            for execution in self._executions.values()
            if (rank in execution.command.layout.ranks or not broken.isdisjoint(execution.command.migrations))
            and self._before(execution.command) is None
        ]
        for copy in copies:
            copy.end_s = now_s
            del self._copies[copy.command.migration_id]
        for execution in executions:
            execution.end_s, execution.seconds = now_s, max(0.0, now_s - execution.start_s)
            del self._executions[execution.command.dispatch_id]
        ended = {execution.command.dispatch_id for execution in executions}
        self._cut_off.update(number for number, e in self._executions.items() if e.command.after in ended)
        self._copies_end_s[rank] = now_s
        return executions, copies

    def _before(self, command: cmd.RunTask) -> Execution | None:
        """What ``command`` is queued behind and still has to wait for."""
        return None if command.after is None else self._executions.get(command.after)
