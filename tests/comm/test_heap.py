"""The shared-memory heap: descriptors, errors, and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import pickle
import signal
import time

import pytest
import torch

from gfdit.comm import GroupFreeComm, HeapDescriptor, RankFailed, SharedMemoryHeap
from gfdit.comm.layout import LINE_BYTES, SegmentLayout
from tests.comm.worlds import heap_files, run_ranks, wait_until
from tests.support.waiting import HANG_S


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = heap_files()
    yield
    assert heap_files() == before


def test_layout_regions_do_not_overlap() -> None:
    layout = SegmentLayout(4, 2, slot_bytes=4096, scratch_bytes=100, low_latency_bytes=192, export_bytes=8192)
    for owner in range(4):
        regions = [(layout.scratch_offset, 100)]
        for lane in range(2):
            regions.append((layout.export_offset(lane), 8192))
            regions.append((layout.low_latency_offset(lane), 3 * 2 * 2 * 192))
            for peer in set(range(4)) - {owner}:
                regions.append((layout.line_offset(lane, owner, peer), LINE_BYTES))
                regions += [(layout.slot_offset(lane, owner, peer, slot), 4096) for slot in range(2)]
        regions.sort()
        for (begin, size), (following, _) in itertools.pairwise(regions):
            assert begin + size <= following
        assert sum(regions[-1]) <= layout.segment_bytes
        assert all(begin % 64 == 0 for begin, _ in regions)


def test_descriptor_travels() -> None:
    descriptor = SharedMemoryHeap.create(2, slot_bytes=4096)
    try:
        assert HeapDescriptor.from_json(descriptor.to_json()) == descriptor
        assert pickle.loads(pickle.dumps(descriptor)) == descriptor
        heaps = [SharedMemoryHeap.attach(descriptor, rank) for rank in range(2)]
        descriptor.unlink()  # mappings outlive the name
        descriptor.unlink()
        left, right = (GroupFreeComm(heap, timeout_s=HANG_S) for heap in heaps)
        left.send(torch.arange(3), 1)
        out = torch.empty(3, dtype=torch.int64)
        right.recv(out, 0)
        assert out.tolist() == [0, 1, 2]
        for heap in heaps:
            heap.close()
            heap.close()
        for use in (lambda: left.send(torch.arange(3), 1), lambda: heaps[0].open_lane("compute", timeout_s=1)):
            with pytest.raises(ValueError):
                use()
    finally:
        descriptor.unlink()


def test_scratch_is_symmetric() -> None:
    descriptor = SharedMemoryHeap.create(2, slot_bytes=4096, scratch_bytes=64)
    heaps = [SharedMemoryHeap.attach(descriptor, rank) for rank in range(2)]
    descriptor.unlink()
    heaps[0].scratch(1).fill_(7)
    assert heaps[1].scratch(1).tolist() == [7] * 64
    assert heaps[1].scratch(0).tolist() == [0] * 64
    assert heaps[0].scratch(1).data_ptr() == heaps[0].base_pointer(1) + heaps[0].layout.scratch_offset
    for heap in heaps:
        heap.close()


def test_too_little_shared_memory_is_one_clear_line() -> None:
    with pytest.raises(OSError) as caught:
        SharedMemoryHeap.create(4, slot_bytes=2**44)
    text = str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert "MiB" in text and "slot_bytes" in text and "--shm-size" in text and "\n" not in text


@pytest.mark.parametrize(
    "options",
    [
        {"world_size": 0},
        {"world_size": 2, "slot_bytes": 100},
        {"world_size": 2, "slot_bytes": 0},
        {"world_size": 2, "lanes": ()},
        {"world_size": 2, "lanes": ("a", "a")},
        {"world_size": 2, "scratch_bytes": -1},
    ],
)
def test_bad_arguments(options) -> None:
    with pytest.raises(ValueError):
        SharedMemoryHeap.create(**options)


def test_attaching_wrongly() -> None:
    descriptor = SharedMemoryHeap.create(2, slot_bytes=4096)
    with pytest.raises(ValueError, match="not in a world of 2"):
        SharedMemoryHeap.attach(descriptor, 2)
    descriptor.unlink()
    with pytest.raises(FileNotFoundError):
        SharedMemoryHeap.attach(descriptor, 0)


def test_an_abandoned_heap_is_removed_by_the_next_owner_unless_in_use() -> None:
    abandoned, used = (SharedMemoryHeap.create(2, slot_bytes=4096) for _ in range(2))
    fresh = SharedMemoryHeap.create(2, slot_bytes=4096)
    user = os.open(used.path, os.O_RDWR)
    fcntl.flock(user, fcntl.LOCK_SH)
    long_ago = time.time() - 7200
    for descriptor in (abandoned, used):
        os.utime(descriptor.path, (long_ago, long_ago))
    SharedMemoryHeap.create(1, slot_bytes=4096).unlink()
    assert [os.path.exists(d.path) for d in (abandoned, used, fresh)] == [False, True, True]
    os.close(user)
    used.unlink()
    fresh.unlink()


def name_is_gone_while_running(comm: GroupFreeComm) -> bool:
    comm.barrier(comm.group((0, 1)))
    return wait_until(lambda: not os.path.exists(comm._heap.descriptor.path))


def test_spawn_unlinks_as_soon_as_every_rank_attached() -> None:
    assert run_ranks(name_is_gone_while_running, 2) == [True, True]


def killed(comm: GroupFreeComm) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier(comm.group((0, 1)))


def test_a_killed_rank_leaves_nothing_behind() -> None:
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9"):
        run_ranks(killed, 2)
