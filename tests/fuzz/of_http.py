"""Whole HTTP requests, to vLLM-Omni's endpoints behind the front, with an engine that admits and makes nothing.

What is accepted goes as far as the message to the control process. No answer may be HTTP 500, and whatever was
sent, the next good request is served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.support.lone_engine import LoneEngine  # first: it prepares the process for vLLM-Omni on a CPU

import httpx  # isort: skip
from PIL import Image  # isort: skip
from vllm_omni.diffusion.data import OmniDiffusionConfig  # isort: skip
from vllm_omni.diffusion.request import OmniDiffusionRequest  # isort: skip

from gfdit.omni.http_edits import complete_edits  # isort: skip
from gfdit.omni.http_inputs import check_inputs  # isort: skip
from gfdit.omni.http_operations import add_operations  # isort: skip
from gfdit.runtime import messages as msg  # isort: skip
from tests.fuzz.http_requests import HttpRequest, mutated_requests  # isort: skip
from tests.fuzz.targets import Target  # isort: skip

STILL_SERVED_EVERY = 500
FRONT = "gfdit.omni.http_front.HttpFront"
_GOOD = {"prompt": "a", "size": "64x64", "num_inference_steps": 1}


class RefusedError(Exception):
    """The server has refused it: HTTP 4xx, or 503 where this server has not what is asked for."""


class FakeEngine:
    """Has what the endpoints ask of ``AsyncOmni``; admits as the engine does."""

    stage_configs = (SimpleNamespace(stage_type="diffusion", engine_args=SimpleNamespace()),)
    default_sampling_params_list: tuple[Any, ...] = ()

    def __init__(self) -> None:
        config = OmniDiffusionConfig(
            model="none", model_class_name="QwenImagePipeline", additional_config={"gfdit": {"warmup_size": 0}}
        )
        self._engine = LoneEngine(config)
        self._engine._sequence_parallel, self._engine._tiling = True, None
        self._image = Image.new("RGB", (8, 8))

    async def check_health(self) -> None:
        return None

    def get_diffusion_od_config(self) -> Any:
        return self._engine.od_config

    async def generate(self, *, prompt: Any, request_id: str, sampling_params_list: list[Any], **_: Any) -> Any:
        sampling = sampling_params_list[
            0
        ].clone()  # as on the way to the engine: of what is too deep there is none
        request = OmniDiffusionRequest(prompt, sampling, request_id)
        prepared = self._engine._prepare_request_for_admission(request)
        for submission in self._engine._convert(prepared, time.monotonic()):
            msg.encode(submission)
        yield SimpleNamespace(images=[self._image], stage_durations={}, peak_memory_mb=0.0, metrics=None)


@cache
def _app() -> Any:
    """vLLM's application with vLLM-Omni's routes and handlers, as its server builds it, and gfdit's parts."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm_omni.entrypoints.openai import api_server

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "none", "--middleware", FRONT])
    app = build_app(args, ("generate",))
    for path, methods in (("/v1/chat/completions", {"POST"}), ("/v1/models", {"GET"}), ("/health", {"GET"})):
        api_server.remove_route_from_app(app, path, methods)
    app.include_router(api_server.router)
    api_server._register_omni_exception_handlers(app)
    engine = FakeEngine()
    app.state.engine_client, app.state.stage_configs, app.state.args = engine, engine.stage_configs, args
    app.state.openai_serving_models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="none")])
    app.state.openai_serving_chat = app.state.openai_serving_video = None
    check_inputs(engine)
    complete_edits(app)
    add_operations(app)
    return app


class _Client:
    """Requests one after the other, without a network."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        transport = httpx.ASGITransport(_app(), raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://server")
        self._num_sent = 0

    def ask(self, request: HttpRequest) -> httpx.Response:
        content_type = [(b"content-type", request.content_type.encode("latin-1"))]
        headers = httpx.Headers(content_type if request.content_type else [])
        send = self._client.request(request.method, request.path, content=request.body, headers=headers)
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # for as long as it serves: other tests read the log
        try:
            return self._loop.run_until_complete(send)
        finally:
            logging.disable(before)

    def still_served(self) -> None:
        self._num_sent += 1
        if self._num_sent % STILL_SERVED_EVERY == 0:
            post = self._client.post("/v1/images/generations", json=_GOOD)
            assert self._loop.run_until_complete(post).status_code == 200, "a good request is not served any more"


@cache
def _client() -> _Client:
    return _Client()


def _http(data: bytes) -> None:
    client = _client()
    answer = client.ask(HttpRequest.parse(data))
    client.still_served()
    assert answer.status_code != 500, f"HTTP 500: {answer.text[:300]}"
    assert answer.status_code < 500 or answer.status_code in (501, 503), f"HTTP {answer.status_code}"
    if answer.status_code >= 400:
        raise RefusedError(f"HTTP {answer.status_code}")


TARGETS = (Target("HTTP requests", _http, mutated_requests, raises=(RefusedError,), weight=2),)
