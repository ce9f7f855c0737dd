"""Step caches under traffic: many requests in turns, on layouts that stay or change, some abandoned.

``make soak-caches`` runs 200 with each cache. What the other tests see of step caches is in
``tests/adapters/test_step_caches.py``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest
from gfdit.adapters.testing.outputs import Output
from tests.adapters.test_step_caches import count_skips
from tests.support.images import Engine, ImageRequest
from tests.support.leftovers import Leftovers
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.thorough

BATCH = 8
# Random weights change more from step to step than trained ones do.
CACHES: dict[str, dict[str, Any]] = {
    "cache_dit": {"max_warmup_steps": 2, "residual_diff_threshold": 0.9, "max_continuous_cached_steps": 2},
    "tea_cache": {"rel_l1_thresh": 0.6},
}
# Lengths that two ranks share without padding: stock's means over tokens count what is added.
TRAFFIC = (
    ImageRequest(128, 128, steps=8, seed=21),
    ImageRequest(96, 128, steps=7, seed=22, negative_prompt="blurry"),
    ImageRequest(160, 96, steps=9, seed=23),
)
#: By stock's degree: scripts at it throughout, on whichever ranks.
CONSTANT = {1: ("sp1@0", "sp1@1 sp1@0", "encode@1 sp1@0 sp1@0 sp1@1 decode@1"), 2: ("sp2@0,1", "encode@1 sp2@1,0")}
CHANGING = ("sp2@0,1 sp2@0,1 sp2@0,1 sp1@1", "sp1@0 sp1@0 sp1@0 sp1@0 sp2@1,0", "sp2@0,1 sp2@1,0 sp1@0")
DOOMED = ImageRequest(128, 128, steps=200).under("sp2@0,1")


@pytest.fixture(scope="module", params=CACHES)
def cache(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"cache_backend": request.param, "cache_config": CACHES[request.param]}


@pytest.fixture(scope="module")
def stock(cache: dict[str, Any], model: Path) -> dict[int, dict[ImageRequest, np.ndarray]]:
    """What stock workers make with the cache, by degree; its engine has no such requests on several CPU ranks."""
    asked = [
        KitRequest(
            one.height,
            one.width,
            steps=one.steps,
            seed=one.seed,
            prompt=one.prompt,
            negative_prompt=one.negative_prompt,
            true_cfg_scale=one.true_cfg_scale,
        )
        for one in TRAFFIC
    ]
    with AdapterKit(model, 1, od_config=cache, comm_timeout_s=HANG_S) as kit:
        for one in asked:  # or equal images would prove nothing
            assert kit.on_ranks(count_skips, one, "transformer.transformer_blocks")[0] > 0, one
        made = {1: kit.stock(asked), 2: kit.stock(asked, ulysses_degree=2)}
    return {
        degree: {shape: grey_levels(output) for shape, output in zip(TRAFFIC, outputs, strict=True)}
        for degree, outputs in made.items()
    }


def grey_levels(output: Output) -> np.ndarray:
    """(images, height, width, 3) uint8, as vLLM-Omni makes them of what the VAE decodes, from -1 to 1."""
    pixels = (output.array.transpose(0, 2, 3, 1) / 2 + 0.5).clip(0, 1)
    return (pixels * 255).round().astype(np.uint8)


@pytest.fixture(scope="module")
def cached(cache: dict[str, Any], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    left = Leftovers(Engine.results)
    engine = Engine(
        model,
        engine_backend="gfdit.omni.engine.ElasticDiffusionEngine",
        worker_extension_cls="tests.support.worker_extension.TestExtension",
        additional_config={
            "gfdit": {
                "ranks": 2,
                "policy": "gfdit.policies.layout_script:LayoutScript",
                "threads_per_rank": 1,
                "warmup_size": 0,
                "cache_dir": str(tmp_path_factory.mktemp("cuts")),
                # Peers of a rank that skips a step which they compute would wait as long: a deadlock is a failure.
                "comm_timeout_s": HANG_S / 4,
                "task_timeout_s": HANG_S / 2,
                "heartbeat_timeout_s": 30,
            }
        },
        **cache,
    )
    engine.watch_workers()
    yield engine
    engine.close()
    left.assert_none()


def test_cached_traffic(
    cached: Engine, stock: dict[int, dict[ImageRequest, np.ndarray]], request: pytest.FixtureRequest
) -> None:
    num_requests = request.config.getoption("--soak-requests")
    rng = random.Random(request.config.getoption("--soak-seed"))
    expected = {
        shape.under(script): stock[degree][shape]
        for shape in TRAFFIC
        for degree, scripts in CONSTANT.items()
        for script in scripts
    }
    changing = [shape.under(script) for shape, script in zip(TRAFFIC, CHANGING, strict=True)]
    expected.update({one: cached.image(one) for one in changing})  # alone: traffic must not change it
    start_s = time.monotonic()
    for _ in range(0, num_requests, BATCH):
        chosen = [rng.choice(list(expected)) for _ in range(BATCH)]
        leaving = cached.begin(DOOMED)
        time.sleep(rng.uniform(0.05, 0.5))  # wherever that finds it
        leaving.cancel()
        for one, image in zip(chosen, cached.images(chosen), strict=True):
            assert difference(image, expected[one]) <= 1, one
    print(f"{num_requests} requests in {time.monotonic() - start_s:.1f} s")
    assert cached.drained(), "artifacts are left on a rank"
    assert cached.call("tripwire_hits") == [[], []]


def difference(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())
