"""Many requests at once on random layouts, some abandoned: every image right, nothing left behind.

The short slice runs with the other tests; ``make soak`` runs as many as asked for.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from tests.elastic.shapes import TRAFFIC
from tests.support.images import Engine, ImageRequest

BATCH = 8


def random_script(rng: random.Random, guided: bool) -> str:
    words = [f"{task}@{rng.randrange(4)}" for task in ("encode", "prepare", "decode")]
    for _ in range(6):
        sp, cfg = rng.choice([(1, 1), (2, 1), (4, 1)] + ([(1, 2), (2, 2)] if guided else []))
        words.append(f"cfg{cfg}xsp{sp}@{','.join(map(str, rng.sample(range(4), sp * cfg)))}")
    return " ".join(words)


def test_random_traffic(
    engine: Engine, stock: dict[ImageRequest, np.ndarray], request: pytest.FixtureRequest
) -> None:
    num_requests = request.config.getoption("--soak-requests")
    rng = random.Random(request.config.getoption("--soak-seed"))
    for _ in range(0, num_requests, BATCH):
        chosen = [rng.choice(TRAFFIC) for _ in range(BATCH)]
        scripted = [shape.under(random_script(rng, shape.negative_prompt is not None)) for shape in chosen]
        doomed = ImageRequest(128, 128, steps=200).under(random_script(rng, guided=False))
        leaving = engine.begin(doomed)
        time.sleep(rng.uniform(0.05, 0.5))  # wherever that finds it
        leaving.cancel()
        for shape, script, image in zip(chosen, scripted, engine.images(scripted), strict=True):
            difference = np.abs(image.astype(int) - stock[shape].astype(int)).max()
            assert difference <= 1, script
    assert engine.drained(), "artifacts are left on a rank"
    assert engine.call("tripwire_hits") == [[], [], [], []]
