"""Forwards that keep something where gfdit does not look for it: cut right all the same, or not at all.

Each sabotage is planted in the denoising loop of the stock FLUX pipeline; what must never happen is an image of
other bits than the uninterrupted forward makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest
from tests.adapters.conftest import Kits
from tests.adapters.test_forwards import FORWARD
from tests.support.thorough import thorough

REQUEST = KitRequest(96, 128, seed=3, steps=4, guidance_scale=3.5, max_sequence_length=32)
FULL, COMPACT = "full", "compact"

# The loop of the pipeline, with a place for each sabotage.
LOOP = """
def diffuse(self, prompt_embeds, pooled, negative_embeds, negative_pooled, latents, image_ids, text_ids,
            negative_text_ids, timesteps, do_true_cfg, guidance, true_cfg_scale, cfg_normalize=False):
    self.scheduler.set_begin_index(0)
    self.transformer.do_true_cfg = do_true_cfg
    momentum = None
    {before}
    for index, t in enumerate(timesteps):
        {start}
        noise = self.predict_noise_maybe_with_cfg(False, true_cfg_scale, dict(
            hidden_states=latents, timestep=t.expand(latents.shape[0]).to(latents.dtype) / 1000, guidance=guidance,
            pooled_projections=pooled, encoder_hidden_states=prompt_embeds, txt_ids=text_ids, img_ids=image_ids,
            joint_attention_kwargs=dict(), return_dict=False), None, cfg_normalize)
        {middle}
        {step}
        {after}
    return latents
"""
STEP = "latents = self.scheduler_step_maybe_with_cfg(noise, t, latents, do_true_cfg)"
EULER = "sigmas = self.scheduler.sigmas; latents = latents + (sigmas[index + 1] - sigmas[index]) * noise"

#: By name: what is planted where, the mode that must be found (None: it must be refused), a word of the reason.
SABOTAGES: dict[str, tuple[dict[str, str], str | None, str]] = {
    "nothing": ({}, COMPACT, ""),
    "momentum in a local": (
        {"middle": "momentum = noise if momentum is None else 0.5 * momentum + noise; noise = momentum"},
        FULL,
        "",
    ),
    "momentum on the pipeline": (
        {
            "before": "self.momentum = None",
            "middle": "self.momentum = noise = noise if self.momentum is None else 0.5 * self.momentum + noise",
        },
        FULL,
        "",
    ),
    "momentum in a block": (
        {
            "middle": "block = self.transformer.transformer_blocks[0]; noise = block.__dict__['kept'] = "
            "0.5 * block.__dict__.get('kept', torch.zeros_like(noise)[:1, :1, :1]) + noise"
        },
        None,
        "bits",
    ),
    "a value read at each step": ({"after": "assert latents.abs().max().item() > 0"}, FULL, ""),
    "a step in place": (
        {
            "before": "own = latents.clone()",
            "after": "own[:, :4] = latents[:, :4]; latents = own.clone() * 0.5 + latents",
        },
        FULL,
        "",
    ),
    "everybody's generator": ({"middle": "noise = noise + 0.1 * torch.randn_like(noise)"}, None, "generator"),
    "an exception in the middle": ({"start": "assert index < 2, 'the third step fails'"}, None, "cannot run"),
    "its own loop": ({"step": EULER}, FULL, ""),
}
QUICK = ("nothing", "momentum in a local", "momentum in a block", "everybody's generator")


def plant(executor: Any, parts: dict[str, str]) -> None:
    """On the class, as if vLLM-Omni had written it."""
    import torch

    source = LOOP.format(
        **{"before": "pass", "start": "pass", "middle": "pass", "step": STEP, "after": "pass", **parts}
    )
    scope: dict[str, Any] = {"torch": torch}
    exec(source, scope)
    pipeline = executor.runner.pipeline
    type(pipeline).diffuse = scope["diffuse"]


@pytest.fixture(scope="module")
def kit(kits: Kits) -> Iterator[AdapterKit]:
    yield kits("flux", num_ranks=2, adapter=FORWARD)


@pytest.mark.parametrize("name", [*QUICK, *thorough(name for name in SABOTAGES if name not in QUICK)])
def test_a_sabotaged_forward_makes_no_wrong_image(kit: AdapterKit, name: str) -> None:
    parts, mode, reason = SABOTAGES[name]
    kit.on_ranks(plant, parts)
    (verdict,) = kit.self_test(REQUEST).values()
    assert (verdict.mode and str(verdict.mode.keep)) == mode, verdict
    assert reason in verdict.reason
    if mode is None:
        return
    whole = kit.on_ranks(run_whole, REQUEST)[0]
    for script in ("sp1@0", "encode@1 sp1@0 sp1@1"):
        assert kit.run(REQUEST, script).identical(whole), script
    for output in kit.run_interleaved([(REQUEST, "sp1@0"), (REQUEST.but(seed=9, height=128), "sp1@1 sp1@0")])[:1]:
        assert output.identical(whole)


def run_whole(executor: Any, request: KitRequest) -> Any:
    """As stock runs it: uninterrupted."""
    from gfdit.adapters.testing.outputs import Output

    with executor.alone():
        return Output.of(executor.adapter.run_whole(request.to_omni("whole")))
