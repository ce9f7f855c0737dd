"""Which device each rank is given, over stand-ins for what torch says of devices."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gfdit.comm import HeapDescriptor, create_heap, spawn
from gfdit.comm.devices import check_devices, check_peer_access, names_of, own_device
from gfdit.comm.torch_symmetric_memory import allow_same_index, world_group
from tests.comm.worlds import PATIENCE_S

UUIDS = [f"{digit * 8}-0000-0000-0000-000000000000" for digit in "abcd"]
ALLOWED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``see("ba")``: this process sees the second device of the machine first, and then the first one."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: [f"GPU-{uuid}" for uuid in UUIDS])

    def see(letters: str) -> None:
        uuids = [uuid for letter in letters for uuid in UUIDS if uuid.startswith(letter)]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))

    see("abcd")
    return see


def test_by_default_the_rank_is_the_index(see: Any) -> None:
    assert [own_device(rank).index for rank in range(4)] == [0, 1, 2, 3]


def test_ranks_are_where_they_are_named_and_may_share(see: Any) -> None:
    names = names_of(["3", 0, 0, f"GPU-{UUIDS[1]}".upper()], 4)
    check_devices(4, names)
    assert [own_device(rank, names).index for rank in range(4)] == [3, 0, 0, 1]


def test_a_uuid_finds_its_device_in_a_process_that_counts_otherwise(see: Any) -> None:
    names = names_of([f"GPU-{uuid}" for uuid in UUIDS], 4)
    see("ba")
    assert [own_device(rank, names).index for rank in (0, 1)] == [1, 0]
    see("c")
    assert own_device(2, names).index == 0


def test_devices_that_do_not_exist_are_all_named(see: Any) -> None:
    names = names_of(["0", "7", "GPU-ffff"], 3)
    with pytest.raises(
        ValueError, match=r"no CUDA device 7 \(rank 1\), GPU-ffff \(rank 2\); torch sees 4, the dri"
    ):
        check_devices(3, names)
    with pytest.raises(ValueError, match="rank 1 is to work on CUDA device 7, but its process sees 4 devices"):
        own_device(1, names)
    with pytest.raises(
        ValueError, match=f"rank 2 is to work on CUDA device GPU-ffff, .* sees GPU-{UUIDS[0]}, GPU-"
    ):
        own_device(2, names)


def test_where_the_driver_tells_no_uuids_ranks_find_out(see: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", no_library)
    check_devices(1, ("GPU-ffff",))


def test_names_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks need as many devices, named are 3: 0, 1, 2"):
        names_of([0, 1, 2], 2)
    with pytest.raises(ValueError, match="rank 1: 'cuda:1' is neither the index of a CUDA device nor a UUID"):
        names_of(["0", "cuda:1"], 2)
    with pytest.raises(ValueError, match="devices are for ranks on GPUs: the heap 'shared_memory' is on the CPU"):
        create_heap("shared_memory", 2, devices=[0, 1])
    with pytest.raises(ValueError, match="virtual ranks share one device"):
        spawn(print, 2, heap="local", devices=[0, 1])


def test_only_peers_in_use_must_be_addressable(see: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: {device, peer} == {1, 2})
    check_peer_access(0, 2, ("1", "2"))
    check_peer_access(0, 3, ("2", "2", "1"))
    check_peer_access(0, 2, ("1", "GPU-ffff"))  # in another process
    with pytest.raises(ValueError, match="CUDA device 1 cannot address the memory of device 0"):
        check_peer_access(1, 2, ("0", "1"))


def test_the_descriptor_carries_them(see: Any) -> None:
    descriptor = create_heap("torch_symmetric", 2, devices=[1, f"GPU-{UUIDS[0]}"])
    try:
        assert HeapDescriptor.from_json(descriptor.to_json()).devices == ("1", f"GPU-{UUIDS[0]}")
    finally:
        descriptor.unlink()


def meet(rank: int, indices: list[int], path: str, results: Any) -> None:
    os.environ.pop(ALLOWED, None)
    with world_group(rank, len(indices), path, PATIENCE_S) as group:
        allow_same_index(torch.device("cuda", indices[rank]), group)
    results.put(os.environ.get(ALLOWED))


@pytest.mark.parametrize(("indices", "allowed"), [([0, 1], None), ([0, 0], "1")])
def test_torch_is_told_of_equal_indices_only(indices: list[int], allowed: str | None, tmp_path: Path) -> None:
    """Told, it does without multicast."""
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    processes = [
        context.Process(target=meet, args=(rank, indices, str(tmp_path / "meet"), results), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    assert [results.get(timeout=PATIENCE_S) for _ in processes] == [allowed] * 2
    for process in processes:
        process.join(10)
