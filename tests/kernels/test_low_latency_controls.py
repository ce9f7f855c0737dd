"""Low-latency kernels with one safeguard removed, and a stall where it matters: the checks must see it fail.

Each mutant runs the same program with the same stalls as the real kernels, which must pass, in one world of two
ranks that reset their edge after each.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from gfdit.comm import CommError, GroupFreeComm
from tests.comm.worlds import open_world, random_bytes, same_bits, stale, wait_until
from tests.kernels.worlds import InterpretedHeap

ROUNDS = 8
# How long a rank is held up for what a mutant lets happen and the real kernels do not.
STALL_S = 1.0
# The real kernels must not fail on a busy machine; that mutants do is the point.
TIMEOUT_S, MUTANT_TIMEOUT_S = 20.0, 2.0

# Words of a rank's scratch memory.
MET, STORED, TAKEN = range(3)


class Patches:
    """Names in modules, which the interpreter looks up at every launch."""

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


class Stalls:
    """Holds ranks up where it matters: what they have done so far is in shared memory.

    Rank 0 waits between its token and its pairs until rank 1 has finished the instance, which it must not. Rank 1
    waits before it looks at pairs until rank 0 has stored ``lead`` instances more: 1 is allowed, 2 are not if the
    instances are one-way.
    """

    def __init__(self, patches: Patches, comm: GroupFreeComm, lead: int) -> None:
        exchange, broadcast = patches.users
        self._rank, self._lead = comm.rank, lead
        self._words = [comm._heap.scratch(rank).view(torch.int64) for rank in range(2)]
        self._words[comm.rank][STORED] = self._words[comm.rank][TAKEN] = 0
        self._num_announced = self._num_awaited = 0
        for user in patches.users:
            patches.set(user, "announce", self._announce(user.announce))
        patches.set(exchange, "await_pairs", self._await_pairs(exchange.await_pairs, stored=1))
        patches.set(broadcast, "await_pairs", self._await_pairs(broadcast.await_pairs, stored=0))
        patches.set(broadcast, "finish", self._finish(broadcast.finish))

    def _announce(self, announce: Any) -> Any:
        def slow(*args: Any) -> Any:
            result = announce(*args)
            self._num_announced += 1
            if self._rank == 0 and self._num_announced % 4 == 3:
                wait_until(lambda: int(self._words[1][TAKEN]) >= self._num_announced, STALL_S)
            return result

        return slow

    def _await_pairs(self, await_pairs: Any, stored: int) -> Any:
        def slow(*args: Any) -> Any:
            self._words[self._rank][STORED] += stored
            self._num_awaited += 1
            wanted = self._num_awaited + self._lead
            if self._rank == 1 and self._num_awaited % 3 == 1 and wanted <= ROUNDS:
                wait_until(lambda: int(self._words[0][STORED]) >= wanted, STALL_S)
            result = await_pairs(*args)
            self._words[self._rank][TAKEN] += 1
            return result

        return slow

    def _finish(self, finish: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> None:
            finish(*args, **kwargs)
            self._words[self._rank][STORED] += 1 - self._rank

        return counted


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
Program = Callable[[GroupFreeComm], str]
# What is removed, from what, and how far rank 0 is given time to get ahead.
REAL: list[tuple[Mutant | None, Program, int]] = [(None, gathers, 1), (None, broadcasts, 2)]
MUTANTS: list[tuple[Mutant | None, Program, int]] = [
    (one_slot, gathers, 1),
    (one_slot, broadcasts, 1),
    (same_flag_every_time, gathers, 1),
    (no_wait_for_pairs, gathers, 1),
    (no_credit, broadcasts, 2),
]


def run_mutants(comm: GroupFreeComm, cases: list[tuple[Mutant | None, Program, int]]) -> list[str]:
    from gfdit.kernels.edges import LANE_TIMEOUT_NS

    outcomes = []
    for number, (mutant, program, lead) in enumerate(cases):
        patches = Patches()
        if mutant is not None:
            mutant(patches, comm)
        comm._transport._state.constants[LANE_TIMEOUT_NS.value] = int(
            1e9 * (MUTANT_TIMEOUT_S if mutant else TIMEOUT_S)
        )
        Stalls(patches, comm, lead)
        meet(comm, 3 * number + 1)
        try:
            outcomes.append(program(comm))
        except CommError as error:
            outcomes.append(type(error).__name__)
        patches.undo()
        meet(comm, 3 * number + 2)
        comm.reset([1 - comm.rank])
        meet(comm, 3 * number + 3)
    return outcomes


def meet(comm: GroupFreeComm, number: int) -> None:
    """Both ranks get here; says so in memory, since no edge can be trusted."""
    words = [comm._heap.scratch(rank).view(torch.int64) for rank in range(2)]
    words[comm.rank][MET] = number
    assert wait_until(lambda: int(words[1 - comm.rank][MET]) >= number, 60.0)


def run_two(program: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    with open_world(2, low_latency_bytes=4096, scratch_bytes=64) as world:
        world.start_all(program, *args, heap_class=InterpretedHeap, comm_timeout_s=timeout_s)
        return [world.result(rank, timeout_s=200.0) for rank in range(2)]


def test_the_real_kernels_pass_and_mutants_are_seen_to_fail() -> None:
    outcomes = run_two(run_mutants, REAL + MUTANTS)
    by_case = list(zip(*outcomes, strict=True))
    assert by_case[: len(REAL)] == [("ok", "ok")] * len(REAL)
    for (mutant, program, _), seen in zip(MUTANTS, by_case[len(REAL) :], strict=True):
        assert set(seen) & {"wrong bytes", "CommTimeout", "CommMismatch"}, (mutant, program, seen)


def stale_flags(comm: GroupFreeComm, mutant: str) -> str:
    """After a reset instances count from 1 again, and their old words are still in the slots unless cleared."""
    group, patches = comm.group((0, 1)), Patches()
    transport = comm._transport
    stored = comm._heap.scratch(0).view(torch.int64)[STORED : STORED + 1]
    if mutant == "slots not cleared":
        transport._low_latency_slots = lambda peer: torch.empty(0)
    elif mutant == "not waited for the clearing":
        patches.set_everywhere("await_free", lambda *args: 1)
    Stalls(patches, comm, lead=1)
    for generation in range(2):
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
        if comm.rank == 1:
            # Rank 0 goes on at once; its peer clears the slots late, after the next pairs if they come.
            bound_s = 20.0 if "clearing" in mutant else STALL_S
            wait_until(lambda: int(stored[0]) >= 3, bound_s)
        comm.reset([1 - comm.rank])
    return "ok"


@pytest.mark.parametrize("mutant", ["", "slots not cleared", "not waited for the clearing"])
def test_a_reset_outdates_what_is_in_the_slots(mutant: str) -> None:
    outcomes = set(run_two(stale_flags, mutant, timeout_s=MUTANT_TIMEOUT_S if mutant else TIMEOUT_S))
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
    for rank, texts in enumerate(run_two(failures, timeout_s=4.0)):
        assert texts[0].startswith("CommMismatch") and "all_gather" in texts[0], texts
        assert texts[1].startswith("CommMismatch") and ("barrier" if rank else "all_reduce") in texts[1], texts
        # Both sent one message that was accepted without the receiver.
        assert texts[2] == "ok", texts
        assert texts[3] == "ok" if rank else texts[3].startswith("CommTimeout"), texts
