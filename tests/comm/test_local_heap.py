"""Virtual ranks: threads of this process on a CPU. The same collectives as between processes."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from gfdit.comm import CommAborted, CommMismatch, CommTimeout, GroupFreeComm, LocalHeap, RankFailed
from tests.comm.worlds import PATIENCE_S, random_bytes, same_bits, stale
from tests.comm.worlds import run_virtual_ranks as run


def every_subset(comm: GroupFreeComm) -> int:
    """Every ordered subset: gather, exchange, broadcast, in several rounds per message."""
    taken = 0
    for size in range(1, comm.world_size + 1):
        for ranks in itertools.permutations(range(comm.world_size), size):
            if comm.rank not in ranks:
                continue
            group, num_bytes = comm.group(ranks), 300
            inputs = [random_bytes(size * num_bytes, *ranks, rank) for rank in ranks]
            mine = inputs[group.index]
            out = stale((size * num_bytes,), torch.uint8)
            comm.all_to_all_single(out, mine, group)
            assert same_bits(out, torch.cat([part.chunk(size)[group.index] for part in inputs])), ranks
            gathered = stale((size * size * num_bytes,), torch.uint8)
            comm.all_gather_into_tensor(gathered, mine, group)
            assert same_bits(gathered, torch.cat(inputs)), ranks
            sent = mine.clone() if group.index == 0 else stale(mine.shape, torch.uint8)
            comm.broadcast(sent, ranks[0], group)
            assert same_bits(sent, inputs[0]), ranks
            taken += 1
    return taken


def test_every_ordered_subset_of_four_virtual_ranks() -> None:
    assert run(every_subset, 4, slot_bytes=128) == [49] * 4


def two_lanes(comm: GroupFreeComm) -> float:
    """The migration lane in another thread, while the compute lane goes on."""
    group, total = comm.group(range(comm.world_size)), torch.zeros(1000)
    copies: list[torch.Tensor] = []

    def migrate() -> None:
        lane = comm.lane("migration")
        for number in range(20):
            x = torch.full((1000,), float(number)) if comm.rank == number % 3 else torch.empty(1000)
            lane.broadcast(x, number % 3, group)
            copies.append(x)

    thread = threading.Thread(target=migrate)
    thread.start()
    for _ in range(20):
        x = torch.ones(1000)
        comm.all_reduce(x, group)
        total += x
    thread.join()
    assert all(torch.equal(copy, torch.full((1000,), float(number))) for number, copy in enumerate(copies))
    return total.sum().item()


def test_two_lanes_at_once() -> None:
    assert run(two_lanes, 3, slot_bytes=1024) == [20 * 3 * 1000.0] * 3


def test_heaps_are_views_of_one_memory() -> None:
    heaps = LocalHeap.create(2, slot_bytes=128, scratch_bytes=4096)
    assert heaps[0].base_pointer(1) == heaps[1].base_pointer(1) == heaps[1].segment(1).data_ptr()
    assert heaps[0].session == heaps[1].session and heaps[0].multicast_pointer == 0
    heaps[0].segment(1)[heaps[0].layout.scratch_offset] = 7
    assert heaps[1].segment(1)[heaps[0].layout.scratch_offset] == 7
    own = heaps[1].tensors.empty((3,), torch.float32)
    assert own.data_ptr() == heaps[1].base_pointer(1) + heaps[1].layout.scratch_offset


def raise_in_one(comm: GroupFreeComm) -> None:
    if comm.rank == 1:
        time.sleep(0.2)  # the other one waits by now, or finds the edge aborted
        raise KeyError("this is wrong")
    comm.lane("migration").barrier(comm.group((0, 1)))


def test_the_first_exception_is_raised_and_the_others_do_not_hang() -> None:
    begin, before = time.monotonic(), set(threading.enumerate())
    with pytest.raises(KeyError, match="this is wrong") as caught:
        run(raise_in_one, 2)
    assert "raised in virtual rank 1 of 2" in caught.value.__notes__[0]
    # The other one was aborted, on the lane where it waits: far from its timeout.
    assert time.monotonic() - begin < PATIENCE_S / 2
    assert not set(threading.enumerate()) - before


def never_come(comm: GroupFreeComm, kind: str) -> str:
    group = comm.group((0, 1))
    if comm.rank == 0:
        if kind == "mismatch":
            comm.all_reduce(torch.ones(3), group)
        elif kind == "abort":
            time.sleep(0.1)  # rank 1 waits by now, or finds the edge aborted
            comm.abort([1])
        return ""
    try:
        comm.barrier(group)
    except (CommTimeout, CommMismatch, CommAborted) as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "error"), [("late", "CommTimeout"), ("mismatch", "CommMismatch"), ("abort", "CommAborted")]
)
def test_failures_are_those_of_processes(kind: str, error: str) -> None:
    if kind == "mismatch":
        with pytest.raises(CommMismatch):
            run(never_come, 2, kind)
    else:
        assert run(never_come, 2, kind, comm_timeout_s=PATIENCE_S if kind == "abort" else 0.3)[1] == error


def test_overall_timeout() -> None:
    """Rank 1 never ends; rank 0 has, unless it was not even scheduled."""
    is_over = threading.Event()

    def stay(comm: GroupFreeComm) -> None:
        if comm.rank:
            is_over.wait()

    with pytest.raises(RankFailed, match=r"no result in time; still running: ranks \[(0, )?1\]"):
        run(stay, 2, timeout_s=0.3, comm_timeout_s=0.1)
    is_over.set()


def test_lanes_open_once_and_not_after_close() -> None:
    (heap,) = LocalHeap.create(1)
    heap.open_lane("compute", timeout_s=1)
    with pytest.raises(ValueError, match="already open"):
        heap.open_lane("compute", timeout_s=1)
    with pytest.raises(ValueError, match="unknown lane 'third'; this heap has compute, migration"):
        heap.open_lane("third", timeout_s=1)
    heap.close()
    with pytest.raises(ValueError, match="is closed"):
        heap.open_lane("migration", timeout_s=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_no_gpu_is_one_clear_line() -> None:
    for device, message in (("cuda", "torch sees none"), ("meta", "'cpu' or 'cuda', not on 'meta'")):
        with pytest.raises(ValueError, match=message) as caught:
            LocalHeap.create(2, device=device)
        assert "\n" not in str(caught.value)
