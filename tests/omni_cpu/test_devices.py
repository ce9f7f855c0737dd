"""Ranks on named devices, as far as vLLM-Omni's side of it goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

from gfdit.core.components import Component
from gfdit.omni import engine
from gfdit.omni.executor import worker_on
from gfdit.omni.launcher import check_room
from gfdit.omni.plugin import find_accelerator
from gfdit.omni.settings import Settings

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")


def resolve(monkeypatch: pytest.MonkeyPatch, device_type: str, settings: Settings) -> int:
    platform = SimpleNamespace(device_type=device_type, get_device_count=lambda: 4)
    monkeypatch.setattr(engine, "current_omni_platform", platform)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    parallel = SimpleNamespace(data_parallel_size=5)
    return engine._resolve_ranks(SimpleNamespace(parallel_config=parallel, num_gpus=5), settings)


def test_more_ranks_than_devices_only_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="asked for 5 ranks but this machine has 4 devices"):
        resolve(monkeypatch, "cuda", Settings())
    assert resolve(monkeypatch, "cuda", Settings(devices="0, 1,2,3,3")) == 5
    with pytest.raises(ValueError, match=r"there is no CUDA device 4 \(rank 3\), 5 \(rank 4\); torch sees 4"):
        resolve(monkeypatch, "cuda", Settings(devices="0,1,2,4,5"))
    with pytest.raises(ValueError, match="5 ranks need as many devices, named are 2: 0, 1"):
        resolve(monkeypatch, "cuda", Settings(devices="0,1"))
    with pytest.raises(ValueError, match=r"'devices' names GPUs .0., and ranks are on a CPU"):
        resolve(monkeypatch, "cpu", Settings(devices="0"))


@pytest.mark.parametrize(("device", "index"), [(torch.device("cuda", 1), 1), (torch.device("cpu"), 3)])
def test_a_worker_takes_its_device_and_keeps_its_rank(
    device: torch.device, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def init_device(self: Any) -> None:
        taken.append(self.rank)  # vLLM-Omni takes the device of this index

    monkeypatch.setattr(DiffusionWorker, "init_device", init_device)
    worker = object.__new__(worker_on(device))
    worker.rank = 3
    worker.init_device()
    assert taken == [index] and worker.rank == 3


def test_on_a_gpu_somebody_has_to_say_how_much_components_may_take() -> None:
    components = [Component("base", 700), Component("text", 300)]
    check_room(components, None, "cpu")
    check_room(components, 800, "cuda")
    check_room([], None, "cuda")
    with pytest.raises(ValueError, match=r"'component_bytes' is needed on cuda: .* all of them take 1000 bytes"):
        check_room(components, None, "cuda")
