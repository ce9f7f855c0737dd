"""Send, recv and broadcast of any size by kernels, interpreted in rank processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch

from gfdit.comm import CommError, GroupFreeComm
from gfdit.comm.agreement import EdgeAgreement
from gfdit.comm.choice import Choice, Path
from tests.comm.soak import perform
from tests.comm.worlds import open_world, random_bytes, same_bits, stale
from tests.kernels.worlds import InterpretedHeap

SLOT_BYTES, CHUNK_BYTES = 1024, 256
# Within a slot and beyond; with whole, broken and missing chunks; up to eight rounds.
SIZES = (0, 1, 37, 256, 257, 1024, 1025, 2048, 5000, 8192)


def run_all(world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    with open_world(world_size, **options) as world:
        world.start_all(fn, *args, heap_class=InterpretedHeap)
        return [world.result(rank, timeout_s=250) for rank in range(world_size)]


def always(comm: GroupFreeComm, choice: Choice) -> None:
    """All operations of the lane by one path."""
    comm._transport.selector.force(lambda situation: choice)


def transfer(comm: GroupFreeComm, ranks: tuple[int, ...], num_bytes: int, shift: int, key: int) -> None:
    """A broadcast, or a send if there are two ranks, between tensors ``shift`` bytes off their alignment."""
    if comm.rank not in ranks:
        return
    source = ranks[-1]
    payload = random_bytes(num_bytes, key)
    x = stale((num_bytes + 16 + shift,), torch.uint8)
    middle = x[shift : shift + num_bytes]
    if comm.rank == source:
        middle.copy_(payload)
    if len(ranks) > 2:
        comm.broadcast(middle, source, comm.group(ranks))
    elif comm.rank == source:
        comm.send(middle, ranks[0])
    else:
        comm.recv(middle, source)
    assert same_bits(middle, payload), (ranks, num_bytes, shift)
    assert same_bits(x[:shift], stale((shift,), torch.uint8)) and same_bits(x[-16:], stale((16,), torch.uint8))


def every_size(comm: GroupFreeComm) -> None:
    groups = ((0, 1), (1, 2, 0), (2, 0), (0, 1, 2), (1, 0), (2, 1, 0))
    for key, num_bytes in enumerate(SIZES):
        always(comm, Choice(Path.PUSH, CHUNK_BYTES, num_programs=1 + key % 3))
        transfer(comm, groups[key % 6], num_bytes, key * 3 % 16, key)
        transfer(comm, groups[key % 6], num_bytes, 0, key + 100)


def through_a_table(comm: GroupFreeComm) -> None:
    """As in groups too large to travel by value."""
    from gfdit.comm import kernel_transport

    kernel_transport.MAX_PACKED, make_table, num_tables = 1, comm._transport._table, 0

    def counted(rows: Any) -> torch.Tensor:
        nonlocal num_tables
        num_tables += 1
        return make_table(rows)

    comm._transport._table = counted
    for key in range(3):
        transfer(comm, (1, 2, 0), 3000, 0, key)
    assert num_tables == 1


def through_many_tables(comm: GroupFreeComm) -> list[int]:
    """How many plans, each with its table, are kept after each of some groups."""
    from gfdit.comm import group_free_comm, kernel_transport

    kernel_transport.MAX_PACKED = 1
    group_free_comm.MAX_PLANS = 4
    kept = []
    for key in (0, 1, 2, 0, 3, 4, 0, 5, 1, 0):
        transfer(comm, list(permutations(range(3)))[key], 16, 0, key)
        kept.append(len(comm._plans))
    return kept


def large(comm: GroupFreeComm) -> None:
    always(comm, Choice(Path.PUSH, 2**19, num_programs=2))
    transfer(comm, (0, 2, 1), 8 * 2**20 - 3, 0, 1)


def test_every_size_alignment_and_number_of_programs() -> None:
    assert run_all(3, every_size, slot_bytes=SLOT_BYTES) == [None] * 3


def test_a_table_instead_of_packed_ranks() -> None:
    assert run_all(3, through_a_table, slot_bytes=SLOT_BYTES) == [None] * 3


def test_plans_are_kept_and_not_too_many() -> None:
    assert run_all(3, through_many_tables, slot_bytes=SLOT_BYTES) == [[1, 2, 3, 3, 4, 4, 4, 4, 4, 4]] * 3


@pytest.mark.thorough
def test_eight_megabytes() -> None:
    assert run_all(3, large, slot_bytes=2**20) == [None] * 3


class Specification:
    """What ``EdgeAgreement`` says the counters of an edge are after some operations between two ranks."""

    def __init__(self) -> None:
        self.edges = {0: EdgeAgreement(), 1: EdgeAgreement()}

    def two_way(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for edge in self.edges.values():
                edge.publish(2)
            for edge in self.edges.values():
                edge.consume_two_way()

    def one_way(self, source: int, num_rounds: int) -> None:
        for _ in range(num_rounds):
            if self.edges[source].credit_needed() is not None:
                self.edges[source].credit_reached()
            self.edges[source].publish(2)
            self.edges[1 - source].consume_one_way()

    def counters(self, rank: int) -> list[int]:
        edge = self.edges[rank]
        return [edge.published, edge.observed, edge.consumed]


def mixture(comm: GroupFreeComm, seed: int, start: int) -> None:
    """Random operations of both kinds and directions between two ranks; counters are compared after each."""
    plan, specification = random.Random(seed), Specification()
    counters = comm._transport._state.edge(1 - comm.rank)
    for edge in specification.edges.values():
        edge.published = edge.observed = edge.consumed = start
    counters[:3] = start
    for step in range(24):
        path = plan.choice([Path.PUSH, Path.LOW_LATENCY])
        always(comm, Choice(path, CHUNK_BYTES, num_programs=plan.randint(1, 3)))
        kind = plan.choice(["barrier", "gather", "all_to_all", "send", "send", "broadcast"])
        ranks = (0, 1) if plan.random() < 0.5 else (1, 0)
        num_bytes = plan.choice([0, 37, 1000] if path is Path.LOW_LATENCY else [0, 1000, 3000])
        perform(comm, kind, ranks, num_bytes, step)
        if kind in ("send", "broadcast"):
            specification.one_way(ranks[0] if kind == "send" else ranks[1], -(-num_bytes // SLOT_BYTES) or 1)
        else:
            per_edge = {"barrier": 0, "gather": num_bytes, "all_to_all": num_bytes // 2}[kind]
            specification.two_way(-(-per_edge // SLOT_BYTES) or 1)
        assert counters[:3].tolist() == specification.counters(comm.rank), (step, kind, ranks, num_bytes)


def mixtures(comm: GroupFreeComm) -> None:
    mixture(comm, seed=1, start=0)
    comm.reset((0, 1))
    # Instances are 24 bits on the wire.
    mixture(comm, seed=2, start=2**24 - 12)
    assert int(comm._transport._state.edge(1 - comm.rank)[0]) > 2**24


def test_counters_are_those_of_the_specification_in_any_mixture() -> None:
    assert run_all(2, mixtures, slot_bytes=SLOT_BYTES, low_latency_bytes=1024) == [None] * 2


def bursts(comm: GroupFreeComm) -> None:
    """More messages in a row than there are slots, in both directions at once."""
    group, peer = comm.group((0, 1)), 1 - comm.rank
    comm.barrier(group)
    for burst in (2, 5):
        for direction in (0, 1, 1):
            for key in range(burst):
                transfer(comm, (1 - direction, direction), 1500, 0, key)
    # One message of one slot is accepted before the receiver comes, so this exchange cannot block.
    comm.barrier(group)
    comm.send(random_bytes(SLOT_BYTES, comm.rank), peer)
    out = stale((SLOT_BYTES,), torch.uint8)
    comm.recv(out, peer)
    assert same_bits(out, random_bytes(SLOT_BYTES, peer))


@pytest.mark.thorough
def test_bursts_in_both_directions() -> None:
    assert run_all(2, bursts, slot_bytes=SLOT_BYTES) == [None] * 2


def nobody_sends(comm: GroupFreeComm) -> list[str]:
    if comm.rank == 1:
        return []
    always(comm, Choice(Path.PUSH, CHUNK_BYTES, num_programs=3))
    target, seen = stale((4 * CHUNK_BYTES,), torch.uint8), []
    for _ in range(2):
        try:
            comm.recv(target, 1)
        except CommError as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_a_receiver_waits_at_the_gate() -> None:
    """It reports who did not come, and the receiver behind it finds a broken edge."""
    with open_world(2, slot_bytes=SLOT_BYTES) as world:
        world.start_all(nobody_sends, heap_class=InterpretedHeap, comm_timeout_s=1.0)
        first, second = world.result(0)
    assert first.startswith("CommTimeout") and "send of group (1, 0)" in first
    assert second.startswith("CommAborted") and "needs a reset" in second
