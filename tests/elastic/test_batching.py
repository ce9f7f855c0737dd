"""Several requests in one denoising pass: the same results as alone, and a reason where they cannot share one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gfdit.core.commands import RunTask
from tests.elastic.recorded import recorded_from_now
from tests.support.images import Engine, ImageRequest
from tests.support.thorough import thorough
from tests.support.waiting import wait_until

# Prompts and numbers of steps differ: one request pads its text for the other, and goes on alone at the end.
SHORT = ImageRequest(144, 144, steps=5, seed=1)
LONG = ImageRequest(144, 144, steps=7, seed=2, prompt="a red panda that eats cherries in the rain")
# Of 255: rows of a batch round differently, by 2e-6 of latents of magnitude 5.
TOLERANCE = 1


@pytest.fixture(scope="module")
def watched(engine: Engine) -> Iterator[Engine]:
    engine.call("watch_pipeline")
    yield engine


class Run(NamedTuple):
    images: list[np.ndarray]
    num_requests: list[int]  # in each pass of the transformer on rank 0


def run(engine: Engine, requests: list[ImageRequest], num_shared: int = 0) -> Run:
    """Of two requests that are sent at once one may come late: again, until they share ``num_shared`` passes."""

    def attempt() -> Run | None:
        images = engine.images(requests)
        num_requests = engine.call("seen")[0]
        return Run(images, num_requests) if num_requests.count(2) >= num_shared else None

    done = wait_until(attempt, "requests share passes")
    assert done is not None
    return done


def difference(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


@pytest.mark.parametrize("layout", ["sp1@0", "sp4@0,2,1,3", *thorough(["sp2@0,1"])])
def test_compatible_steps_share_a_pass_and_are_the_steps_alone(watched: Engine, layout: str) -> None:
    pair = [request.under(f"batch {layout}") for request in (SHORT, LONG)]
    images, num_requests = run(watched, pair, num_shared=3)
    assert sum(num_requests) == SHORT.steps + LONG.steps
    for request, image in zip(pair, images, strict=True):
        (alone,), passes = run(watched, [request])
        assert passes == [1] * request.steps
        assert difference(image, alone) <= TOLERANCE


@pytest.mark.parametrize("layout", ["cfg2xsp2@0,3,1,2", *thorough(["sp1@0"])])
def test_guided_requests_share_a_pass(watched: Engine, layout: str) -> None:
    guided = [ImageRequest(96, 160, 4, 3, "blurry"), ImageRequest(96, 160, 4, 4, "dark and noisy, low quality")]
    pair = [request.under(f"batch {layout}") for request in guided]
    images, _ = run(watched, pair, num_shared=1)
    for request, image in zip(pair, images, strict=True):
        (alone,), _ = run(watched, [request])
        assert difference(image, alone) <= TOLERANCE


def test_a_batch_is_not_one_request_twice(watched: Engine) -> None:
    """Negative control: the tolerance tells requests apart."""
    images, _ = run(watched, [request.under("batch sp1@0") for request in (SHORT, LONG)])
    assert difference(*images) > 10 * TOLERANCE


def test_what_cannot_share_a_pass_runs_one_after_the_other(watched: Engine, recording_path: Path) -> None:
    """One dispatch, since kind, model, shape and guidance agree, but the scale of the guidance does not."""
    pair = [
        ImageRequest(128, 128, 4, 5, "blurry", true_cfg_scale=2.0).under("batch sp2@1,0"),
        ImageRequest(128, 128, 4, 6, "blurry", true_cfg_scale=5.0).under("batch sp2@1,0"),
    ]
    with recorded_from_now(recording_path) as recorded:

        def share_a_dispatch() -> bool:
            images, num_requests = run(watched, pair)
            assert set(num_requests) == {1}
            for request, image in zip(pair, images, strict=True):
                assert image.tobytes() == watched.image(request).tobytes()
            return any(isinstance(entry, RunTask) and len(entry.tasks) > 1 for entry in recorded.entries())

        wait_until(share_a_dispatch, "requests share a dispatch")
