"""What routers, autoscalers and operators ask of a server, under ``/v1/gfdit/`` and so behind its API key.

- ``ready``: HTTP 200 if requests should be sent here, else 503 with the reason. ``/health`` is about the process.
- ``load``: what there is to serve with, what is left to do, by when it is due, and what requests take.
- ``requests``: every live request, what it is at and how much slack it has.
- ``state``: these two, the ranks, deadlines and faults, for people: `gfdit top` and the page show it.
- ``admin``: what is in force, and, with POST, changes of it (:mod:`gfdit.omni.admin`), for who has the key.
- ``ui``: the page, one file without anything secret; it asks for the key and then for ``state``.

All but changes read what the engine in this process knows (:mod:`gfdit.observe.metrics`), so they cost the engine
nothing and answer while it is busy. ``docs/metrics.md`` has the fields, ``docs/operate.md`` the changes.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gfdit.observe.metrics import SHOWN, ServerMetrics
from gfdit.omni.admin import RUNNING

ELSEWHERE = "no engine in this process: it takes one replica per server"
WITHOUT_KEY = "a server without an API key cannot be changed while it runs: start it with -- --api-key KEY"

router = APIRouter(prefix="/v1/gfdit")

_AWAKE = "gfdit's ranks do not sleep, since each must be able to run any task: end the server to have its memory"
_BY_REQUEST = "gfdit loads an adapter where a request names it, with its path, in the field lora, and not before"
_NO_PROFILER = "this server has no profiler: its stage needs a profiler_config"
REFUSED = {
    "/sleep": _AWAKE,
    "/wake_up": _AWAKE,
    "/v1/omni/sleep": _AWAKE,
    "/v1/omni/wakeup": _AWAKE,
    "/v1/load_lora_adapter": _BY_REQUEST,
    "/v1/unload_lora_adapter": _BY_REQUEST,
}
"""What vLLM-Omni's routes would do by halves: they answer HTTP 501 and this line, and touch nothing."""
WITHOUT_PROFILER = {"/start_profile": _NO_PROFILER, "/stop_profile": _NO_PROFILER}


@router.get("/ready")
async def ready() -> JSONResponse:
    server = SHOWN.server
    reason = ELSEWHERE if server is None else server.why_not()
    status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse({"ready": reason is None, "reason": reason}, status.value)


@router.get("/load")
async def load() -> JSONResponse:
    return _answer(None if SHOWN.server is None else SHOWN.server.load())


@router.get("/requests")
async def requests() -> JSONResponse:
    return _answer(None if SHOWN.server is None else SHOWN.server.requests())


@router.get("/state")
async def state() -> JSONResponse:
    return _answer(None if SHOWN.server is None else SHOWN.server.state())


@router.get("/admin")
async def in_force() -> JSONResponse:
    return _answer(None if RUNNING.admin is None else RUNNING.admin.state())


@router.post("/admin")
async def change(request: Request) -> JSONResponse:
    """HTTP 400 for what cannot be, 403 where nobody could be asked for a key; then nothing has changed."""
    if RUNNING.admin is None:
        return _answer(None)
    if not asks_for_key(request.app):
        return JSONResponse({"error": WITHOUT_KEY}, HTTPStatus.FORBIDDEN.value)
    body = await request.body()
    try:
        return _answer(await asyncio.to_thread(RUNNING.admin.change, body))
    except ValueError as error:
        return JSONResponse({"error": str(error)}, HTTPStatus.BAD_REQUEST.value)
    except (RuntimeError, TimeoutError) as error:  # the engine is down, or nobody knows
        return JSONResponse({"error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE.value)


def asks_for_key(app: Any) -> bool:
    # Only in a server, which has vLLM: the routes themselves need nothing of it.
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    return any(one.cls is AuthenticationMiddleware for one in app.user_middleware)


def _answer(found: dict[str, Any] | None) -> JSONResponse:
    if found is None:
        return JSONResponse({"error": ELSEWHERE}, HTTPStatus.SERVICE_UNAVAILABLE.value)
    return JSONResponse(found)


def add_operations(app: Any) -> None:
    """Give ``app`` the routes, refuse others, and give vLLM-Omni's gauges of requests the right values."""
    app.include_router(router)
    refuse(app)
    if (server := SHOWN.server) is not None:
        client = app.state.engine_client
        server.is_paused = lambda: bool(getattr(client, "_paused", False))
        correct_gauges(client, server)


def refuse(app: Any) -> None:
    """Have ``app`` answer with a line what does not go with this engine."""
    there = {getattr(route, "path", "") for route in app.routes}
    refused = REFUSED | ({} if "/start_profile" in there else WITHOUT_PROFILER)
    app.routes[:] = [route for route in app.routes if getattr(route, "path", "") not in refused]
    replacing = APIRouter()
    for path, line in refused.items():
        replacing.add_api_route(path, partial(_refusal, line), methods=["POST"], include_in_schema=False)
    app.include_router(replacing)


async def _refusal(line: str) -> JSONResponse:
    words = {"message": line, "type": "NotImplementedError", "param": None, "code": 501}
    return JSONResponse({"error": words}, HTTPStatus.NOT_IMPLEMENTED.value)


def correct_gauges(client: Any, server: ServerMetrics) -> None:
    """``vllm_omni:num_requests_running`` and ``..._waiting`` at every scrape.

    vLLM-Omni sets them when some request's output arrives. Those that are still preprocessed wait, too.
    """
    metrics = getattr(client, "prom_metrics", None)
    running, waiting = getattr(metrics, "_running", None), getattr(metrics, "_waiting", None)
    if running is None or waiting is None or not getattr(metrics, "_log_stats", True):
        return
    running.set_function(lambda: server.num_running)
    waiting.set_function(lambda: max(0, len(client.request_states) - server.num_running))
