"""The client that most users have, against a server of ours."""

from __future__ import annotations

import base64
import io

import openai
from openai.types import ImagesResponse
from PIL import Image

from tests.support.server import KEY, ServerProcess
from tests.support.waiting import HANG_S


def openai_client(server: ServerProcess) -> openai.OpenAI:
    """One that does not try again by itself and knows no proxy."""
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=0, timeout=HANG_S, http_client=http
    )


def only_image(response: ImagesResponse) -> Image.Image:
    assert response.data is not None
    (made,) = response.data
    assert made.b64_json is not None
    return Image.open(io.BytesIO(base64.b64decode(made.b64_json)))
