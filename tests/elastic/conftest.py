"""One elastic engine with four CPU ranks for the whole folder; it is slow to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from gfdit.cli.main import main
from gfdit.omni.plugin import prepare_cpu_process
from tests.elastic.shapes import ALL, TILED, TRAFFIC
from tests.support.images import Engine, ImageRequest, stock_images
from tests.support.leftovers import Leftovers, command_line
from tests.support.waiting import HANG_S


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen-image"
    assert main(["tiny-model", "qwen-image", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[ImageRequest, np.ndarray]:
    """What stock vLLM-Omni makes of the requests on one rank."""
    requests = (*ALL, *TRAFFIC, TILED)
    images = stock_images(model, tmp_path_factory.mktemp("stock"), requests, vae_use_tiling=True)
    return dict(zip(requests, images, strict=True))


@pytest.fixture(scope="session")
def timeline_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("timeline") / "timeline.json"


@pytest.fixture(scope="session")
def recording_path(timeline_path: Path) -> Path:
    return timeline_path.with_name("recording.jsonl")


@pytest.fixture(scope="package")
def engine(model: Path, timeline_path: Path, recording_path: Path) -> Iterator[Engine]:
    prepare_cpu_process()
    left = Leftovers(Engine.results)
    engine = Engine(
        model,
        engine_backend="gfdit.omni.engine.ElasticDiffusionEngine",
        worker_extension_cls="tests.support.worker_extension.TestExtension",
        vae_use_tiling=True,
        additional_config={
            "gfdit": {
                "ranks": 4,
                "policy": "gfdit.policies.layout_script:LayoutScript",
                "timeline": str(timeline_path),
                "record": str(recording_path),
                "threads_per_rank": 1,
                # Never: peers of a rank that fails or ends are woken. If they were not, the test would hang.
                "comm_timeout_s": 10 * HANG_S,
                "heartbeat_timeout_s": 30,
            }
        },
    )
    engine.watch_workers()
    yield engine
    for process in psutil.Process().children():
        if "gfdit.runtime.control_process" in command_line(process):
            left.watch(process.pid)
    engine.close()
    left.assert_none()
