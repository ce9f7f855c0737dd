"""Families without an adapter, each by its own stock ``forward``: cut at every step and gone on with elsewhere.

What a request of each kind makes is compared, bit by bit, with the stock pipeline in a process of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gfdit.adapters.forward.verdict import Mode
from gfdit.adapters.testing import AdapterKit, ForkServer, KitRequest
from gfdit.core import ParallelSpec
from gfdit.omni.plugin import find_accelerator
from tests.families.image_requests import REQUESTS as ONE
from tests.families.other_requests import OD_CONFIG
from tests.families.other_requests import REQUESTS as TWO
from tests.support.thorough import thorough
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")]

REQUESTS = {name: kinds for name, kinds in {**ONE, **TWO}.items() if name != "anima"}  # which is a single file
#: What is refused, with a word of the reason.
REFUSED = {("omnigen2", "image"): "generator", ("omnigen2", "guided by image"): "generator"}
#: Families whose stock attention has sequence parallelism on GPUs alone, or none that is exact.
ONE_RANK = {"boogu-image", "boogu-image-turbo", "helios-pyramid"}
FORWARD = "gfdit.adapters.forward.adapter:ForwardAdapter"
#: Families of which `make test` runs a request: a loop of vLLM-Omni's kind, and one that steps by itself.
QUICK = {"wan-dmd"}
# Largest difference of an element under layouts that change, where images are of magnitude 1.
TOLERANCE = 1e-4
#: Families of which stock itself makes other images at other degrees: gfdit's are those of stock at that degree.
STOCK_DIFFERS = {"flux2-klein"}


def cases() -> list[Any]:
    return [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.thorough) for family in sorted(REQUESTS)
    ]


@pytest.mark.parametrize("family", cases())
def test_a_forward_is_cut_and_goes_on_elsewhere(
    family: str, fork_server: ForkServer, tiny_model: Callable[..., Path]
) -> None:
    kinds = REQUESTS[family]
    if family in QUICK:
        kinds = dict(list(kinds.items())[:1])
    model = tiny_model(family)
    config = {
        name: value.format(model=model) if isinstance(value, str) else value
        for name, value in OD_CONFIG.get(family, {}).items()
    }
    dtype = config.pop("dtype", "float32")
    with AdapterKit(model, 2, dtype, FORWARD, config, fork_server=fork_server, comm_timeout_s=HANG_S) as kit:
        for kind, request in kinds.items():
            (verdict,) = kit.self_test(request).values()
            if (reason := REFUSED.get((family, kind))) is not None:
                assert verdict.mode is None and reason in verdict.reason, verdict
                continue
            assert verdict.mode is not None, f"{family}, {kind}: {verdict.reason}"
            check(kit, request, f"{family}, {kind}", verdict.mode, wide=family not in ONE_RANK)


def check(kit: AdapterKit, request: KitRequest, name: str, mode: Mode, wide: bool) -> None:
    (stock,) = kit.stock(request)
    kit.on_ranks(leave_cycles)
    assert kit.run(request, "sp1@0").identical(stock), name
    moved = kit.run(request, "encode@1 sp1@0 sp1@1 decode@0")
    assert moved.identical(stock), f"{name}, moved at every step"
    for other in kit.run_interleaved([(request, "sp1@0"), (request, "sp1@1 sp1@0")]):
        assert other.identical(stock), f"{name}, in turns"
    assert kit.on_ranks(tensors_in_cycles) == [0, 0], f"{name}: tensors wait for the garbage collector"
    specs = [spec for spec in kit.candidates(request) if wide and spec != ParallelSpec(1)]
    for spec in specs:
        script = f"sp1@0 {spec}@1,0 sp1@1"
        expected = stock
        if name.partition(",")[0] in STOCK_DIFFERS:
            script = f"{spec}@1,0"
            (expected,) = kit.stock(request, ulysses_degree=spec.sp, cfg_parallel_size=spec.cfg)
        difference = kit.run(request, script).difference(expected)
        assert difference <= TOLERANCE, f"{name}, {script}: {difference}"
    print(f"{name}: {mode.keep}, by {mode.cut}: {', '.join(map(str, specs)) or 'one rank'}")


def leave_cycles(executor: Any) -> None:
    """What is in cycles stays until :func:`tensors_in_cycles`."""
    executor.adapter.suspended.end_those_gone()
    gc.collect()
    gc.disable()


def tensors_in_cycles(executor: Any) -> int:
    """That requests which have ended have left behind: device memory, until Python looks for cycles."""
    executor.adapter.suspended.end_those_gone()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = sum(isinstance(one, torch.Tensor) for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    return found


@pytest.mark.parametrize(
    "family",
    ["qwen-image", *thorough(("flux", "sd3", "z-image"))],
)
def test_steps_of_several_requests_are_one_call(
    family: str, fork_server: ForkServer, tiny_model: Callable[..., Path]
) -> None:
    request = KitRequest(128, 96, steps=4, guidance_scale=1.0, max_sequence_length=64)
    with AdapterKit(tiny_model(family), 1, adapter=FORWARD, fork_server=fork_server, comm_timeout_s=HANG_S) as kit:
        others = [request.but(seed=9), request.but(seed=7, prompt="two foxes in the snow")]
        if family == "z-image":  # whose attention sees what pads a caption
            others = others[:1]
        batched = kit.run_batched([request, *others], "sp1@0")
        assert set(batched.requests_per_forward) == {1 + len(others)} and not batched.split_reasons
        for one, output in zip([request, *others], batched.outputs, strict=True):
            assert output.difference(kit.run(one, "sp1@0")) <= TOLERANCE


def test_a_forward_that_is_given_up_is_replayed(fork_server: ForkServer, tiny_model: Callable[..., Path]) -> None:
    """Where suspended forwards may hold nothing, each step begins with a replay; and none is left in the end."""
    request = REQUESTS["krea2-turbo"]["text"]
    with AdapterKit(
        tiny_model("krea2-turbo"), 1, adapter=FORWARD, fork_server=fork_server, comm_timeout_s=HANG_S
    ) as kit:
        (stock,) = kit.stock(request)
        assert kit.on_ranks(limit_suspended, 0) == [0]
        assert kit.run(request, "sp1@0").identical(stock)
        kit.on_ranks(limit_suspended, 1 << 30)
        kit.run_interleaved([(request, "sp1@0"), (request.but(seed=5), "sp1@0")])
        assert kit.on_ranks(limit_suspended, 1 << 30) == [0]


def limit_suspended(executor: Any, limit_bytes: int) -> int:
    """Returns how many there are."""
    suspended = executor.adapter.suspended
    suspended.limit_bytes = limit_bytes
    suspended.end_those_gone()
    return len(suspended)
