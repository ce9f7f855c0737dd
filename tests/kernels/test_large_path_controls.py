"""Paths for large messages with one safeguard removed, and a slow rank: the checks must see them fail.

As in ``test_negative_controls``: a mutant is a module with another function in it, in a rank process, and the real
kernels run the same programs with the same stalls before and after.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from gfdit.comm import CommError, GroupFreeComm
from gfdit.comm.choice import Path
from tests.comm.worlds import open_world
from tests.kernels.test_large_paths import SIZES, force
from tests.kernels.test_negative_controls import FAILURES, STALLS_S, tell
from tests.kernels.worlds import InterpretedHeap

NUM_STEPS = 4
NUM_BYTES = 2512  # a multiple of 16, for tiles; not of 1024, so there is a rest


def gathers(comm: GroupFreeComm, path: Path) -> str:
    """Repeated all-gathers of one tensor, which is overwritten as soon as an operation has returned."""
    force(comm, path)
    x = comm.empty((NUM_BYTES,), torch.uint8) if path is Path.DIRECT_PULL else torch.empty(NUM_BYTES).byte()
    shape = (2, NUM_BYTES)
    out = comm.empty(shape, torch.uint8) if path is Path.DIRECT_PUSH else torch.empty(shape, dtype=torch.uint8)
    for step in range(NUM_STEPS):
        group = comm.group((0, 1) if step % 2 else (1, 0))
        try:
            comm.all_gather_into_tensor(out.fill_(255), x.fill_(10 * step + comm.rank), group)
        except CommError as error:
            return type(error).__name__
        if out.tolist() != [[10 * step + rank] * NUM_BYTES for rank in group.ranks]:
            return "wrong bytes"
    return "ok"


def broadcasts(comm: GroupFreeComm, path: Path) -> str:
    force(comm, path)
    for step in range(NUM_STEPS):
        x = torch.full((NUM_BYTES,), step if comm.rank == 0 else 255, dtype=torch.uint8)
        try:
            comm.broadcast(x, 0, comm.group((0, 1)))
        except CommError as error:
            return type(error).__name__
        if x.tolist() != [step] * NUM_BYTES:
            return "wrong bytes"
    return "ok"


class Mutation:
    """Replaces functions of the modules that carry out large messages."""

    def __init__(self, comm: GroupFreeComm) -> None:
        from gfdit.comm import copy_engine
        from gfdit.kernels import multicast_all_gather, multicast_broadcast, pull_exchange, tma_copy

        self.rank = comm.rank
        self.copy_engine, self.pull, self.tma_copy = copy_engine, pull_exchange, tma_copy
        self.all_gather, self.broadcast = multicast_all_gather, multicast_broadcast
        self.undo = ExitStack()

    def replace(self, name: str, replacement: Any, module: Any) -> None:
        self.undo.enter_context(patch.object(module, name, replacement))

    def stall(self, stall_s: float) -> None:
        """Rank 1 is slow before it copies."""

        def slow(real: Any) -> Callable[..., Any]:
            def copy(*args: Any) -> Any:
                time.sleep(stall_s)
                return real(*args)

            return copy

        places = (
            (self.copy_engine, "_copy"),
            (self.pull, "copy_bytes"),
            (self.pull, "_copy_remote"),
            (self.all_gather, "copy_bytes"),
            (self.broadcast, "copy_bytes"),
        )
        for module, name in places if self.rank == 1 else ():
            self.replace(name, slow(getattr(module, name)), module)

    def no_closing(self) -> None:
        """A rank does not wait until its peers have taken what it let them read."""
        for module in (self.pull, self.all_gather):
            self.replace("observe", every_other(module.observe, instead=1), module)
        run = every_other(self.copy_engine.barrier.run, instead=None)
        self.replace("barrier", SimpleNamespace(run=run), self.copy_engine)
        if self.rank == 0:  # the source
            self.replace("observe", lambda *args: 1, self.broadcast)

    def wrong_parity(self) -> None:
        """The reader takes the offset of another instance."""
        real = self.pull._offset_word
        self.replace(
            "_offset_word", lambda line, slot: real(line, slot if len(line.shape) else 1 - slot), self.pull
        )

    def token_before_payload(self) -> None:
        """What goes straight into a peer's target is put there after the token that says so."""
        late: list[tuple[Any, ...]] = []
        copy, publish = self.pull._copy_remote, self.pull.publish

        def publish_first(*args: Any) -> None:
            publish(*args)
            time.sleep(0.1 if late else 0)
            while late:
                copy(*late.pop())

        self.replace("_copy_remote", lambda *args: late.append(args), self.pull)
        self.replace("publish", publish_first, self.pull)

    def no_rest(self) -> None:
        """Only whole tiles are copied."""
        self.replace("copy_bytes", lambda *args: None, self.tma_copy)


def every_other(real: Any, instead: Any) -> Callable[..., Any]:
    """Every second call does nothing."""
    num_calls = 0

    def call(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return real(*args) if num_calls % 2 else instead

    return call


REAL = (
    ("none", gathers, Path.PULL),
    ("none", gathers, Path.DIRECT_PULL),
    ("none", gathers, Path.DIRECT_PUSH),
    ("none", gathers, Path.COPY_ENGINE),
    ("none", gathers, Path.TMA),
    ("none", gathers, Path.MULTICAST),
    ("none", broadcasts, Path.MULTICAST),
)
MUTANTS = (
    ("no_closing", gathers, Path.PULL),
    ("no_closing", gathers, Path.DIRECT_PULL),
    ("no_closing", gathers, Path.DIRECT_PUSH),
    ("no_closing", gathers, Path.COPY_ENGINE),
    ("no_closing", gathers, Path.MULTICAST),
    ("no_closing", broadcasts, Path.MULTICAST),
    ("wrong_parity", gathers, Path.PULL),
    ("wrong_parity", gathers, Path.DIRECT_PULL),
    ("token_before_payload", gathers, Path.DIRECT_PUSH),
    ("no_rest", gathers, Path.TMA),
)


def run_mutant(
    comm: GroupFreeComm, directory: FilePath, trial: int, name: str, program: Any, path: Path
) -> set[str]:
    """What the checks of both ranks say: with longer stalls if nothing was wrong with shorter ones."""
    seen = {"ok"}
    for number, stall_s in enumerate(STALLS_S):
        mutation = Mutation(comm)
        mutation.stall(stall_s)
        if name != "none":
            getattr(mutation, name)()
        with mutation.undo:
            outcome = program(comm, path)
        if outcome != "ok":
            comm.abort((0, 1))  # the other need not wait for its timeout
        seen = {outcome, tell(directory / f"{trial}.{number}", comm.rank, outcome)}
        comm.reset((0, 1))
        if name == "none" or seen & FAILURES:
            break
    return seen


def run_mutants(comm: GroupFreeComm, directory: str) -> list[set[str]]:
    trials = (*REAL, *MUTANTS, *REAL)
    return [run_mutant(comm, FilePath(directory), trial, *which) for trial, which in enumerate(trials)]


def test_every_mutant_is_seen_to_fail_and_the_real_paths_are_not(tmp_path: FilePath) -> None:
    with open_world(2, **SIZES) as world:
        world.start_all(run_mutants, str(tmp_path), heap_class=InterpretedHeap, comm_timeout_s=2.0)
        outcomes, same = (world.result(rank, timeout_s=250) for rank in (0, 1))
    assert outcomes == same
    real = len(REAL)
    assert outcomes[:real] == outcomes[-real:] == [{"ok"}] * real, outcomes
    for (name, program, path), seen in zip(MUTANTS, outcomes[real:-real], strict=True):
        assert seen & FAILURES, (name, program.__name__, path, seen)


def alone_then_together(comm: GroupFreeComm, directory: str) -> list[tuple[str, str]]:
    """Rank 0 begins without rank 1, fails, and both go on after a reset: by every path."""
    from gfdit.kernels.edges import LANE_TIMEOUT_NS

    outcomes = []
    for trial, (_, program, path) in enumerate(REAL):
        timeout_ns = comm._transport._state.constants[LANE_TIMEOUT_NS.value :]
        first, patient_ns = "absent", int(timeout_ns[0])
        if comm.rank == 0:
            timeout_ns[0] = 200_000_000
            first = program(comm, path)
            timeout_ns[0] = patient_ns
        tell(FilePath(directory) / str(trial), comm.rank, first)
        comm.reset((0, 1))
        outcomes.append((first, program(comm, path)))
    return outcomes


def test_a_missing_peer_is_a_timeout_which_a_reset_mends(tmp_path: FilePath) -> None:
    with open_world(2, **SIZES) as world:
        world.start_all(alone_then_together, str(tmp_path), heap_class=InterpretedHeap, comm_timeout_s=60.0)
        first, second = (world.result(rank, timeout_s=250) for rank in (0, 1))
    assert first == [("CommTimeout", "ok")] * len(REAL)
    assert second == [("absent", "ok")] * len(REAL)
