"""The CUDA heap as far as it can be tested without a GPU: what is asked of torch and in which order.

The stand-in for torch's symmetric memory has the interface of ``torch.distributed._symmetric_memory``; the process
group and its store are real.
"""

from __future__ import annotations

import inspect
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gfdit.comm import HeapDescriptor, create_heap
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES, TorchSymmetricHeap
from gfdit.comm.torch_symmetric_memory import map_segments, world_group
from tests.comm.worlds import PATIENCE_S

CPU = torch.device("cpu")


class FakeHandle:
    def __init__(self, by_rank: list[torch.Tensor], multicast_ptr: int) -> None:
        self._by_rank = by_rank
        self.multicast_ptr = multicast_ptr

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert dtype == torch.uint8
        return self._by_rank[rank][: sizes[0]]


class FakeSymmetricMemory:
    """Memory of a world of two as rank 0 sees it."""

    def __init__(self, *, multicast_ptr: int = 0, elsewhere: bool = False) -> None:
        self.calls: list[str] = []
        self._multicast_ptr = multicast_ptr
        self._elsewhere = elsewhere

    def set_backend(self, name: str) -> None:
        self.calls.append(f"set_backend {name}")

    def empty(self, num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.calls.append(f"empty {num_bytes}")
        return torch.full((num_bytes,), 0xAB, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> FakeHandle:
        assert dist.is_initialized() and group is dist.group.WORLD
        self.calls.append(f"rendezvous of {tensor.count_nonzero().item()} bytes set")
        own = tensor.clone() if self._elsewhere else tensor
        return FakeHandle([own, torch.zeros_like(tensor)], self._multicast_ptr)


def descriptor_of(world_size: int, path: Path) -> HeapDescriptor:
    descriptor = HeapDescriptor.make(
        "torch_symmetric", world_size, ("compute",), slot_bytes=128, scratch_bytes=4096
    )
    return HeapDescriptor.from_json(descriptor.to_json().replace('"path": ""', f'"path": "{path}"'))


def map_alone(fake: FakeSymmetricMemory, tmp_path: Path) -> Any:
    return map_segments(
        4096,
        CPU,
        rank=0,
        world_size=1,
        store_path=str(tmp_path / "a"),
        timeout_s=PATIENCE_S,
        symmetric_memory=fake,
    )


def test_zeros_are_written_before_anybody_can_map_them(tmp_path: Path) -> None:
    fake = FakeSymmetricMemory()
    mapped = map_alone(fake, tmp_path)
    assert fake.calls == ["set_backend CUDA", "empty 4096", "rendezvous of 0 bytes set"]
    assert len(mapped.by_rank) == 1 and mapped.multicast_pointer == 0
    assert not dist.is_initialized()  # the group was for the rendezvous alone


def test_memory_that_is_mapped_elsewhere_is_refused(tmp_path: Path) -> None:
    fake = FakeSymmetricMemory(elsewhere=True)
    with pytest.raises(RuntimeError, match=r"torch .* maps symmetric memory elsewhere"):
        map_alone(fake, tmp_path)
    assert not dist.is_initialized()


def test_the_stand_in_takes_what_torch_takes() -> None:
    """Otherwise the tests above say nothing."""
    module = pytest.importorskip("torch.distributed._symmetric_memory")
    assert list(inspect.signature(module.rendezvous).parameters) == ["tensor", "group"]
    assert list(inspect.signature(module.set_backend).parameters) == ["name"]
    assert {"dtype", "device"} < set(inspect.signature(module.empty).parameters)
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert all(hasattr(handle, name) for name in ("get_buffer", "multicast_ptr"))


def test_the_heap_over_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gfdit.comm.torch_symmetric_memory.world_group", lambda *args: world_of_one(tmp_path))
    fake = FakeSymmetricMemory(multicast_ptr=4096)
    heap = TorchSymmetricHeap(descriptor_of(2, tmp_path / "a"), 0, CPU, fake)
    assert (heap.rank, heap.world_size, heap.lanes, heap.multicast_pointer) == (0, 2, ("compute",), 4096)
    assert heap.segment(1).nbytes == heap.layout.segment_bytes
    assert [heap.base_pointer(rank) for rank in (0, 1)] == [heap.segment(rank).data_ptr() for rank in (0, 1)]
    tensor = heap.tensors.empty((4,), torch.float32)
    assert tensor.data_ptr() == heap.base_pointer(0) + heap.layout.scratch_offset
    heap.close()
    with pytest.raises(ValueError, match="is closed"):
        heap.open_lane("compute", timeout_s=1)


def world_of_one(tmp_path: Path):
    return world_group(0, 1, str(tmp_path / "store"), PATIENCE_S)


def meet(rank: int, path: str, results: Any) -> None:
    with world_group(rank, 2, path, PATIENCE_S) as group:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
    results.put((rank, total.item(), dist.is_initialized()))


def test_ranks_meet_at_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    processes = [
        context.Process(target=meet, args=(rank, str(tmp_path / "meet"), results), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=PATIENCE_S) for _ in processes) == [(0, 2.0, False), (1, 2.0, False)]
    for process in processes:
        process.join(10)


def test_another_world_than_the_existing_one_is_refused(tmp_path: Path) -> None:
    with (
        world_group(0, 1, str(tmp_path / "a"), PATIENCE_S) as group,
        world_group(0, 1, "not used", PATIENCE_S) as same,
    ):
        assert same is group
        with pytest.raises(ValueError, match="rank 1 of 3 cannot use the existing process group, in which it is "):
            world_group(1, 3, "not used", PATIENCE_S).__enter__()
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.version.cuda is not None, reason="what is said by a torch built without CUDA")
def test_no_cuda_is_one_clear_line() -> None:
    with pytest.raises(
        ValueError, match=r"symmetric memory needs a torch built for CUDA, this is torch"
    ) as caught:
        create_heap("torch_symmetric", 2)
    assert "\n" not in str(caught.value)


def test_too_few_devices_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="a heap of 2 ranks needs as many CUDA devices, torch sees 1"):
        create_heap("torch_symmetric", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    descriptor = create_heap("torch_symmetric", 2)
    try:
        assert descriptor.slot_bytes == DEVICE_SIZES["slot_bytes"] and descriptor.kind == "torch_symmetric"
        with pytest.raises(ValueError, match="CUDA device 1 cannot address the memory of device 0"):
            TorchSymmetricHeap.attach(descriptor, 1)
    finally:
        descriptor.unlink()
    assert not Path(descriptor.path).exists()


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="unknown heap 'magic'; known: 'shared_memory', "):
        create_heap("magic", 2)
