"""Qwen-Image-Edit and Edit-Plus on the kit, by their stock ``forward``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from gfdit.adapters.testing import AdapterKit, ChildError, KitRequest, check_adapter
from tests.adapters.conftest import Kits
from tools.artifact_sizes import FLOAT32, Asked, QwenImage


def picture(seed: int, width: int = 96, height: int = 96) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


# 16 and 1024 tokens: every degree divides them.
PLAIN = KitRequest(128, 128, steps=3, images=(picture(1),))
GUIDED = KitRequest(128, 128, steps=4, seed=2, negative_prompt=" ", images=(picture(2),))
SMALL = GUIDED.but(steps=2)
# 15 and 1008 tokens: no degree but 1 and 3 divides their sum.
GUIDED_ODD = KitRequest(
    96, 160, steps=3, seed=3, negative_prompt="x", true_cfg_scale=2.0, images=(picture(3, 80, 60),)
)
TWO_IMAGES = KitRequest(96, 96, steps=2, seed=4, negative_prompt=" ", num_images=2, images=(picture(4),))
APART = "encode@0 sp1@2 sp1@3 sp1@0 decode@1"


@pytest.fixture(scope="module")
def kit(kits: Kits) -> AdapterKit:
    return kits("qwen-image-edit")


@pytest.mark.thorough
def test_an_edit_is_that_of_stock(kit: AdapterKit) -> None:
    (stock,) = kit.stock([SMALL])
    assert kit.run(SMALL, APART).identical(stock)
    assert kit.run(SMALL, "encode@2 cfg2xsp2@3,0,2,1 sp2@0,1").difference(stock) < 1e-4


@pytest.mark.thorough
def test_the_input_image_matters(kit: AdapterKit) -> None:
    other = kit.run(GUIDED.but(images=(picture(9),)), "sp1@0")
    assert other.difference(kit.run(GUIDED, "sp1@0")) > 1e-3


@pytest.mark.thorough
def test_artifacts_weigh_what_is_computed(kit: AdapterKit) -> None:
    """By the computation that the figures in docs/models/artifacts.md come from."""
    sizes = kit.artifact_bytes(GUIDED)["denoise"]
    model = QwenImage(text_width=64, pixels_per_token=32, image_tokens=1024)
    asked = Asked(height=128, width=128, text_tokens=0, number=FLOAT32)
    text = sizes["conditioning"][0] - 3 * 1024**2 * FLOAT32 - 1024 * 64 * FLOAT32
    num_text = text // (64 * FLOAT32) // 2
    assert text % (64 * FLOAT32) == 0 and num_text > len(GUIDED.prompt)
    computed = model.artifacts(replace(asked, text_tokens=num_text))
    for name, size in sizes.items():
        assert 0 <= sum(size) - computed[name] <= 80_000, name  # with the image that the client has sent


def test_without_an_image(kit: AdapterKit) -> None:
    with pytest.raises(ChildError, match="This model requires one input image"):
        kit.run(PLAIN.but(images=()), "sp1@0")


@pytest.mark.thorough
def test_every_check(kit: AdapterKit) -> None:
    report = check_adapter(kit, [PLAIN, GUIDED, GUIDED_ODD, TWO_IMAGES])
    assert report.passed, str(report)


@pytest.mark.thorough
def test_input_images_of_other_shapes_do_not_share_a_pass(kit: AdapterKit) -> None:
    """They may have as many tokens, in other places: 1008 of 48 x 21 are not 1008 of 21 x 48."""
    alone = GUIDED.but(images=(picture(2, 80, 60),))
    turned = GUIDED.but(seed=5, images=(picture(2, 60, 80),))
    batched = kit.run_batched([alone, turned], "sp1@0")
    assert set(batched.requests_per_forward) == {1.0} and batched.split_reasons
    for request, output in zip((alone, turned), batched.outputs, strict=True):
        assert output.identical(kit.run(request, "sp1@0"))


@pytest.mark.thorough
def test_other_input_images_of_one_shape_share_a_pass(kit: AdapterKit) -> None:
    requests = [GUIDED, GUIDED.but(seed=5, images=(picture(8),)), GUIDED.but(seed=6, images=(picture(9),))]
    for script in ("sp1@0", "cfg2xsp2@3,1,0,2"):
        batched = kit.run_batched(requests, script)
        assert set(batched.requests_per_forward) == {3.0} and not batched.split_reasons
        for request, output in zip(requests, batched.outputs, strict=True):
            assert output.difference(kit.run(request, script)) < 1e-4, (request, script)
    one, other, _ = batched.outputs
    assert one.difference(other) > 1e-2


@pytest.mark.thorough
def test_a_constant_degree_is_that_of_stock_at_that_degree(kit: AdapterKit) -> None:
    for degrees, script in (({"ulysses_degree": 2}, "sp2@3,1"), ({"cfg_parallel_size": 2}, "cfg2@2,0")):
        (stock,) = kit.stock([GUIDED], **degrees)
        assert kit.run(GUIDED, script).identical(stock), script


@pytest.mark.thorough
def test_several_input_images(kits: Kits) -> None:
    kit = kits("qwen-image-edit-plus")
    one = KitRequest(128, 128, steps=2, images=(picture(1),))
    two = KitRequest(128, 96, steps=2, seed=2, negative_prompt=" ", images=(picture(2), picture(3, 80, 60)))
    report = check_adapter(kit, [two], num_scripts=1)
    assert report.passed, str(report)
    assert kit.run(one, "encode@1 sp2@2,0 sp1@1").difference(kit.stock(one)[0]) < 1e-4
    batched = kit.run_batched([one, two.but(height=128, negative_prompt=None)], "sp1@2")
    assert set(batched.requests_per_forward) == {1.0} and batched.split_reasons, "one image and two"
    with pytest.raises(ChildError, match="image"):
        kit.run(one.but(images=()), "sp1@0")
