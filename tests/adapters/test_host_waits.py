"""No step of a known family makes the host wait for its device.

Without a GPU: on a CPU that stands in for one, and tells which tensors are there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from PIL import Image

from gfdit.adapters.forward.waits import WithoutWaits
from gfdit.adapters.testing import KitRequest
from gfdit.adapters.testing.host_waits import DEVICE, HostWaits
from tests.adapters.conftest import Kits
from tests.adapters.sabotage import wait_for_the_device
from tests.support.thorough import thorough

PICTURE = Image.new("RGB", (64, 64), (90, 30, 200))
PLAIN = KitRequest(64, 64, steps=4, max_sequence_length=32)
TRUE_CFG = PLAIN.but(negative_prompt="blurry", true_cfg_scale=4.0)
GUIDED = PLAIN.but(negative_prompt="blurry", guidance_scale=4.0)
VIDEO = GUIDED.but(num_frames=5)

REQUESTS = {
    "qwen-image": TRUE_CFG,
    "qwen-image-edit": TRUE_CFG.but(images=(PICTURE,)),
    "flux": TRUE_CFG.but(guidance_scale=3.5),
    "sd3": GUIDED,
    "z-image": GUIDED.but(max_sequence_length=128, sampling={"extra_args": {"cfg_truncation": 0.3}}),
    "longcat-image": GUIDED.but(sampling={"extra_args": {"enable_prompt_rewrite": False}}),
    "helios": VIDEO,
    "wan2.2-ti2v": VIDEO,
    "wan2.2-t2v-a14b": VIDEO,
    "wan2.2-i2v": VIDEO.but(images=(PICTURE,)),
}
QUICK = ("qwen-image",)


@pytest.mark.parametrize("family", [*QUICK, *thorough(name for name in REQUESTS if name not in QUICK)])
def test_a_step_waits_for_nothing(kits: Kits, family: str) -> None:
    kit, request = kits(family, num_ranks=2), REQUESTS[family]
    assert kit.host_waits(request, "sp1@0") == []
    assert [wait for wait in kit.host_waits(request, "sp2@0,1") if wait.startswith("gfdit/")] == []


def test_a_step_that_waits_is_seen(kits: Kits) -> None:
    """Negative controls: a step of ours, and stock's scheduler without what keeps it from waiting."""
    kit = kits("wan2.2-ti2v", num_ranks=1)
    kit.on_ranks(wait_for_the_device, True)
    try:
        waits = kit.host_waits(REQUESTS["wan2.2-ti2v"], "sp1@0")
    finally:
        kit.on_ranks(wait_for_the_device, False)
    assert any("sabotage.py, look: item" in wait for wait in waits), waits
    assert any("multistep_uni_p_bh_update: tensor of host memory" in wait for wait in waits), waits


@pytest.mark.parametrize(
    ("call", "wait"),
    [
        (lambda x, host: x.sum().item(), "item"),
        (lambda x, host: bool(x.all()), "__bool__"),
        (lambda x, host: x.tolist(), "tolist"),
        (lambda x, host: x.cpu(), "cpu"),
        (lambda x, host: x.to("cpu"), "to the host"),
        (lambda x, host: x.nonzero(), "nonzero"),
        (lambda x, host: x[x > 0], "__getitem__ with a mask"),
        (lambda x, host: host.to(x.device), "to of host memory to the device"),
        (lambda x, host: torch.tensor([1.0], device=x.device), "tensor of host memory to the device"),
        (lambda x, host: torch.where(x > 0), "where with one argument"),
        (lambda x, host: torch.linalg.solve(x, x), "linalg_solve"),
        (lambda x, host: x.copy_(host), "copy_ from host memory"),
        (lambda x, host: host.to(x.device, non_blocking=True), ""),
        (lambda x, host: torch.where(x > 0, x, 0.0) @ x.new_full((4,), 2.0), ""),
        (lambda x, host: host.sum().item(), ""),
        (lambda x, host: torch.full((4,), 1.0, device=x.device)[None] + x, ""),
    ],
)
def test_what_waits(call: Callable[[torch.Tensor, torch.Tensor], Any], wait: str) -> None:
    with HostWaits() as waits:
        call(torch.eye(4, device=DEVICE), torch.ones(4, 4))
    assert [line.rpartition(": ")[2] for line in waits.found] == ([wait] if wait else [])


def test_schedulers_compute_the_same_without_waiting() -> None:
    from vllm_omni.diffusion.models.schedulers.scheduling_flow_unipc_multistep import FlowUniPCMultistepScheduler

    def run(mode: Callable[[], Any]) -> list[torch.Tensor]:
        scheduler = FlowUniPCMultistepScheduler(solver_order=3)
        scheduler.set_timesteps(8, device="cpu")
        sample, samples = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1)), []
        for timestep in scheduler.timesteps:
            with mode():
                (sample,) = scheduler.step(torch.sin(sample * 3), timestep, sample, return_dict=False)
            samples.append(sample)
        return samples

    expected = run(nullcontext)
    assert all(map(torch.equal, run(WithoutWaits), expected)) and expected[-1].isfinite().all()
