"""Edits under a mask: the images of diffusers' inpainting pipelines with the same weights, also cut and moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gfdit.adapters.forward.inpainting import painted
from gfdit.adapters.testing import ChildError, ForkServer, KitRequest
from tests.adapters.components.generation import align
from tests.adapters.conftest import Kits
from tests.families.image_requests import left_half, picture
from tests.support.thorough import thorough

PIPELINES = {
    "flux": "FluxInpaintPipeline",
    "qwen-image": "QwenImageInpaintPipeline",
    "qwen-image-edit": "QwenImageEditInpaintPipeline",
    "sd3": "StableDiffusion3InpaintPipeline",
}
#: Largest difference from diffusers, of pixels between 0 and 1. Its SD3 predicts both branches of guidance in one
#: call, and vLLM-Omni's rounds otherwise: images without a mask differ by 3e-6.
TOLERANCE = {"sd3": 2e-6}
# Under layouts that change.
MOVED_TOLERANCE = 1e-4
TEXT_TOKENS = 32


def blob(side: int) -> Image.Image:
    """Of no straight side, with grey at its edge."""
    y, x = np.mgrid[0:side, 0:side] / side - 0.5
    return Image.fromarray((255 * np.clip(2.2 - 6 * np.hypot(x + 0.1, y), 0, 1)).astype(np.uint8))


def given(**images: Any) -> dict[str, Any]:
    return {"prompt_fields": {"multi_modal_data": images}}


def masked(**changes: Any) -> KitRequest:
    base = KitRequest(128, 128, steps=5, seed=4, max_sequence_length=TEXT_TOKENS)
    images = given(image=picture(3, 96, 80), mask_image=blob(64))
    return base.but(**{"sampling": {"strength": 0.7}, **images, **changes})


def request_for(family: str, **changes: Any) -> KitRequest:
    if family == "sd3":
        return masked(guidance_scale=4.0, **changes)
    if family == "flux":
        return masked(guidance_scale=3.5, negative_prompt="blurry", true_cfg_scale=2.0, **changes)
    if family == "qwen-image-edit":  # which diffusers makes at this size only
        return masked(height=None, width=None, negative_prompt=" ", max_sequence_length=1024, **changes)
    return masked(negative_prompt="blurry", **changes)


@torch.inference_mode()
def by_diffusers(family: str, source: str, request: KitRequest) -> np.ndarray:
    """Pixels between 0 and 1."""
    import diffusers

    pipeline = getattr(diffusers, PIPELINES[family]).from_pretrained(source, torch_dtype=torch.float32)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            align(part)
    pipeline.set_progress_bar_config(disable=True)
    given = request.prompt_fields["multi_modal_data"]
    arguments: dict[str, Any] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "image": given["image"].convert("RGB"),
        "mask_image": given["mask_image"],
        "strength": request.sampling["strength"],
        "num_inference_steps": request.steps,
        "generator": torch.Generator().manual_seed(request.seed),
        "max_sequence_length": request.max_sequence_length,
        "output_type": "pt",
    }
    if request.height is not None:
        arguments |= {"height": request.height, "width": request.width}
    if request.guidance_scale is not None:
        arguments["guidance_scale"] = request.guidance_scale
    if family != "sd3":
        arguments["true_cfg_scale"] = request.true_cfg_scale or 4.0
        return pipeline(**arguments).images.numpy()
    # This one forgets the VAE's shift when it decodes, which diffusers' other pipelines of SD3 do not.
    latents = pipeline(**{**arguments, "output_type": "latent"}).images
    vae = pipeline.vae
    decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    return pixels(decoded.numpy())


def pixels(array: np.ndarray) -> np.ndarray:
    return np.asarray((torch.from_numpy(array) / 2 + 0.5).clamp(0, 1))


def paints(request: KitRequest, like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where it does, and the template there, of the size of ``like`` [1, 3, height, width]."""
    from diffusers.image_processor import VaeImageProcessor

    height, width = like.shape[-2:]
    given = request.prompt_fields["multi_modal_data"]
    of_mask = VaeImageProcessor(do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    template = VaeImageProcessor(do_normalize=False).preprocess(given["image"], height, width)
    return of_mask.preprocess(given["mask_image"], height, width).numpy() > 0, template.numpy()


@pytest.mark.parametrize(
    "family",
    [
        "qwen-image",
        *thorough(("flux", "sd3", "qwen-image-edit")),
    ],
)
def test_an_edit_is_that_of_diffusers(
    family: str, kits: Kits, fork_server: ForkServer, tiny_model: Callable[..., Path]
) -> None:
    kit, request = kits(family, num_ranks=2), request_for(family)
    expected = fork_server.run(by_diffusers, family, str(tiny_model(family)), request)
    made = kit.run(request, "sp1@0")
    found = pixels(made.array)
    here, template = paints(request, expected)
    difference = np.abs(found - expected)[np.broadcast_to(here, found.shape)].max()
    assert difference <= TOLERANCE.get(family, 0.0), difference
    outside = np.broadcast_to(~here, found.shape)
    levels = [np.round(255 * image[outside]) for image in (found, template)]
    assert np.array_equal(*levels), "not the template's own pixels"
    assert np.abs(found - template)[~outside].mean() > 0.05, "nothing was painted"
    assert kit.run(request, "encode@1 sp1@0 sp1@1 decode@0").identical(made), "moved at every step"
    for other in kit.run_interleaved([(request, "sp1@0"), (request, "sp1@1 sp1@0")]):
        assert other.identical(made), "in turns"
    for spec in kit.candidates(request):
        moved = kit.run(request, f"sp1@0 {spec}@{'1,0' if spec.size == 2 else 1} sp1@1")
        assert moved.difference(made) <= MOVED_TOLERANCE, spec


def transparent(*, where: Image.Image) -> Image.Image:
    """OpenAI's kind of mask: a picture that nobody looks at, with holes."""
    mask = picture(9, *where.size).convert("RGBA")
    mask.putalpha(Image.eval(where, lambda level: 255 - level))
    return mask


def test_what_is_white_or_transparent_is_painted() -> None:
    white = left_half(32)
    same = [white, white.convert("RGB"), white.convert("RGBA"), transparent(where=white)]
    for mask in same:
        assert np.array_equal(np.asarray(painted(mask).convert("L")), np.asarray(white)), mask.mode
    with pytest.raises(ValueError, match="covers nothing"):
        painted(Image.new("L", (8, 8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"strength": 0.0}}, "strength must be above 0 and at most 1, got 0"),
        ({"sampling": {"strength": 1.5}}, "strength must be above 0 and at most 1, got 1.5"),
        (given(mask_image=blob(8)), "mask_image goes with one image, got 0"),
        (given(mask_image=3, image=blob(8)), "mask_image must be an image"),
    ],
)
def test_what_cannot_be_painted(changes: dict[str, Any], message: str, kits: Kits) -> None:
    kit = kits("qwen-image", num_ranks=2)
    with pytest.raises(ChildError, match=message):
        kit.run(request_for("qwen-image", **changes), "sp1@0")


def test_a_model_that_takes_no_mask(kits: Kits) -> None:
    with pytest.raises(ChildError, match="mask_image: ZImagePipeline does not inpaint"):
        kits("z-image", num_ranks=1).run(masked(), "sp1@0")


def test_several_images_of_one_template(kits: Kits) -> None:
    made = kits("qwen-image", num_ranks=2).run(masked(num_images=2), "encode@1 sp1@0 sp2@0,1 sp1@1").array
    assert made.shape[0] == 2 and np.abs(made[0] - made[1]).max() > 0.1
