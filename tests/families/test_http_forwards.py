"""A client's view of families without an adapter: `gfdit serve` over HTTP, by the stock `forward` of each.

A request that changes its rank at every step makes the pixels of one that stays, one with a killed worker as well.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from gfdit.cli.main import main
from gfdit.observe.timeline import read_timeline
from gfdit.omni.plugin import find_accelerator
from tests.families.image_requests import picture
from tests.support import local_http
from tests.support.leftovers import command_line
from tests.support.server import ServerProcess, free_port, start_server
from tests.support.videos import frames_of, post_video
from tests.support.waiting import wait_until

# Each has a server of its own; `make families` runs them, too. In `make test` are the same forwards without HTTP
# (tests/adapters), and HTTP with other pipelines (tests/elastic).
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform"),
]

#: What is asked for of each; those with an image are edits.
IMAGES: dict[str, dict[str, Any]] = {
    "flux-kontext": {"guidance_scale": 3.5},
    "flux2": {"guidance_scale": 4.0},
    "flux2-klein": {"guidance_scale": 1.0},
    "krea2": {"guidance_scale": 4.0, "negative_prompt": "blurry"},
    "omnigen2": {"guidance_scale": 4.0, "negative_prompt": "blurry"},
    "ovis-image": {"guidance_scale": 4.0, "negative_prompt": "blurry"},
    "sdxl": {"guidance_scale": 5.0, "negative_prompt": "blurry"},
}
EDITS = {"longcat-image-edit": {"guidance_scale": "4.0"}}
VIDEOS = {"hunyuan-video15": {"guidance_scale": 6.0}, "wan-vace": {"guidance_scale": 4.0}}
STAYS, MOVES = "sp1@0", "encode@1 sp1@0 sp1@1"


@pytest.fixture(scope="module", params=(*IMAGES, *EDITS, *VIDEOS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(family)


@pytest.fixture(scope="module")
def server(family: str, folder: Path) -> Iterator[ServerProcess]:
    assert main(["tiny-model", family, str(folder / "model")]) == 0
    argv = [
        "gfdit",
        "serve",
        str(folder / "model"),
        "--ranks",
        "2",
        "--policy",
        "gfdit.policies.layout_script:LayoutScript",
    ]
    argv += [
        "--set",
        f"cache_dir={folder}",
        "--set",
        "warmup_size=64",
        "--timeline",
        str(folder / "timeline.json"),
    ]
    with start_server(
        [*argv, "--", "--enforce-eager", "--dtype", "float32"], free_port(), folder / "log"
    ) as server:
        yield server


def make(server: ServerProcess, family: str, script: str, steps: int = 4, seed: int = 1) -> np.ndarray:
    """Pixels of an image or of the frames of a video."""
    extra = {"gfdit": {"slo_class": script}}
    fields: dict[str, Any] = {"prompt": "a red panda", "num_inference_steps": steps, "seed": seed}
    if family in VIDEOS:
        fields |= {"size": "64x64", "num_frames": 5, **VIDEOS[family], "extra_params": extra}
        response = post_video(server.base_url, "/v1/videos/sync", fields)
        assert response.status_code == 200, response.text
        return frames_of(response.content)
    fields["size"] = "128x128"
    url = f"{server.base_url}/v1/images"
    if family in EDITS:
        buffer = io.BytesIO()
        picture().save(buffer, format="PNG")
        form = {**fields, **EDITS[family], "extra_params": json.dumps(extra)}
        form = {name: str(value) for name, value in form.items()}
        files = {"image": ("in.png", buffer.getvalue(), "image/png")}
        response = local_http.post(f"{url}/edits", data=form, files=files)
    else:
        body = {**fields, **IMAGES[family], "extra_params": extra}
        response = local_http.post(f"{url}/generations", json=body)
    assert response.status_code == 200, response.text
    image = base64.b64decode(response.json()["data"][0]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(image)))


def test_a_request_that_moves_at_every_step(server: ServerProcess, family: str, folder: Path) -> None:
    stayed = make(server, family, STAYS)
    assert stayed.std() > 1
    with ThreadPoolExecutor() as pool:  # in turns with another one
        moved, other = (pool.submit(make, server, family, MOVES, seed=seed) for seed in (1, 2))
        assert np.array_equal(moved.result(), stayed)
        assert not np.array_equal(other.result(), stayed)

    def ranks_of_steps() -> set[int]:
        return {span.rank for span in read_timeline(folder / "timeline.json") if span.kind == "denoise"}

    wait_until(lambda: ranks_of_steps() == {0, 1}, "the timeline has steps on both ranks")


@pytest.mark.thorough
def test_a_request_whose_worker_is_killed(server: ServerProcess, family: str, folder: Path) -> None:
    expected = make(server, family, MOVES, steps=40)
    before = len(read_timeline(folder / "timeline.json"))
    with ThreadPoolExecutor() as pool:
        request = pool.submit(make, server, family, MOVES, steps=40)
        wait_until(lambda: len(read_timeline(folder / "timeline.json")) > before + 5, "it is at its steps")
        os.kill(workers(server)[1], signal.SIGKILL)
        assert np.array_equal(request.result(), expected)


def workers(server: ServerProcess) -> list[int]:
    """Process ids, in the order in which they were started."""
    found = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "DiffusionWorker" in "".join(command_line(child))
    ]
    return [child.pid for child in sorted(found, key=lambda child: child.create_time())]
