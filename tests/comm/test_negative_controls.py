"""The transport with one safeguard removed: the checks must see it fail, every time.

In each program one rank is held up at each of its steps where the safeguard matters, until the other one has done
what it is let do (``tests.comm.handover``). So a mutant fails at the first step at which it can, however the two
processes are scheduled. The real transport runs the same programs with the same rank held up, and passes.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from gfdit.comm import CommError, CommTimeout, GroupFreeComm, SharedMemoryHeap
from gfdit.comm.agreement import EdgeAgreement, edge_digest, make_token
from gfdit.comm.heap import Call
from gfdit.comm.host_transport import TOKEN_WORDS, HostTransport, Port
from tests.comm.handover import LookingHeap
from tests.comm.worlds import open_world, same_bits, set_timeout

ROUNDS = 6


class SlowReader(HostTransport):
    """Rank 1 is held up between seeing a token and reading the payload: rank 0 gets as far ahead as it is let."""

    def _observe(self, port: Port, call: Call, num_bytes: int) -> int:
        slot = super()._observe(port, call, num_bytes)
        if self._rank == 1:
            self._waiter.handover.let_the_other_go_on()
        return slot


class SlowWriter(HostTransport):
    """Rank 0 is held up between storing a payload and its token: rank 1 reads ahead as far as it is let."""

    def _store(self, word: int, value: int) -> None:
        self._hold_up()
        super()._store(word, value)

    def _hold_up(self) -> None:
        if self._rank == 0:
            self._waiter.handover.let_the_other_go_on()


class OneSlot(SlowReader):
    """Every instance of an edge in the same slot. Rank 0 may be one ahead, which overwrites the payload."""

    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        for port in self._ports.values():
            port.agreement = EdgeAgreement(num_slots=1)


class OneTokenAgreement(EdgeAgreement):
    """The token does not say which instance it belongs to."""

    def publish(self, digest: int) -> tuple[int, int]:
        return super().publish(digest)[0], make_token(digest, 0, 1)

    def expect(self, digest: int) -> tuple[int, int]:
        return super().expect(digest)[0], make_token(digest, 0, 1)


class ReusedToken(SlowWriter):
    """Rank 1 takes the token of the last but one instance for that of the next, which is still to come."""

    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        for port in self._ports.values():
            port.agreement = OneTokenAgreement()


class NoCreditAgreement(EdgeAgreement):
    def credit_needed(self) -> int | None:
        return None


class NoCredit(SlowReader):
    """Rank 0 sends everything there is before rank 1 reads the first payload."""

    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        for port in self._ports.values():
            port.agreement = NoCreditAgreement()


class TokenBeforePayload(SlowWriter):
    """The release is dropped: the token is out before the payload is, and rank 0 is held up in between."""

    def _push(self, port: Port, call: Call, num_bytes: int, begin: int, address: int) -> None:
        slot, token = port.agreement.publish(edge_digest(call.seed, call.operation, num_bytes))
        HostTransport._store(self, port.outbound_line + TOKEN_WORDS[slot], token)
        self._hold_up()
        ctypes.memmove(port.outbound_slots[slot], address + begin, min(num_bytes - begin, self._slot_bytes))


class SlowReaderHeap(LookingHeap):
    _transport_class = SlowReader


class SlowWriterHeap(LookingHeap):
    _transport_class = SlowWriter


class OneSlotHeap(LookingHeap):
    _transport_class = OneSlot


class ReusedTokenHeap(LookingHeap):
    _transport_class = ReusedToken


class NoCreditHeap(LookingHeap):
    _transport_class = NoCredit


class TokenBeforePayloadHeap(LookingHeap):
    _transport_class = TokenBeforePayload


def two_way_rounds(comm: GroupFreeComm) -> str:
    """What the checks say about repeated all-gathers, through groups that overlap on the same edge."""
    for step in range(1, ROUNDS + 1):
        group = comm.group((0, 1) if step % 2 else (1, 0))
        out = torch.full((2, 500), -1)
        comm.all_gather_into_tensor(out, torch.full((1, 500), 100 * step + comm.rank), group)
        if out.tolist() != [[100 * step + rank] * 500 for rank in group.ranks]:
            return "wrong bytes"
    return "ok"


def one_way_rounds(comm: GroupFreeComm) -> str:
    for step in range(1, ROUNDS + 1):
        payload = torch.full((500,), step)
        if comm.rank == 0:
            comm.send(payload, 1)
        else:
            out = torch.full((500,), -1)
            comm.recv(out, 0)
            if not same_bits(out, payload):
                return "wrong bytes"
    return "ok"


def judged(comm: GroupFreeComm, program) -> str:
    """What ``program`` says, or the error it ends with; the other rank is not left waiting then."""
    try:
        outcome = program(comm)
    except CommError as error:
        outcome = type(error).__name__
    if outcome != "ok":
        comm.abort((0, 1))
    comm._heap.handover.end()
    return outcome


def run_with(heap_class: type[SharedMemoryHeap], program) -> list[str]:
    with open_world(2, scratch_bytes=4096) as world:
        world.start_all(judged, program, heap_class=heap_class)
        return world.results()


@pytest.mark.parametrize("heap_class", [SlowReaderHeap, SlowWriterHeap])
@pytest.mark.parametrize("program", [two_way_rounds, one_way_rounds])
def test_the_real_transport_survives_a_slow_rank(heap_class, program) -> None:
    assert run_with(heap_class, program) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("heap_class", "program"),
    [
        (OneSlotHeap, two_way_rounds),
        (OneSlotHeap, one_way_rounds),
        (ReusedTokenHeap, two_way_rounds),
        (ReusedTokenHeap, one_way_rounds),
        (NoCreditHeap, one_way_rounds),
        (TokenBeforePayloadHeap, two_way_rounds),
        (TokenBeforePayloadHeap, one_way_rounds),
    ],
)
def test_a_safeguard_removed_is_seen_to_fail(heap_class, program) -> None:
    """Rank 1 reads the token or the payload of another instance. No time limit has a part in it."""
    outcomes = run_with(heap_class, program)
    assert outcomes[1] in ("wrong bytes", "CommMismatch"), outcomes


def replayed_token(comm: GroupFreeComm) -> str:
    """Rank 1 forges: it writes the token of an earlier instance again instead of taking part."""
    group = comm.group((0, 1))
    for _ in range(4):
        comm.barrier(group)
    if comm.rank == 1:
        port = comm._transport._ports[0]
        word = port.outbound_line + TOKEN_WORDS[port.agreement.published % 2]
        old = comm._heap._words[word]
        assert old != 0
        comm._transport._store(word, old)
        comm.lane("migration").barrier(group)
        return "forged"
    comm.lane("migration").barrier(group)  # it is there before this rank looks
    set_timeout(comm, 0.3)
    with pytest.raises(CommTimeout) as caught:
        comm.barrier(group)
    return str(caught.value)


def test_a_replayed_token_is_not_taken_for_an_arrival() -> None:
    with open_world(2) as world:
        world.start_all(replayed_token)
        text = world.result(0)
        assert world.result(1) == "forged"
    assert "expected token" in text and "instance 5" in text and "instance 3" in text
