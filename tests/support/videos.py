"""Videos over HTTP: the two endpoints of vLLM-Omni, and the frames of what comes back."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import av
import httpx
import numpy as np
from PIL import Image

from tests.support import local_http
from tests.support.waiting import wait_until


def post_video(
    base_url: str, path: str, fields: Mapping[str, Any], image: Image.Image | None = None
) -> httpx.Response:
    """A request for a video as a form; ``image`` is its first frame. ``extra_params`` may be an object."""
    form = {
        name: json.dumps(value) if isinstance(value, Mapping) else str(value) for name, value in fields.items()
    }
    # Always a file of some sort: that is what makes it a multipart form.
    files: dict[str, Any] = {name: (None, value) for name, value in form.items()}
    if image is not None:
        png = io.BytesIO()
        image.save(png, "png")
        files["input_reference"] = ("first_frame.png", png.getvalue(), "image/png")
    return local_http.post(f"{base_url}{path}", files=files)


def get(base_url: str, path: str) -> httpx.Response:
    return local_http.get(f"{base_url}{path}")


def wait_for_job(base_url: str, job_id: str) -> list[dict[str, Any]]:
    """Everything that was said of a job, a line per change, until it is completed or failed."""
    said: list[dict[str, Any]] = []

    def ended() -> bool:
        job = get(base_url, f"/v1/videos/{job_id}").json()
        if not said or job["status"] != said[-1]["status"]:
            said.append(job)
        return job["status"] in ("completed", "failed")

    wait_until(ended, f"{job_id} is completed or failed")
    return said


def frames_of(mp4: bytes) -> np.ndarray:
    """(frames, height, width, 3) uint8."""
    with av.open(io.BytesIO(mp4), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
