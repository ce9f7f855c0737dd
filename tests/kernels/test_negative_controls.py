"""Kernels with one safeguard removed, and a stall where it matters: the checks must see them fail.

The interpreter looks device functions up when it calls them, so a mutant is a module with another function in
it, in a rank process. Each mutant runs the same programs as the real kernels, which must pass before and after.
Memory order itself cannot be taken away here: this machine orders stores more strictly than a GPU does, so the
release is dropped by storing the token first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gfdit.comm import CommError, GroupFreeComm
from gfdit.comm.choice import Choice
from gfdit.comm.choice import Path as CommPath
from tests.comm.test_negative_controls import one_way_rounds, two_way_rounds
from tests.comm.worlds import open_world, random_bytes, same_bits, stale, wait_until
from tests.kernels.worlds import InterpretedHeap

# How long a slow rank is slow: the longer, the surer a mutant is caught on a busy machine.
STALLS_S = (0.02, 0.1, 0.5)
FAILURES = {"wrong bytes", "CommMismatch", "CommTimeout"}


class Mutation:
    """Replaces device functions of the kernels that ``two_way_rounds`` and ``one_way_rounds`` launch."""

    def __init__(self, comm: GroupFreeComm, stall_s: float) -> None:
        from gfdit.kernels import instances, push_exchange, recv, send

        self.comm, self.stall_s = comm, stall_s
        self.instances, self.push_exchange, self.recv, self.send = instances, push_exchange, recv, send
        self.undo = ExitStack()

    def replace(self, name: str, make: Callable[[Any], Callable[..., Any]], *modules: Any) -> None:
        """``make(original)`` in place of the function ``name``, in each module that knows it by that name."""
        for module in modules:
            replacement = make(getattr(module, name))
            self.undo.enter_context(patch.object(module, name, replacement))

    def stall(self) -> None:
        """Rank 1 is slow between seeing a token and reading the payload, every third time."""
        num_seen = 0

        def stalled(observe: Any) -> Callable[..., Any]:
            def slow(*args: Any) -> Any:
                nonlocal num_seen
                result = observe(*args)
                num_seen += 1
                if self.comm.rank == 1 and num_seen % 3 == 1:
                    time.sleep(self.stall_s)
                return result

            return slow

        self.replace("observe", stalled, self.push_exchange, self.recv)

    def one_slot(self) -> None:
        """Every payload of an edge in the same place."""

        def first_slot(data_slot: Any) -> Callable[..., Any]:
            return lambda lane, owner, peer, slot: data_slot(lane, owner, peer, slot * 0)

        self.replace("data_slot", first_slot, self.push_exchange, self.send, self.recv)

    def one_slot_for_tokens(self) -> None:
        self.replace("signal", lambda real: lambda line, slot, chunk: real(line, slot * 0, chunk), self.instances)

    def reused_token(self) -> None:
        """The token does not say which instance it belongs to."""
        self.replace(
            "make_token",
            lambda real: lambda digest, generation, instance: real(digest, generation, instance * 0 + 1),
            self.instances,
        )

    def missing_wait(self) -> None:
        import triton.language as tl

        self.replace("observe", lambda real: lambda *args: tl.full((), 1, tl.int32), self.push_exchange, self.recv)

    def missing_credit(self) -> None:
        import triton.language as tl

        for name in ("await_credit", "await_words"):
            self.replace(name, lambda real: lambda *args, **flags: tl.full((), 1, tl.int1), self.send)

    def missing_channel_credit(self) -> None:
        """The edge's credit is awaited, that of a round inside a message is not."""
        import triton.language as tl

        self.replace("await_words", lambda real: lambda *args, **flags: tl.full((), 1, tl.int1), self.send)

    def early_channel_credit(self) -> None:
        """One instance less than needed has to be consumed."""
        self.replace(
            "make_token",
            lambda real: lambda digest, generation, instance: real(digest, generation, instance - 1),
            self.send,
        )

    def token_before_payload(self) -> None:
        """What goes into a peer's slot is put there after the token."""
        heap: Any = self.comm._heap
        size = heap.layout.segment_bytes * heap.world_size
        late: list[tuple[Any, ...]] = []

        def deferred(copy: Any) -> Callable[..., Any]:
            def copy_later(target: Any, *args: Any) -> None:
                is_slot = 0 <= int(target.handle.data.item()) - heap._address < size
                late.append((copy, target, *args)) if is_slot else copy(target, *args)

            return copy_later

        def too_early(publish: Any) -> Callable[..., Any]:
            def publish_first(*args: Any) -> None:
                publish(*args)
                time.sleep(self.stall_s / 2)
                while late:
                    copy, *copied = late.pop(0)
                    copy(*copied)

            return publish_first

        self.replace("copy_bytes", deferred, self.push_exchange, self.send)
        self.replace("publish", too_early, self.push_exchange, self.send)


def long_messages(comm: GroupFreeComm) -> str:
    """Messages of five rounds."""
    for step in range(4):
        payload = random_bytes(4 * 4096 + 17, step)
        out = payload if comm.rank == 0 else stale((len(payload),), torch.uint8)
        try:
            comm.broadcast(out, 0, comm.group((0, 1)))
        except CommError as error:
            return type(error).__name__
        if not same_bits(out, payload):
            return "wrong bytes"
    return "ok"


REAL = tuple(("none", program) for program in (two_way_rounds, one_way_rounds, long_messages))
MUTANTS: tuple[tuple[str, Callable[[GroupFreeComm], str]], ...] = (
    ("one_slot", two_way_rounds),
    ("one_slot", one_way_rounds),
    ("one_slot_for_tokens", two_way_rounds),
    ("reused_token", two_way_rounds),
    ("missing_wait", two_way_rounds),
    ("missing_wait", one_way_rounds),
    ("missing_credit", one_way_rounds),
    ("missing_credit", long_messages),
    ("missing_channel_credit", long_messages),
    ("early_channel_credit", long_messages),
    ("token_before_payload", two_way_rounds),
    ("token_before_payload", one_way_rounds),
)


def run_mutant(comm: GroupFreeComm, directory: Path, trial: int, name: str, program: Any) -> set[str]:
    """What the checks of both ranks say: with longer stalls if nothing was wrong with shorter ones."""
    seen = {"ok"}
    for number, stall_s in enumerate(STALLS_S):
        mutation = Mutation(comm, stall_s)
        if name != "token_before_payload":  # a slow reader would hide it
            mutation.stall()
        if name != "none":
            getattr(mutation, name)()
        with mutation.undo:
            outcome = program(comm)
        if outcome != "ok":
            comm.abort((0, 1))  # the other need not wait for its timeout
        seen = {outcome, tell(directory / f"{trial}.{number}", comm.rank, outcome)}
        comm.reset((0, 1))
        if name == "none" or seen & FAILURES:
            break
    return seen


def tell(path: Path, rank: int, outcome: str) -> str:
    """Exchange outcomes by files, since the collectives may be what is broken; then both ranks are here."""
    unfinished, mine, theirs = (Path(f"{path}.{suffix}") for suffix in (f"{rank}.new", rank, 1 - rank))
    unfinished.write_text(outcome)
    unfinished.rename(mine)
    assert wait_until(theirs.exists, 60)
    return theirs.read_text()


def run_mutants(comm: GroupFreeComm, directory: str) -> list[set[str]]:
    """The outcomes of all mutants, those of the real kernels first and last."""
    # The interpreter runs the programs of a launch in turn: a second one would keep the peers in step.
    comm._transport.selector.choose = lambda situation: Choice(CommPath.PUSH, 2048, num_programs=1)
    trials = (*REAL, *MUTANTS, *REAL)
    return [run_mutant(comm, Path(directory), trial, *which) for trial, which in enumerate(trials)]


def test_every_mutant_is_seen_to_fail_and_the_real_kernels_are_not(tmp_path: Path) -> None:
    with open_world(2) as world:
        world.start_all(run_mutants, str(tmp_path), heap_class=InterpretedHeap, comm_timeout_s=2.0)
        outcomes, same = (world.result(rank, timeout_s=250) for rank in (0, 1))
    assert outcomes == same
    assert outcomes[:3] == outcomes[-3:] == [{"ok"}] * 3, outcomes
    for (name, program), seen in zip(MUTANTS, outcomes[3:-3], strict=True):
        assert seen & FAILURES, (name, program.__name__, seen)
