"""Tensors allocated in a rank's own segment: where they are, and that their memory comes back."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch

from gfdit.comm import GroupFreeComm, SharedMemoryHeap

ROOM = 64 * 1024


@pytest.fixture
def heap() -> Iterator[SharedMemoryHeap]:
    descriptor = SharedMemoryHeap.create(2, slot_bytes=4096, scratch_bytes=ROOM)
    with SharedMemoryHeap.attach(descriptor, 1) as heap:
        descriptor.unlink()
        yield heap


def test_a_heap_tensor_lies_in_the_own_segment(heap) -> None:
    tensor = GroupFreeComm(heap).empty((3, 5), torch.bfloat16)
    assert tensor.shape == (3, 5) and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
    offset = tensor.data_ptr() - heap.base_pointer(1)
    assert offset % 256 == 0 and heap.layout.scratch_offset <= offset < heap.layout.segment_bytes
    tensor.copy_(torch.arange(15.0).reshape(3, 5))
    seen = heap.segment(1)[offset : offset + tensor.nbytes].view(torch.bfloat16)
    assert seen.tolist() == list(range(15))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3)])
def test_any_shape_and_dtype(heap, shape, dtype) -> None:
    tensor = heap.tensors.empty(shape, dtype)
    assert tuple(tensor.shape) == shape and tensor.dtype == dtype


def test_memory_comes_back_when_the_last_view_is_gone(heap) -> None:
    tensor = heap.tensors.empty((1000,), torch.uint8)
    view = tensor.view(10, 100)[3]
    del tensor
    assert heap.tensors.free_bytes() == ROOM - 1024
    del view
    assert heap.tensors.free_bytes() == ROOM


def test_a_full_heap_says_how_full(heap) -> None:
    kept = [heap.tensors.empty((ROOM // 4,), torch.uint8) for _ in range(4)]
    del kept[0], kept[1]  # the first and the third quarter
    with pytest.raises(ValueError, match=r"\(40000,\) torch.uint8, 40000 bytes: 32768 of 65536 .* 16384 of them"):
        heap.tensors.empty((40000,), torch.uint8)
    del kept[0]
    assert heap.tensors.empty((3 * ROOM // 4,), torch.uint8).nbytes == 3 * ROOM // 4


def test_a_heap_without_room() -> None:
    descriptor = SharedMemoryHeap.create(1, slot_bytes=4096)
    with SharedMemoryHeap.attach(descriptor, 0) as heap:
        descriptor.unlink()
        with pytest.raises(ValueError, match=r"0 of 0 bytes are free.*scratch_bytes"):
            heap.tensors.empty((0,), torch.uint8)


def test_a_tensor_outlives_the_heap() -> None:
    descriptor = SharedMemoryHeap.create(1, slot_bytes=4096, scratch_bytes=ROOM)
    with SharedMemoryHeap.attach(descriptor, 0) as heap:
        descriptor.unlink()
        tensor = heap.tensors.empty((100,), torch.int32).fill_(7)
    del heap
    gc.collect()
    assert tensor.tolist() == [7] * 100


def test_living_tensors_never_share_memory(heap) -> None:
    """Random allocations and deaths; every tensor keeps its own pattern, and nothing is lost in the end."""
    choices = random.Random(5)
    living: list[tuple[int, torch.Tensor]] = []
    refused = 0
    for step in range(2000):
        if living and choices.random() < 0.45:
            mark, tensor = living.pop(choices.randrange(len(living)))
            assert (tensor == mark).all()
            del tensor
        try:
            tensor = heap.tensors.empty((choices.randrange(4000),), torch.int16)
        except ValueError:
            refused += 1
            continue
        living.append((step, tensor.fill_(step)))
    assert refused and all((tensor == mark).all() for mark, tensor in living)
    del living, tensor
    assert heap.tensors.free_bytes() == ROOM
