"""Helios on the kit: a video in chunks, whose solver and caches vLLM-Omni keeps on the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gfdit.adapters.testing import AdapterKit, ChildError, KitRequest, check_adapter
from gfdit.core.layouts import ParallelSpec
from tests.adapters.conftest import Kits
from tools.artifact_sizes import FLOAT32, Asked, Helios

PLAIN = KitRequest(64, 64, num_frames=33, steps=3, guidance_scale=1.0)
GUIDED = KitRequest(64, 64, num_frames=33, steps=4, seed=2)  # without a negative prompt, too
TWO_CHUNKS = KitRequest(64, 96, num_frames=40, steps=3, seed=3, negative_prompt="blurry")
PYRAMID = {"is_enable_stage2": True, "pyramid_num_inference_steps_list": [2, 2, 2]}


def pyramid(**extra_args: Any) -> KitRequest:
    return KitRequest(128, 128, num_frames=66, seed=4, sampling={"extra_args": {**PYRAMID, **extra_args}})


@pytest.fixture(scope="module")
def kit(kits: Kits) -> AdapterKit:
    return kits("helios")


@pytest.mark.thorough
def test_a_video_is_that_of_stock(kit: AdapterKit) -> None:
    (stock,) = kit.stock([GUIDED])
    assert stock.array.shape == (1, 3, 33, 64, 64)
    assert kit.run(GUIDED, "encode@3 sp1@1 sp1@2 decode@0").identical(stock)
    assert kit.run(GUIDED, "sp2@1,0 cfg2xsp2@3,0,2,1 cfg2@1,3 sp4@0,2,1,3").difference(stock) < 1e-4


@pytest.mark.thorough
def test_requests_in_turns_are_the_requests_alone(kit: AdapterKit) -> None:
    """Chunks begin and end in the middle of another's solver history, and of its cached keys and values."""
    pairs = [(TWO_CHUNKS, "sp1@0 sp2@0,1"), (GUIDED, "sp1@0 sp2@1,0"), (PLAIN, "sp1@0")]
    for (request, script), output in zip(pairs, kit.run_interleaved(pairs), strict=True):
        assert output.identical(kit.run(request, script)), (request, script)


@pytest.mark.thorough
def test_a_number_of_chunks(kit: AdapterKit) -> None:
    (stock,) = kit.stock([TWO_CHUNKS])
    assert stock.array.shape == (1, 3, 66, 64, 96), "chunks are made whole"
    output = kit.run(TWO_CHUNKS, "encode@1 sp1@0 sp1@1 sp1@2 sp1@3 decode@2")
    assert output.identical(stock) and len(output.forwards) == 2 * 3


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"pyramid_num_inference_steps_list": [2, 2], "is_enable_stage2": True}, "must be a list of 3 numbers"),
        (
            {"pyramid_num_inference_steps_list": [2, 2, 0], "is_enable_stage2": True},
            "positive whole number, got 0",
        ),
        ({"history_sizes": [16, 2]}, "history_sizes must be .16, 2, 1."),
        ({"num_latent_frames_per_chunk": 5}, "num_latent_frames_per_chunk must be 9"),
    ],
)
def test_what_a_request_gets_wrong_is_named(kit: AdapterKit, extra_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ChildError, match=message):
        kit.run(GUIDED.but(sampling={"extra_args": extra_args}), "sp1@0")


def test_sizes_it_cannot_take(kit: AdapterKit) -> None:
    with pytest.raises(ChildError, match="height must be at least 16 pixels, got 8"):
        kit.run(GUIDED.but(height=8), "sp1@0")
    with pytest.raises(ChildError, match="width must be a multiple of 64 pixels, got 80"):
        kit.run(pyramid().but(width=80), "sp1@0")


def test_only_degrees_that_need_no_padding_are_offered(kit: AdapterKit) -> None:
    """Of 80 x 80 pixels the older frames make 9 tokens, and 3 by 3 by 4."""
    sp1, sp2, sp4 = (ParallelSpec(sp) for sp in (1, 2, 4))
    assert set(kit.candidates(PLAIN)) == {sp1, sp2, sp4}
    assert set(kit.candidates(GUIDED)) == {sp1, sp2, sp4, ParallelSpec(1, 2), ParallelSpec(2, 2)}
    assert set(kit.candidates(PLAIN.but(height=80, width=80))) == {sp1}
    assert set(kit.candidates(GUIDED.but(height=80, width=80))) == {sp1, ParallelSpec(1, 2)}
    assert set(kit.candidates(pyramid())) == {sp1, sp2, sp4}


@pytest.mark.thorough
def test_what_artifacts_weigh(kit: AdapterKit) -> None:
    """By the computation that the figures in docs/models/artifacts.md come from."""
    for request in (GUIDED, TWO_CHUNKS):
        asked = Asked(
            height=request.height or 0,
            width=request.width or 0,
            num_frames=request.num_frames,
            text_tokens=226,
            number=FLOAT32,
        )
        computed = Helios(text_width=64).artifacts(asked)
        for name, sizes in kit.artifact_bytes(request)["denoise"].items():
            assert 0 <= sum(sizes) - computed[name] <= 50_000, name  # the solver has six tables of 1000 numbers


@pytest.mark.thorough
def test_every_check(kit: AdapterKit) -> None:
    report = check_adapter(kit, [PLAIN, GUIDED, TWO_CHUNKS, PLAIN.but(height=80, width=80)])
    assert report.passed, str(report)


@pytest.mark.thorough
def test_a_pyramid_of_sizes(kit: AdapterKit) -> None:
    requests = [pyramid(), pyramid(use_cfg_zero_star=True)]
    report = check_adapter(
        kit, requests, num_scripts=1, checks=["sp1", "fresh", "layouts", "interleaved", "migration"]
    )
    assert report.passed, str(report)


@pytest.mark.thorough
def test_a_distilled_model(kits: Kits, kit_model: Path) -> None:
    """Its solver goes back to the noise that a chunk, or a size, began with, and makes other numbers of steps."""
    kit = kits(kit_model)
    requests = [GUIDED, TWO_CHUNKS, pyramid(is_amplify_first_chunk=True)]
    checks = ["sp1", "fresh", "layouts", "interleaved", "migration"]
    report = check_adapter(kit, requests, num_scripts=1, checks=checks)
    assert report.passed, str(report)


@pytest.mark.thorough
def test_a_constant_degree_is_that_of_stock_at_that_degree(kit: AdapterKit) -> None:
    for degrees, script in (({"ulysses_degree": 2}, "sp2@3,1"), ({"cfg_parallel_size": 2}, "cfg2@2,0")):
        (stock,) = kit.stock([TWO_CHUNKS], **degrees)
        assert kit.run(TWO_CHUNKS, script).identical(stock), script


@pytest.fixture(scope="module")
def kit_model(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with the solver of the distilled model."""
    import json
    import shutil

    folder = tmp_path_factory.mktemp("distilled") / "helios"
    shutil.copytree(tiny_model("helios"), folder)
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "scheduler_type": "dmd"}))
    return folder
