"""A pipeline without an adapter of its own runs through vLLM-Omni's step execution, elastic just the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gfdit.omni.plugin import prepare_cpu_process
from tests.elastic.shapes import PLAIN, TWO_IMAGES
from tests.support.images import Engine, ImageRequest

pytestmark = pytest.mark.timeout(300)
REQUESTS = (PLAIN, TWO_IMAGES)


@pytest.fixture(scope="module")
def generic_engine(model: Path) -> Iterator[Engine]:
    prepare_cpu_process()
    settings = {
        "ranks": 2,
        "policy": "gfdit.policies.layout_script:LayoutScript",
        "adapter": "gfdit.adapters.step_execution:StepExecutionAdapter",
        "threads_per_rank": 1,
    }
    engine = Engine(
        model,
        engine_backend="gfdit.omni.engine.ElasticDiffusionEngine",
        additional_config={"gfdit": settings},
    )
    yield engine
    engine.close()


def test_images_are_those_of_stock(generic_engine: Engine, stock: dict[ImageRequest, np.ndarray]) -> None:
    for script in ("sp1@0", "encode@1 sp1@0 sp1@1 decode@0", "encode@1 sp2@1,0 sp1@1 sp2@0,1"):
        images = generic_engine.images([request.under(script) for request in REQUESTS])
        for request, image in zip(REQUESTS, images, strict=True):
            assert image.tobytes() == stock[request].tobytes(), (script, request)
