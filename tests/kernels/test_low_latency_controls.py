"""Low-latency kernels with one safeguard removed, and a stall where it matters: the checks must see it fail.

Each mutant runs the same program with the same stalls as the real kernels, which must pass, in one world of two
ranks that reset their edge after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from gfdit.comm import CommError, GroupFreeComm
from tests.comm.worlds import open_world, random_bytes, same_bits, stale, wait_until
from tests.kernels.worlds import InterpretedHeap

ROUNDS = 8
STALL_S = 0.03
TIMEOUT_S = 2.0


class Patches:
    """Names in modules that the interpreter looks up at every launch."""

    def __init__(self) -> None:
        from gfdit.kernels import low_latency, low_latency_broadcast, low_latency_exchange

        self.format = low_latency
        self.users: tuple[ModuleType, ...] = (low_latency_exchange, low_latency_broadcast)
        self._old: list[tuple[Any, str, Any]] = []

    def set(self, holder: Any, name: str, value: Any) -> None:
        self._old.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def set_everywhere(self, name: str, value: Any) -> None:
        for holder in (self.format, *self.users):
            if hasattr(holder, name):
                self.set(holder, name, value)

    def undo(self) -> None:
        for holder, name, value in reversed(self._old):
            setattr(holder, name, value)
        self._old.clear()


def stalls(patches: Patches, comm: GroupFreeComm) -> None:
    """The token is out long before the pairs; rank 1 looks for pairs late, every third time."""
    announce, await_pairs = patches.format.announce, patches.format.await_pairs
    calls = iter(range(10**6))

    def slow_announce(*args: Any) -> Any:
        result = announce(*args)
        time.sleep(STALL_S)
        return result

    def slow_await(*args: Any) -> Any:
        if comm.rank == 1 and next(calls) % 3 == 1:
            time.sleep(3 * STALL_S)
        return await_pairs(*args)

    patches.set_everywhere("announce", slow_announce)
    patches.set_everywhere("await_pairs", slow_await)


def one_slot(patches: Patches, comm: GroupFreeComm) -> None:
    slot = patches.format.low_latency_slot
    patches.set(
        patches.format, "low_latency_slot", lambda lane, owner, peer, number: slot(lane, owner, peer, number * 0)
    )


def same_flag_every_time(patches: Patches, comm: GroupFreeComm) -> None:
    flags = patches.format._flags
    patches.set(patches.format, "_flags", lambda instances: flags(instances * 0 + 1))


def no_wait_for_pairs(patches: Patches, comm: GroupFreeComm) -> None:
    """The token alone is taken for the arrival."""
    load_pairs = patches.format.load_pairs
    patches.set(patches.format, "_flags", lambda instances: instances * 0)
    patches.set(patches.format, "load_pairs", lambda *args: [words & (2**32 - 1) for words in load_pairs(*args)])


def no_credit(patches: Patches, comm: GroupFreeComm) -> None:
    patches.set_everywhere("await_free", lambda *args: 1)


def gathers(comm: GroupFreeComm) -> str:
    """Repeated all-gathers, through groups that overlap on the same edge."""
    for step in range(ROUNDS):
        group = comm.group((0, 1) if step % 2 else (1, 0))
        out = torch.full((2, 100), -1)
        comm.all_gather_into_tensor(out, torch.full((1, 100), 100 * step + comm.rank), group)
        if out.tolist() != [[100 * step + rank] * 100 for rank in group.ranks]:
            return "wrong bytes"
    return "ok"


def broadcasts(comm: GroupFreeComm) -> str:
    group = comm.group((0, 1))
    for step in range(ROUNDS):
        x = random_bytes(800, step) if comm.rank == 0 else stale((800,), torch.uint8)
        comm.broadcast(x, 0, group)
        if not same_bits(x, random_bytes(800, step)):
            return "wrong bytes"
    return "ok"


Mutant = Callable[[Patches, GroupFreeComm], None]
REAL: list[tuple[Mutant | None, Callable[[GroupFreeComm], str]]] = [(None, gathers), (None, broadcasts)]
MUTANTS: list[tuple[Mutant | None, Callable[[GroupFreeComm], str]]] = [
    (one_slot, gathers),
    (one_slot, broadcasts),
    (same_flag_every_time, gathers),
    (no_wait_for_pairs, gathers),
    (no_credit, broadcasts),
]


def run_mutants(
    comm: GroupFreeComm, cases: list[tuple[Mutant | None, Callable[[GroupFreeComm], str]]]
) -> list[str]:
    outcomes = []
    for number, (mutant, program) in enumerate(cases):
        patches = Patches()
        if mutant is not None:
            mutant(patches, comm)
        stalls(patches, comm)
        try:
            outcomes.append(program(comm))
        except CommError as error:
            outcomes.append(type(error).__name__)
        patches.undo()
        meet(comm, 2 * number + 1)
        comm.reset([1 - comm.rank])
        meet(comm, 2 * number + 2)
    return outcomes


def meet(comm: GroupFreeComm, number: int) -> None:
    """Both ranks get here; says so in memory, since no edge can be trusted."""
    words = [comm._heap.scratch(rank).view(torch.int64) for rank in range(2)]
    words[comm.rank][0] = number
    assert wait_until(lambda: int(words[1 - comm.rank][0]) >= number, 60.0)


def run_two(program: Callable[..., Any], *args: Any) -> list[Any]:
    with open_world(2, low_latency_bytes=4096, scratch_bytes=64) as world:
        world.start_all(program, *args, heap_class=InterpretedHeap, comm_timeout_s=TIMEOUT_S)
        return [world.result(rank, timeout_s=200.0) for rank in range(2)]


def test_the_real_kernels_pass_and_mutants_are_seen_to_fail() -> None:
    outcomes = run_two(run_mutants, REAL + MUTANTS)
    by_case = list(zip(*outcomes, strict=True))
    assert by_case[: len(REAL)] == [("ok", "ok")] * len(REAL)
    for (mutant, program), seen in zip(MUTANTS, by_case[len(REAL) :], strict=True):
        assert set(seen) & {"wrong bytes", "CommTimeout", "CommMismatch"}, (mutant, program, seen)


def stale_flags(comm: GroupFreeComm, mutant: str) -> str:
    """After a reset instances count from 1 again, and their old words are still in the slots unless cleared."""
    group, patches = comm.group((0, 1)), Patches()
    transport = comm._transport
    if mutant == "slots not cleared":
        transport._low_latency_slots = lambda peer: torch.empty(0)
    elif mutant == "not waited for the clearing":
        patches.set_everywhere("await_free", lambda *args: 1)
    for generation in range(2):
        stalls(patches, comm)
        for step in range(2):
            out = torch.full((2, 100), -1)
            value = 100 * step + 1000 * generation + comm.rank
            try:
                comm.all_gather_into_tensor(out, torch.full((1, 100), value), group)
            except CommError as error:
                return type(error).__name__
            if out[:, 99].tolist() != [value - comm.rank, value - comm.rank + 1]:
                return "wrong bytes"
        meet(comm, 2 * generation + 1)
        # Rank 0 goes on at once, rank 1 clears its slots much later.
        time.sleep(comm.rank * 10 * STALL_S)
        comm.reset([1 - comm.rank])
    return "ok"


@pytest.mark.parametrize("mutant", ["", "slots not cleared", "not waited for the clearing"])
def test_a_reset_outdates_what_is_in_the_slots(mutant: str) -> None:
    outcomes = set(run_two(stale_flags, mutant))
    if mutant:
        assert outcomes & {"wrong bytes", "CommTimeout", "CommMismatch"}, outcomes
    else:
        assert outcomes == {"ok"}


def failures(comm: GroupFreeComm) -> list[str]:
    """A peer that sends another size, another operation, or nothing; each ends in the error that says so."""
    group, texts = comm.group((0, 1)), []
    x, out = torch.zeros(8), torch.empty(16)

    def late() -> None:
        if comm.rank == 0:
            comm.all_gather_into_tensor(out, x, group)

    cases: list[Callable[[], None]] = [
        lambda: comm.all_gather_into_tensor(out[: 8 - 4 * comm.rank], x[: 4 - 2 * comm.rank], group),
        lambda: comm.barrier(group) if comm.rank else comm.all_reduce(x, group),
        lambda: comm.broadcast(x, comm.rank, group),
        late,
    ]
    for number, case in enumerate(cases):
        try:
            case()
            texts.append("ok")
        except CommError as error:
            texts.append(f"{type(error).__name__}: {error}")
        meet(comm, 2 * number + 1)
        comm.reset([1 - comm.rank])
        comm.all_gather_into_tensor(out, torch.full((8,), float(comm.rank)), group)
        assert out.tolist() == [0.0] * 8 + [1.0] * 8
    return texts


def test_what_does_not_agree_ends_in_an_error_and_a_reset_mends_it() -> None:
    for rank, texts in enumerate(run_two(failures)):
        assert texts[0].startswith("CommMismatch") and "all_gather" in texts[0], texts
        assert texts[1].startswith("CommMismatch") and ("barrier" if rank else "all_reduce") in texts[1], texts
        # Both sent one message that was accepted without the receiver.
        assert texts[2] == "ok", texts
        assert texts[3] == "ok" if rank else texts[3].startswith("CommTimeout"), texts
