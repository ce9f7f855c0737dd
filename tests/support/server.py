"""A real server in a test: start it, wait until it answers, talk to it, leave nothing behind.

with start_server(["vllm", "serve", model, "--omni", ...], free_port(), tmp_path / "log") as server:
    status, image = generate_image(server.base_url, "a red panda", (128, 128), steps=4, seed=1)
"""

import base64
import io
from collections.abc import Mapping
from typing import Any

import httpx
from PIL import Image

from gfdit.cli.server_process import ServerError, ServerProcess, free_port, start_server
from tests.support import local_http
from tests.support.waiting import HANG_S

__all__ = ["KEY", "ServerError", "ServerProcess", "free_port", "generate_image", "start_server"]

KEY = "none"
"""That of servers that ask for one; others do not mind."""


def generate_image(
    base_url: str,
    prompt: str,
    size: tuple[int, int],
    steps: int,
    seed: int,
    negative_prompt: str | None = None,
    extra_params: Mapping[str, Any] | None = None,
    timeout_s: float = HANG_S,
) -> tuple[int, Any]:
    """POST one request; `size` is (width, height). Returns the status and the image, or the error's JSON."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "size": f"{size[0]}x{size[1]}",
        "num_inference_steps": steps,
        "seed": seed,
        "response_format": "b64_json",
    }
    if negative_prompt is not None:
        body["negative_prompt"] = negative_prompt
    if extra_params is not None:
        body["extra_params"] = dict(extra_params)
    response = local_http.post(
        f"{base_url}/v1/images/generations",
        json=body,
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=timeout_s,
    )
    if response.status_code != httpx.codes.OK:
        return response.status_code, response.json()
    png = base64.b64decode(response.json()["data"][0]["b64_json"])
    return response.status_code, Image.open(io.BytesIO(png))
