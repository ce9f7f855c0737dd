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
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from gfdit.observe.metrics import SHOWN, ServerMetrics
from gfdit.omni.admin import RUNNING

ELSEWHERE = "no engine in this process: it takes one replica per server"
WITHOUT_KEY = "a server without an API key cannot be changed while it runs: start it with -- --api-key KEY"

router = APIRouter(prefix="/v1/gfdit")


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
    return any(one.cls is AuthenticationMiddleware for one in app.user_middleware)


def _answer(found: dict[str, Any] | None) -> JSONResponse:
    if found is None:
        return JSONResponse({"error": ELSEWHERE}, HTTPStatus.SERVICE_UNAVAILABLE.value)
    return JSONResponse(found)


def add_operations(app: Any) -> None:
    """Give ``app`` the routes, and vLLM-Omni's gauges of requests the right values."""
    app.include_router(router)
    if (server := SHOWN.server) is not None:
        correct_gauges(app.state.engine_client, server)


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
