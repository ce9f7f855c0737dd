"""Wan2.2 on the kit: from text, from text and an image, two experts, FastWan's sampling; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gfdit.adapters.testing import ChildError, ForkServer, KitRequest, check_adapter
from tests.adapters import sabotage
from tests.adapters.conftest import Kits
from tests.adapters.wan_variants import fastwan, with_image_encoder
from tools.artifact_sizes import FLOAT32, Asked, Wan

UNIPC, EULER = "unipc", "euler"


def video(
    height: int, width: int, num_frames: int, seed: int, solver: str = UNIPC, flow_shift: float = 5.0, **more: Any
) -> KitRequest:
    """The solver is always said: for stock the one of the request before is the default."""
    sampling = {"extra_args": {"sample_solver": solver, "flow_shift": flow_shift}, **more.pop("sampling", {})}
    more = {"steps": 4, "guidance_scale": 1.0, "max_sequence_length": 32, **more}
    return KitRequest(height, width, num_frames, seed=seed, sampling=sampling, **more)


def picture(seed: int, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """Blocks of colour, (width, height) pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size)


# A token is 32 x 32 pixels of a latent frame, of the A14B models 16 x 16; the latent frames are the first frame
# and then one for every four.
TEXT = (
    video(96, 96, 9, seed=1, guidance_scale=4.0, negative_prompt="blurry"),  # 27 tokens
    video(64, 64, 5, seed=2),
    video(64, 96, 5, seed=3, solver=EULER, flow_shift=3.0, guidance_scale=4.0, num_images=2),
    video(70, 110, 7, seed=4, flow_shift=8.0, steps=6),  # no multiple of anything
)
TEXT_AND_IMAGE = (
    video(96, 96, 9, seed=5, images=(picture(1, (50, 80)),), guidance_scale=4.0, negative_prompt="blurry"),
    video(64, 64, 5, seed=6, images=(picture(2),), flow_shift=3.0),
    video(64, 96, 5, seed=7, images=(picture(3),), solver=EULER, guidance_scale=3.0, num_images=2),
)
# By default four steps cross the boundary between the experts in the middle.
TWO_EXPERTS = (
    video(48, 48, 9, seed=1, guidance_scale=4.0, guidance_scale_2=6.0, negative_prompt="blurry"),  # 27 tokens
    video(64, 64, 5, seed=2),
    video(48, 80, 1, seed=3, solver=EULER, guidance_scale=1.0, guidance_scale_2=4.0),  # half of it guided
    video(64, 64, 5, seed=4, flow_shift=12.0, steps=6, guidance_scale=4.0, sampling={"boundary_ratio": 0.95}),
)
IMAGE = (
    video(48, 48, 9, seed=1, images=(picture(1),), guidance_scale=4.0, guidance_scale_2=6.0),
    video(64, 64, 5, seed=2, images=(picture(2, (64, 64)),), negative_prompt="blurry"),
    video(48, 80, 5, seed=3, images=(picture(3),), solver=EULER, guidance_scale=4.0, num_images=2),
    video(
        48,
        48,
        5,
        seed=4,
        prompt_fields={"multi_modal_data": {"image": picture(4), "last_image": picture(5)}},
        guidance_scale=3.0,
    ),
)
REQUESTS = {"wan2.2-ti2v": (*TEXT, *TEXT_AND_IMAGE), "wan2.2-t2v-a14b": TWO_EXPERTS, "wan2.2-i2v": IMAGE}


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["wan2.2-i2v", "wan2.2-ti2v", "wan2.2-t2v-a14b"])
def test_a_guided_request_of_an_odd_length(kits: Kits, family: str) -> None:
    report = check_adapter(kits(family), REQUESTS[family][:1], num_scripts=1, checks=("sp1", "layouts"))
    assert report.passed, str(report)


def test_an_image_is_encoded_once(kits: Kits) -> None:
    kit = kits("wan2.2-ti2v")
    (stock,) = kit.stock(TEXT_AND_IMAGE[:1])
    assert kit.run(TEXT_AND_IMAGE[0], "encode@1 sp1@3 sp1@0 decode@1").identical(stock)


@pytest.mark.thorough
@pytest.mark.parametrize("family", REQUESTS)
def test_every_check_on_every_request(kits: Kits, family: str) -> None:
    report = check_adapter(kits(family), REQUESTS[family])
    assert report.passed, str(report)


@pytest.mark.thorough
def test_the_solver_of_one_request_is_not_the_default_of_the_next(kits: Kits) -> None:
    """As it is on the pipeline, whose scheduler the stock requests below share."""
    kit, plain = kits("wan2.2-ti2v"), TEXT[1]
    unsaid, euler = plain.but(sampling={}), plain.but(sampling={"extra_args": {"sample_solver": EULER}})
    expected, as_euler, after_euler = kit.stock([plain, euler, unsaid])
    assert after_euler.identical(as_euler) and not after_euler.identical(expected)
    outputs = kit.run_interleaved([(euler, "sp1@0"), (unsaid, "sp1@0")])
    assert [output.identical(stock) for output, stock in zip(outputs, [as_euler, expected], strict=True)] == [
        True
    ] * 2


@pytest.mark.thorough
def test_padding_that_is_attended_to_is_seen(kits: Kits) -> None:
    """Negative control: nothing masks it, so the attention layers must cut it off."""
    kit, odd = kits("wan2.2-t2v-a14b"), TWO_EXPERTS[:1]
    kit.on_ranks(sabotage.count_padding, True)
    try:
        report = check_adapter(kit, odd, checks=["layouts"], num_scripts=1)
    finally:
        kit.on_ranks(sabotage.count_padding, False)
    assert not report.passed and "differs by" in str(report), str(report)
    assert check_adapter(kit, odd, checks=["layouts"], num_scripts=1).passed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "degrees", "script"),
    [
        ("wan2.2-ti2v", {"ulysses_degree": 2}, "encode@1 sp2@2,0"),
        ("wan2.2-i2v", {"ulysses_degree": 2}, "sp2@3,1"),
        ("wan2.2-t2v-a14b", {"cfg_parallel_size": 2, "ulysses_degree": 2}, "cfg2xsp2@1,3,0,2"),
    ],
)
def test_a_constant_degree_is_bit_identical_to_stock_at_that_degree(
    kits: Kits, family: str, degrees: dict[str, int], script: str
) -> None:
    """Without masks, with which stock fails at any degree but 1; so it attends to padding, where there is some."""
    kit = kits(family, od_config={"parallel_config": {"mask_sp_padding": False}})
    requests = [request for request in REQUESTS[family] if (request.guidance_scale or 0) > 1]
    found = zip(requests, kit.stock(requests, **degrees), kit.stock(requests), strict=True)
    num_divided = 0
    for request, stock, on_one_rank in found:
        made = kit.run(request, script)
        padded = stock.difference(on_one_rank) > 1e-4
        num_divided += not padded
        assert made.difference(on_one_rank) < 1e-5 if padded else made.identical(stock), request
    assert 0 < num_divided < len(requests)


@pytest.mark.thorough
def test_fastwan(kits: Kits, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Three fixed timesteps and fresh noise after each: the generator goes where the latents go."""
    model = tmp_path / "fastwan"
    fastwan(tiny_model("wan2.2-ti2v"), model)
    requests = [
        video(96, 96, 9, seed=1, steps=3),
        video(64, 64, 5, seed=2, steps=3, images=(picture(1),), num_images=2),
        video(64, 96, 5, seed=3, steps=50, guidance_scale=3.0),  # takes three steps all the same
    ]
    report = check_adapter(kits(model), requests)
    assert report.passed, str(report)


@pytest.mark.thorough
def test_an_encoder_of_images(
    kits: Kits, tiny_model: Callable[..., Path], fork_server: ForkServer, tmp_path: Path
) -> None:
    model = tmp_path / "with-image-encoder"
    fork_server.run(with_image_encoder, tiny_model("wan2.2-i2v"), model)
    # Such a model takes the last 512 tokens for those of the text.
    requests = [request.but(max_sequence_length=512) for request in IMAGE[:3]]
    report = check_adapter(kits(model), requests)
    assert report.passed, str(report)


@pytest.mark.thorough
def test_artifacts_take_what_is_computed(kits: Kits) -> None:
    """By the computation that the figures in docs/models/artifacts.md come from."""
    for family, side, image, request in (
        ("wan2.2-ti2v", 16, None, video(128, 128, 17, seed=1, guidance_scale=4.0)),
        ("wan2.2-ti2v", 16, "frame", video(256, 256, 17, seed=1, guidance_scale=4.0, images=(picture(1),))),
        ("wan2.2-t2v-a14b", 8, None, video(128, 128, 17, seed=1, solver=EULER, guidance_scale=4.0)),
        ("wan2.2-i2v", 8, "video", video(128, 128, 17, seed=1, guidance_scale=4.0, images=(picture(1),))),
    ):
        channels = {16: 48, 8: 16}[side]
        history = 0 if request.sampling["extra_args"]["sample_solver"] == "euler" else 3
        model = Wan(channels, side, image, text_width=64, history=history)
        asked = Asked(
            height=request.height or 0,
            width=request.width or 0,
            num_frames=request.num_frames,
            text_tokens=32,
            number=FLOAT32,
        )
        computed = model.artifacts(asked)
        for name, sizes in kits(family).artifact_bytes(request)["denoise"].items():
            # Besides tensors: the generator, sampling parameters, the scheduler, and the names of it all.
            assert 0 <= sum(sizes) - computed[name] <= 20_000, (family, name, sizes, computed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "request_", "message"),
    [
        ("wan2.2-ti2v", video(16, 64, 5, seed=1), "height must be between 32 and 32768 pixels, got 16"),
        ("wan2.2-ti2v", video(64, 64, 4097, seed=1), "num_frames must be between 1 and 4093, got 4097"),
        ("wan2.2-ti2v", video(64, 64, 5, seed=1, solver="dpm"), "sample_solver='dpm'"),
        ("wan2.2-ti2v", video(64, 64, 5, seed=1, flow_shift=0.0), "flow_shift must be a positive number, got 0.0"),
        ("wan2.2-ti2v", video(64, 64, 5, seed=1, steps=0), "num_inference_steps must be at least 1, got 0"),
        ("wan2.2-t2v-a14b", IMAGE[0], "image is given, but this checkpoint makes videos of text alone"),
        ("wan2.2-i2v", IMAGE[3].but(num_frames=1), "last_image needs a num_frames of at least 2"),
    ],
)
def test_what_is_refused(kits: Kits, family: str, request_: KitRequest, message: str) -> None:
    with pytest.raises(ChildError) as error:
        kits(family).candidates(request_)
    assert message in str(error.value) and "ValueError" in str(error.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "request_", "message"),
    [
        ("wan2.2-ti2v", TEXT[0].but(prompt=""), "Prompt is required"),
        (
            "wan2.2-i2v",
            IMAGE[0].but(sampling={"output_type": "pil", "extra_args": {"preencode_mp4": True}}),
            "preencode_mp4",
        ),
    ],
)
def test_what_the_pipeline_refuses(kits: Kits, family: str, request_: KitRequest, message: str) -> None:
    with pytest.raises(ChildError) as error:
        kits(family).run(request_, "sp1@0")
    assert message in str(error.value) and "TaskError" in str(error.value)
