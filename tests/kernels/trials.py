"""Trials of interpreted kernels between two ranks: the real ones, and mutants with one safeguard removed.

The interpreter looks device functions up when it calls them, so a mutant is a module with another function in
it, in a rank process. In every trial one rank is held up where it matters, until the other one can do no more
by itself (``tests.comm.handover``): what a mutant lets happen then happens, however slow the machine is, and
what the real kernels let happen does no harm. Time limits are of minutes; a wait for what never comes ends in
CommTimeout as soon as both ranks look in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

from gfdit.comm import CommError, GroupFreeComm
from gfdit.comm.choice import Choice
from tests.comm.handover import Handover
from tests.comm.worlds import open_world
from tests.kernels.worlds import InterpretedHeap

# What the checks of a program or the kernels say of a mutant.
FAILURES = {"wrong bytes", "CommMismatch", "CommTimeout"}


class HandoverHeap(InterpretedHeap):
    """Its interpreted waits count their looks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handover = Handover(self, 1 - self.rank)


class Edits:
    """Functions of a rank process that are replaced until the end of a trial."""

    def __init__(self, comm: GroupFreeComm) -> None:
        self.comm = comm
        self.handover: Handover = comm._heap.handover
        self.undo = ExitStack()

    def replace(self, name: str, make: Callable[[Any], Any], *modules: str) -> None:
        """``make(original)`` in place of ``name``, in each of gfdit's modules that know it by that name."""
        for module in map(import_module, modules):
            self.undo.enter_context(patch.object(module, name, make(getattr(module, name))))

    def hold_up(self, rank: int, name: str, *modules: str, after: bool = False) -> None:
        """``rank`` lets the other one go on before each call of ``name``, or after it."""

        def slow(real: Any) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if after:
                    result = real(*args)
                    self.handover.let_the_other_go_on()
                    return result
                self.handover.let_the_other_go_on()
                return real(*args)

            return call

        if self.comm.rank == rank:
            self.replace(name, slow, *modules)


Change = Callable[[Edits], None]


def real(edits: Edits) -> None:
    """Nothing is removed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """``program`` says "ok" or what is wrong; ``slow`` holds a rank up; ``mutant`` removes a safeguard.

    ``choice`` says how all operations are carried out; by the selector's rules without it.
    """

    program: Callable[[GroupFreeComm], str]
    slow: Change
    mutant: Change = real
    choice: Choice | None = None


def run_trials(comm: GroupFreeComm, trials: Sequence[Trial]) -> list[str]:
    """What this rank's program says, or the error it ends with, of each trial."""
    heap: Any = comm._heap
    handover: Handover = heap.handover
    count_looks(handover)
    outcomes = []
    for trial in trials:
        edits = Edits(comm)
        trial.slow(edits)
        trial.mutant(edits)
        handover.begin()
        with edits.undo, comm._transport.selector.forced(trial.choice):
            try:
                outcome = trial.program(comm)
            except CommError as error:
                outcome = type(error).__name__
        if outcome != "ok":
            comm.abort((0, 1))  # the other one need not wait
        handover.end()
        outcomes.append(outcome)
        handover.meet()
        comm.reset((0, 1))
        clear(heap)
    return outcomes


def count_looks(handover: Handover) -> None:
    """From now on a wait looks around, and tells, at every poll."""
    import triton.language as tl

    from gfdit.kernels import edges, low_latency

    look_around, late = edges.look_around, edges.LATE.value

    def look(opened: Any, deadline: Any) -> Any:
        # A deadline is made once for each wait.
        states = look_around(opened, deadline)
        return tl.maximum(states, late) if handover.look(wait=deadline) else states

    for module in (edges, low_latency):
        module.look_around = look
    edges.LOOK_AROUND = low_latency.LOOK_AROUND = tl.constexpr(1)


def clear(heap: HandoverHeap) -> None:
    """What a trial left in this rank's memory must not pass for what the next one was to deliver."""
    layout = heap.layout
    heap.segment(heap.rank)[layout.slots_offset(0) : layout.scratch_offset].zero_()


def check_trials(trials: Sequence[Trial], **sizes: int) -> None:
    """In one world: every mutant is seen to fail by a rank at least, and the real kernels by none."""
    with open_world(2, **sizes) as world:
        world.start_all(run_trials, trials, heap_class=HandoverHeap)
        by_rank = world.results()
    assert all(isinstance(outcomes, list) for outcomes in by_rank), by_rank
    for trial, outcomes in zip(trials, zip(*by_rank, strict=True), strict=True):
        if trial.mutant is real:
            assert set(outcomes) == {"ok"}, (trial, outcomes)
        else:
            assert set(outcomes) & FAILURES, (trial, outcomes)
