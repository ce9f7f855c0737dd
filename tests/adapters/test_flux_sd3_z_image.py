"""FLUX, Stable Diffusion 3 and Z-Image, elastic: against stock vLLM-Omni and themselves, on the adapter test kit.

vLLM-Omni has no sequence parallelism for the first two: what is compared is the stock pipeline on one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gfdit.adapters.testing import AdapterKit, ChildError, KitRequest, check_adapter
from gfdit.core import ParallelSpec
from tests.adapters.conftest import Kits
from tests.adapters.sabotage import count_padding_in_rings, forget_a_block
from tests.support.thorough import thorough
from tools.artifact_sizes import FLOAT32, Asked, Flux, Model, StableDiffusion3, ZImage

# Largest difference of an element; images are of magnitude 1.
TOLERANCE = 1e-4
LONG = "blurry, dark, noisy, out of focus, low quality, with a frame around it and a signature in a corner"


def flux(height: int, width: int, seed: int, **more: Any) -> KitRequest:
    more = {"guidance_scale": 3.5, "max_sequence_length": 32, **more}
    return KitRequest(height, width, seed=seed, **more)


def sd3(height: int, width: int, seed: int, **more: Any) -> KitRequest:
    more = {"guidance_scale": 4.0, "max_sequence_length": 32, **more}
    return KitRequest(height, width, seed=seed, **more)


def z_image(height: int, width: int, seed: int, **more: Any) -> KitRequest:
    return KitRequest(height, width, seed=seed, **{"guidance_scale": 4.0, "max_sequence_length": 128, **more})


# Tokens are pixels by 16 x 16. The first of each family is guided, with an odd number of them.
REQUESTS = {
    "flux": (
        flux(144, 208, seed=1, negative_prompt="blurry", true_cfg_scale=4.0),  # 117 tokens
        flux(128, 128, seed=2),
        flux(100, 90, seed=3, guidance_scale=1.0, steps=3),  # rounded down, 30 tokens
        flux(128, 96, seed=4, num_images=2, negative_prompt="", true_cfg_scale=2.0),
        flux(48, 48, seed=5, max_sequence_length=48, sampling={"sigmas": [1.0, 0.7, 0.2]}, steps=None),
    ),
    "sd3": (
        sd3(144, 208, seed=1, negative_prompt="blurry"),
        sd3(128, 128, seed=2, guidance_scale=1.0),
        sd3(128, 96, seed=3, num_images=2),
        sd3(80, 48, seed=4, steps=3, max_sequence_length=48, sampling={"output_type": "latent"}),  # 15 tokens
    ),
    "z-image": (
        z_image(144, 208, seed=1, negative_prompt=LONG),  # the captions are padded to 32 and 128 tokens
        z_image(128, 128, seed=2, guidance_scale=0.0),
        z_image(128, 96, seed=3, num_images=2, prompt=LONG, sampling={"cfg_normalize": 1.0}),
        z_image(80, 48, seed=4, negative_prompt="blurry", sampling={"extra_args": {"cfg_truncation": 0.3}}),
        z_image(128, 128, seed=5, guidance_scale=None, prompt=""),  # guided by default
    ),
}

#: Of the tiny checkpoints.
TINY: dict[str, Model] = {"flux": Flux(64, 32), "sd3": StableDiffusion3(64, 64), "z-image": ZImage(64)}

KitOf = Callable[..., AdapterKit]


@pytest.fixture(scope="module")
def kit_of(kits: Kits, tiny_model: Callable[..., Path]) -> KitOf:
    """``kit_of("flux", num_ranks=4, num_heads=4)``, each started once; six ranks have a ring."""
    open_kits: dict[tuple[str, int, int], AdapterKit] = {}

    def get(family: str, num_ranks: int = 4, num_heads: int = 4) -> AdapterKit:
        key = family, num_ranks, num_heads
        if key not in open_kits:
            model = tiny_model(family, num_heads=num_heads)
            open_kits[key] = kits(model, num_ranks=num_ranks, ring=num_ranks == 6)
        return open_kits[key]

    return get


@pytest.mark.parametrize("family", ["flux", *thorough(("sd3", "z-image"))])
def test_one_request(kit_of: KitOf, family: str) -> None:
    """Guided, of an odd number of tokens, under layouts that change with every step."""
    kit = kit_of(family, num_ranks=2)
    report = check_adapter(kit, REQUESTS[family][:1], checks=("sp1", "layouts"), num_scripts=1)
    assert report.passed, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("family", REQUESTS)
def test_every_check(kit_of: KitOf, family: str) -> None:
    report = check_adapter(kit_of(family), REQUESTS[family])
    assert report.passed, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("family", REQUESTS)
def test_steps_of_several_requests_share_a_pass(kit_of: KitOf, family: str) -> None:
    for request in REQUESTS[family][:2]:
        batched = kit_of(family).run_batched([request, request.but(seed=9, prompt="two foxes")], "sp2@2,0")
        assert not batched.split_reasons and set(batched.requests_per_forward) == {2}


@pytest.mark.thorough
def test_captions_of_other_lengths_do_not_share_a_pass(kit_of: KitOf) -> None:
    """Z-Image's attention sees what pads a caption."""
    request = REQUESTS["z-image"][1]
    batched = kit_of("z-image").run_batched([request, request.but(prompt=LONG, seed=9)], "sp1@0")
    assert set(batched.requests_per_forward) == {1} and batched.split_reasons


@pytest.mark.thorough
@pytest.mark.parametrize("family", REQUESTS)
def test_every_degree(kit_of: KitOf, family: str) -> None:
    """Of six heads: Ulysses takes 2, 3 and 6 ranks, a ring 4 and 5."""
    kit = kit_of(family, num_ranks=6, num_heads=6)
    guided, plain = REQUESTS[family][:2]
    assert kit.candidates(plain) == tuple(ParallelSpec(sp) for sp in range(1, 7))
    scripts = ["sp3@2,0,1", "sp4@1,5,0,3", "sp5@2,4,1,0,5", "sp6@0,1,2,3,4,5"]
    scripts.append("sp3@0,1,2 sp4@3,1,5,2 sp1@5 sp6@5,4,3,2,1,0 sp5@0,1,2,3,4 sp2@3,4")
    for request in (guided, plain):
        (stock,) = kit.stock(request)
        for script in [*scripts, *(["cfg2xsp3@5,1,0,2,4,3 sp4@0,5,1,4 cfg2@4,0"] if request is guided else [])]:
            assert kit.run(request, script).difference(stock) <= TOLERANCE, script


@pytest.mark.thorough
@pytest.mark.parametrize("family", REQUESTS)
@pytest.mark.parametrize("error", [forget_a_block, count_padding_in_rings], ids=lambda error: error.__name__)
def test_a_ring_with_an_error_is_seen(kit_of: KitOf, family: str, error: Callable[[Any, bool], None]) -> None:
    """Negative control: in five shards of 117 image tokens there are three of padding."""
    kit = kit_of(family, num_ranks=6, num_heads=6)
    assert difference_by(kit, error, REQUESTS[family][0], "sp5@2,4,1,0,5") > 10 * TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_text_taken_for_image_tokens_is_seen(kit_of: KitOf, family: str) -> None:
    """Negative control: a strategy that exchanges all of what attention is given."""
    wrong = difference_by(kit_of(family), exchange_everything, REQUESTS[family][1], "sp2@0,1")
    assert wrong > 100 * TOLERANCE


def exchange_everything(executor: Any, on: bool) -> None:
    from vllm_omni.diffusion.attention.layer import Attention

    from gfdit.omni.joint_attention import JointAttention
    from gfdit.omni.ulysses import GroupFreeUlysses

    scope = executor.runner.scope
    ulysses = GroupFreeUlysses(scope)
    strategy = ulysses if on else JointAttention(scope, ulysses)
    for module in executor.runner.pipeline.modules():
        if isinstance(module, Attention):
            module.parallel_strategy = strategy


@pytest.mark.thorough
def test_a_branch_depends_on_the_other_one(kit_of: KitOf) -> None:
    """Negative control: a rank of Z-Image that runs its branch as if alone is seen."""
    assert difference_by(kit_of("z-image"), be_alone, REQUESTS["z-image"][0], "cfg2@1,0") > 10 * TOLERANCE


def be_alone(executor: Any, on: bool) -> None:
    rows = executor.runner.pipeline.transformer.gfdit_rows
    rows.part_of = (lambda *args: nullcontext()) if on else type(rows).part_of.__get__(rows)


def difference_by(kit: AdapterKit, error: Callable[[Any, bool], None], request: KitRequest, script: str) -> float:
    """From stock, with ``error`` on every rank; without it there is none."""
    (stock,) = kit.stock(request)
    kit.on_ranks(error, True)
    try:
        wrong = kit.run(request, script).difference(stock)
    finally:
        kit.on_ranks(error, False)
    assert kit.run(request, script).difference(stock) <= TOLERANCE
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("family", REQUESTS)
def test_artifacts_weigh_what_is_computed(kit_of: KitOf, family: str) -> None:
    """By the computation that the figures in docs/models/artifacts.md come from."""
    guided = {"guidance_scale": 4.0, "true_cfg_scale": 4.0, "negative_prompt": REQUESTS[family][1].prompt}
    text_tokens = 32 if family != "z-image" else len("a red panda") + 19  # a token per byte, and the template
    for changes in ({}, guided):
        request = REQUESTS[family][1].but(**changes)
        asked = Asked(height=128, width=128, text_tokens=text_tokens, guided=bool(changes), number=FLOAT32)
        computed = TINY[family].artifacts(asked)
        for name, measured in kit_of(family).artifact_bytes(request)["denoise"].items():
            # Besides tensors: the generator, sampling parameters, the scheduler, and the names of it all.
            assert 0 <= sum(measured) - computed[name] <= 20_000, (name, measured, computed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("flux", {"height": 8}, "height must be at least 16 pixels, got 8"),
        ("flux", {"max_sequence_length": 513}, "max_sequence_length must be between 1 and 512, got 513"),
        ("sd3", {"width": 100}, "width must be a multiple of 16 up to 1024 pixels, got 100"),
        ("sd3", {"width": 1040}, "width must be a multiple of 16 up to 1024 pixels, got 1040"),
        ("sd3", {"sampling": {"generator": []}}, "generator must be one for all outputs"),
        ("z-image", {"height": 120}, "height must be a multiple of 16 up to 2048 pixels, got 120"),
        ("z-image", {"max_sequence_length": 993}, "max_sequence_length must be between 1 and 992, got 993"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_named(kit_of: KitOf, family: str, change: Any, message: str) -> None:
    with pytest.raises(ChildError, match=re.escape(message)):
        kit_of(family).candidates(REQUESTS[family][0].but(**change))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "flux",
            {"prompt_fields": {"prompt_embeds": torch.zeros(1, 64)}},
            "`pooled_prompt_embeds` also have to be",
        ),
        ("z-image", {"sampling": {"extra_args": {"cfg_truncation": "late"}}}, "could not convert string to float"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_pipeline_refuses_is_the_client_s_mistake(
    kit_of: KitOf, family: str, change: Any, message: str
) -> None:
    with pytest.raises(ChildError, match=re.escape(message)) as error:
        kit_of(family).run(REQUESTS[family][0].but(**change), "sp1@0")
    assert "TaskError" in str(error.value), "and no fault of the rank"
