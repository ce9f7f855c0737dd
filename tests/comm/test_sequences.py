"""Long mixtures of operations and overlapping groups: the order is shared, the timing is not."""

from __future__ import annotations

import threading

import pytest
import torch

from gfdit.comm import GroupFreeComm
from tests.comm.soak import SLOT_BYTES, check_growth, perform, soak, soak_in_pieces
from tests.comm.worlds import heap_files, random_bytes, run_ranks, same_bits, stale, wait_until

WORLD_SIZE = 4


@pytest.mark.parametrize(("seed", "stalls"), [(1, False), (2, True)])
def test_soak(seed: int, stalls: bool) -> None:
    by_rank = run_ranks(soak_in_pieces, WORLD_SIZE, seed, 800, 400, stalls, slot_bytes=SLOT_BYTES)
    for rank, pieces in enumerate(by_rank):
        assert len(pieces) == 2 and pieces[-1].num_performed > 300
        check_growth(rank, pieces)
    assert not heap_files()


def two_lanes(comm: GroupFreeComm) -> None:
    """Both lanes at once over the same edges, in unrelated orders, from two threads."""
    migration = comm.lane("migration")
    assert comm.lane("migration") is migration and migration.lane("compute") is comm
    errors: list[BaseException] = []

    def migrate() -> None:
        try:
            soak(migration, 31, 300, False)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=migrate)
    thread.start()
    soak(comm, 32, 300, False)
    thread.join()
    if errors:
        raise errors[0]


def test_two_lanes_at_once_from_two_threads() -> None:
    run_ranks(two_lanes, WORLD_SIZE, slot_bytes=4096)


def blocked_lane(comm: GroupFreeComm) -> None:
    """A lane that waits does not hold up the other one."""
    group = comm.group((0, 1))
    migration = comm.lane("migration")
    if comm.rank == 0:
        out = torch.empty(3)
        thread = threading.Thread(target=comm.recv, args=(out, 1))
        thread.start()
        assert wait_until(comm._transport._busy.locked)
        for _ in range(50):
            migration.barrier(group)
        with pytest.raises(ValueError, match="another thread"):
            comm.barrier(group)
        migration.send(torch.zeros(1), 1)
        thread.join()
        assert out.tolist() == [7, 7, 7]
    else:
        for _ in range(50):
            migration.barrier(group)
        migration.recv(torch.empty(1), 0)
        comm.send(torch.full((3,), 7.0), 0)


def test_a_waiting_lane_does_not_block_the_other() -> None:
    run_ranks(blocked_lane, 2)


def chained_groups(comm: GroupFreeComm) -> None:
    """A value goes round through overlapping pairs and triples, hundreds of barriers long."""
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (3, 2)]
    triples = [(0, 1, 2), (1, 2, 3), (2, 3, 0), (3, 0, 1), (2, 1, 0)]
    value = torch.full((1,), float(comm.rank))
    model = [0.0, 1.0, 2.0, 3.0]
    for step in range(500):
        ranks = (pairs if step % 2 else triples)[step // 2 % 5]
        src = ranks[step % len(ranks)]
        if comm.rank in ranks:
            group = comm.group(ranks)
            comm.barrier(group)
            comm.broadcast(value, src, group)
        for rank in ranks:
            model[rank] = model[src]
        if step % 97 == 0:
            everyone = comm.group(range(4))
            out = torch.empty(4)
            comm.all_gather_into_tensor(out, value, everyone)
            assert out.tolist() == model
            value.add_(comm.rank * 1000)
            model = [model[rank] + rank * 1000 for rank in range(4)]


def test_overlapping_groups_chained() -> None:
    run_ranks(chained_groups, WORLD_SIZE)


def one_way_bursts(comm: GroupFreeComm) -> None:
    """Bursts longer than the slots in both directions, two-way operations between, on one edge."""
    group = comm.group((0, 1))
    peer = 1 - comm.rank
    key = 0
    for burst in (1, 2, 3, 7):
        for direction in (0, 1, 1, 0):
            for _ in range(burst):
                payload = random_bytes(9000, key)
                key += 1
                if comm.rank == direction:
                    comm.send(payload, peer)
                else:
                    out = stale((9000,), torch.uint8)
                    comm.recv(out, peer)
                    assert same_bits(out, payload)
            if burst % 2:
                comm.barrier(group)
    # One message of one slot is accepted before the receiver comes, so this exchange cannot block.
    comm.barrier(group)
    comm.send(random_bytes(4096, comm.rank), peer)
    out = stale((4096,), torch.uint8)
    comm.recv(out, peer)
    assert same_bits(out, random_bytes(4096, peer))


def test_one_way_bursts_in_both_directions() -> None:
    run_ranks(one_way_bursts, 2, slot_bytes=4096)


def counters_wrap(comm: GroupFreeComm) -> None:
    """Instance numbers are 24 bits on the wire; the edge goes on when they start over."""
    for port in comm._transport._ports.values():
        port.agreement.published = port.agreement.observed = port.agreement.consumed = 2**24 - 20
    for step in range(100):
        kind = ["barrier", "gather", "broadcast", "send", "all_to_all", "send", "send"][step % 7]
        perform(comm, kind, (0, 1) if step % 3 else (1, 0), 5000, step)
    assert comm._transport._ports[1 - comm.rank].agreement.published > 2**24


def test_the_counter_wraps() -> None:
    run_ranks(counters_wrap, 2, slot_bytes=4096)
