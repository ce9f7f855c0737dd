"""The transport with one safeguard removed, and a stall where it matters: the checks must see it fail.

Each mutant runs the same program, with the same stalls, as the real transport, which must pass.
"""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from gfdit.comm import CommError, CommTimeout, GroupFreeComm, SharedMemoryHeap
from gfdit.comm.agreement import EdgeAgreement, edge_digest, make_token
from gfdit.comm.heap import Call
from gfdit.comm.host_transport import TOKEN_WORDS, HostTransport, Port
from tests.comm.worlds import open_world, same_bits

ROUNDS = 12
STALL_S = 0.01


class StalledTransport(HostTransport):
    """Rank 1 is slow between seeing a token and reading the payload, every third time."""

    def _observe(self, port: Port, call: Call, num_bytes: int) -> int:
        slot = super()._observe(port, call, num_bytes)
        if self._rank == 1 and port.agreement.observed % 3 == 1:
            time.sleep(STALL_S)
        return slot


class OneSlotTransport(StalledTransport):
    """Every instance of an edge in the same slot."""

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


class ReusedTokenTransport(StalledTransport):
    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        for port in self._ports.values():
            port.agreement = OneTokenAgreement()


class NoCreditAgreement(EdgeAgreement):
    def credit_needed(self) -> int | None:
        return None


class NoCreditTransport(StalledTransport):
    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        for port in self._ports.values():
            port.agreement = NoCreditAgreement()


class TokenBeforePayloadTransport(StalledTransport):
    """The release is dropped: the token is out before the payload is."""

    def _push(self, port: Port, call: Call, num_bytes: int, begin: int, address: int) -> None:
        slot, token = port.agreement.publish(edge_digest(call.seed, call.operation, num_bytes))
        self._store(port.outbound_line + slot, token)
        time.sleep(STALL_S / 10)
        ctypes.memmove(port.outbound_slots[slot], address + begin, min(num_bytes - begin, self._slot_bytes))


class StalledHeap(SharedMemoryHeap):
    _transport_class = StalledTransport


class OneSlotHeap(SharedMemoryHeap):
    _transport_class = OneSlotTransport


class ReusedTokenHeap(SharedMemoryHeap):
    _transport_class = ReusedTokenTransport


class NoCreditHeap(SharedMemoryHeap):
    _transport_class = NoCreditTransport


class TokenBeforePayloadHeap(SharedMemoryHeap):
    _transport_class = TokenBeforePayloadTransport


def two_way_rounds(comm: GroupFreeComm) -> str:
    """What the checks say about repeated all-gathers, through groups that overlap on the same edge."""
    for step in range(ROUNDS):
        group = comm.group((0, 1) if step % 2 else (1, 0))
        out = torch.full((2, 500), -1)
        try:
            comm.all_gather_into_tensor(out, torch.full((1, 500), 100 * step + comm.rank), group)
        except CommError as error:
            return type(error).__name__
        if out.tolist() != [[100 * step + rank] * 500 for rank in group.ranks]:
            return "wrong bytes"
    return "ok"


def one_way_rounds(comm: GroupFreeComm) -> str:
    for step in range(ROUNDS):
        payload = torch.full((500,), step)
        try:
            if comm.rank == 0:
                comm.send(payload, 1)
            else:
                out = torch.full((500,), -1)
                comm.recv(out, 0)
                if not same_bits(out, payload):
                    return "wrong bytes"
        except CommError as error:
            return type(error).__name__
    return "ok"


def run_with(heap_class: type[SharedMemoryHeap], program) -> set[str]:
    with open_world(2) as world:
        world.start_all(program, heap_class=heap_class, comm_timeout_s=1.0)
        return set(world.results())


@pytest.mark.parametrize("program", [two_way_rounds, one_way_rounds])
def test_the_real_transport_survives_the_stalls(program) -> None:
    assert run_with(StalledHeap, program) == {"ok"}


@pytest.mark.parametrize(
    ("heap_class", "program"),
    [
        (OneSlotHeap, two_way_rounds),
        (OneSlotHeap, one_way_rounds),
        (ReusedTokenHeap, two_way_rounds),
        (NoCreditHeap, one_way_rounds),
        (TokenBeforePayloadHeap, two_way_rounds),
    ],
)
def test_a_safeguard_removed_is_seen_to_fail(heap_class, program) -> None:
    outcomes = run_with(heap_class, program)
    assert outcomes & {"wrong bytes", "CommMismatch", "CommTimeout"}, outcomes


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
        return "forged"
    with pytest.raises(CommTimeout) as caught:
        comm.barrier(group)
    return str(caught.value)


def test_a_replayed_token_is_not_taken_for_an_arrival() -> None:
    with open_world(2) as world:
        world.start_all(replayed_token, comm_timeout_s=1.0)
        text = world.result(0)
        assert world.result(1) == "forged"
    assert "expected token" in text and "instance 5" in text and "instance 3" in text
