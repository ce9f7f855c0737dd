"""A client's view of FLUX, Stable Diffusion 3 and Z-Image: `gfdit serve` over HTTP."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from gfdit.cli.main import main
from gfdit.observe.timeline import read_timeline
from tests.support import local_http
from tests.support.server import ServerProcess, free_port, start_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.thorough

HEIGHT, WIDTH = 144, 208
GUIDED: dict[str, dict[str, Any]] = {
    "flux": {"negative_prompt": "blurry", "true_cfg_scale": 4.0},
    "sd3": {"guidance_scale": 4.0},
    "z-image": {"guidance_scale": 4.0, "negative_prompt": "blurry"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "flux": ({"size": "8x128"}, "width must be at least 16 pixels, got 8"),
    "sd3": ({"size": "100x128"}, "width must be a multiple of 16 up to 1024 pixels, got 100"),
    "z-image": ({"size": "128x120"}, "height must be a multiple of 16 up to 2048 pixels, got 120"),
}


@pytest.fixture(scope="module", params=GUIDED)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(family)


@pytest.fixture(scope="module")
def server(family: str, folder: Path) -> Iterator[ServerProcess]:
    assert main(["tiny-model", family, str(folder / "model")]) == 0
    argv = ["gfdit", "serve", str(folder / "model"), "--ranks", "2", "--policy", "equipartition"]
    argv += ["--timeline", str(folder / "timeline.json"), "--", "--enforce-eager", "--dtype", "float32"]
    with start_server(argv, free_port(), folder / "log") as server:
        yield server


def post(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"prompt": "a red panda", "size": f"{WIDTH}x{HEIGHT}", "num_inference_steps": 4, "seed": 1}
    url = f"{server.base_url}/v1/images/generations"
    return local_http.post(url, json={**body, "guidance_scale": 0.0, **fields})


def pixels(response: httpx.Response) -> list[np.ndarray]:
    assert response.status_code == 200, response.text
    images = [base64.b64decode(image["b64_json"]) for image in response.json()["data"]]
    return [np.asarray(Image.open(io.BytesIO(image))) for image in images]


def test_images(server: ServerProcess, family: str, folder: Path) -> None:
    (plain,) = pixels(post(server, extra_params={"gfdit": {"priority": 3}}))
    (guided,) = pixels(post(server, **GUIDED[family]))
    assert plain.shape == guided.shape == (HEIGHT, WIDTH, 3) and plain.std() > 1
    assert np.array_equal(pixels(post(server))[0], plain)
    assert not np.array_equal(guided, plain)
    one, other = pixels(post(server, n=2))
    assert not np.array_equal(one, other)
    timeline = folder / "timeline.json"
    wait_until(lambda: any(span.sp == 2 for span in read_timeline(timeline)), "alone, a request has both ranks")


def test_what_is_wrong_is_named(server: ServerProcess, family: str) -> None:
    fields, message = REFUSED[family]
    response = post(server, **fields)
    assert response.status_code == 400 and message in json.dumps(response.json())
    assert post(server).status_code == 200
