"""Several requests in one denoising pass: the same results as alone, and a reason where they cannot share one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gfdit.core.commands import RunTask
from gfdit.observe.recording import RecordingReader
from tests.support.images import Engine, ImageRequest

pytestmark = pytest.mark.timeout(300)

# Prompts and numbers of steps differ: one request pads its text for the other, and goes on alone at the end.
SHORT = ImageRequest(144, 144, steps=5, seed=1)
LONG = ImageRequest(144, 144, steps=7, seed=2, prompt="a red panda that eats cherries in the rain")
# Measured: latents of magnitude 5 differ by up to 2e-6, accumulated over the steps.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def watched(engine: Engine) -> Iterator[Engine]:
    engine.call("watch_pipeline")
    yield engine


def run(engine: Engine, requests: list[ImageRequest]) -> tuple[list[np.ndarray], list[int], dict[int, np.ndarray]]:
    """Images, requests per denoising pass of rank 0, and final latents by seed."""
    images = engine.images(requests)
    num_requests, latents = engine.call("seen")[0]
    return images, num_requests, latents


@pytest.mark.parametrize("layout", ["sp1@0", "sp2@0,1", "sp4@0,2,1,3"])
def test_compatible_steps_share_a_pass_and_are_the_steps_alone(watched: Engine, layout: str) -> None:
    pair = [request.under(f"batch {layout}") for request in (SHORT, LONG)]
    images, num_requests, latents = run(watched, pair)
    assert num_requests.count(2) >= 3, "the two requests hardly met"
    assert sum(num_requests) == SHORT.steps + LONG.steps
    for request, image in zip(pair, images, strict=True):
        (alone,), passes, expected = run(watched, [request])
        assert passes == [1] * request.steps
        assert np.abs(latents[request.seed] - expected[request.seed]).max() <= TOLERANCE
        assert np.abs(image.astype(int) - alone.astype(int)).max() <= 1


@pytest.mark.parametrize("layout", ["sp1@0", "cfg2xsp2@0,3,1,2"])
def test_guided_requests_share_a_pass(watched: Engine, layout: str) -> None:
    guided = [ImageRequest(96, 160, 4, 3, "blurry"), ImageRequest(96, 160, 4, 4, "dark and noisy, low quality")]
    pair = [request.under(f"batch {layout}") for request in guided]
    _, num_requests, latents = run(watched, pair)
    assert 2 in num_requests
    for request in pair:
        _, _, expected = run(watched, [request])
        assert np.abs(latents[request.seed] - expected[request.seed]).max() <= TOLERANCE


def test_a_batch_is_not_one_request_twice(watched: Engine) -> None:
    """Negative control: the tolerance tells requests apart."""
    _, _, latents = run(watched, [request.under("batch sp1@0") for request in (SHORT, LONG)])
    assert np.abs(latents[SHORT.seed] - latents[LONG.seed]).max() > 1e3 * TOLERANCE


def test_what_cannot_share_a_pass_runs_one_after_the_other(watched: Engine, recording_path: Path) -> None:
    """One dispatch, since kind, model, shape and guidance agree, but the scale of the guidance does not."""
    pair = [
        ImageRequest(128, 128, 4, 5, "blurry", true_cfg_scale=2.0).under("batch sp2@1,0"),
        ImageRequest(128, 128, 4, 6, "blurry", true_cfg_scale=5.0).under("batch sp2@1,0"),
    ]
    before = num_batches(recording_path)
    images, num_requests, _ = run(watched, pair)
    assert watched.drained()
    assert num_batches(recording_path) > before
    assert num_requests == [1] * 8
    for request, image in zip(pair, images, strict=True):
        assert image.tobytes() == watched.image(request).tobytes()


def num_batches(recording: Path) -> int:
    """Dispatches of several tasks so far."""
    with RecordingReader(recording) as reader:
        return sum(isinstance(entry, RunTask) and len(entry.tasks) > 1 for entry in reader.entries())
