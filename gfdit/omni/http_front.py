"""In front of vLLM-Omni's endpoints: what a client and an operator expect of a server that fails or stops.

An ASGI middleware, given to vLLM with ``--middleware gfdit.omni.http_front.HttpFront`` (``gfdit serve`` does so).
vLLM-Omni answers every failure that is not the client's fault with HTTP 500, and stops at SIGTERM without a word
to those who wait. With this

- a failure after which the same request may well succeed is HTTP 503, and 503 and 429 have a ``Retry-After``;
- requests carry the client's id and the trace that it is in (:mod:`gfdit.omni.http_callers`);
- ``/v1/images/edits`` takes OpenAI's ``mask``, and ``extra_params`` as other endpoints do;
- what would end the server on its way to the engine is HTTP 400 (:mod:`gfdit.omni.http_inputs`);
- there are routes for routers and operators (:mod:`gfdit.omni.http_operations`);
- while an operator drains the server, new requests get HTTP 503, and ``/health`` stays 200;
- at SIGTERM or SIGINT requests that run have ``shutdown_timeout_s`` to end; ``/health`` and new requests get HTTP
  503 meanwhile, and so do those that run when time is over, or at a second signal.

vLLM's own ``--shutdown-timeout`` is of no use here: vLLM-Omni 0.30 refuses it for diffusion models.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gfdit.core.json_fields import MAX_DEPTH
from gfdit.observe.logs import put_under_vllm
from gfdit.observe.metrics import SHOWN
from gfdit.omni.http_callers import carry_callers, note_caller
from gfdit.omni.http_edits import complete_edits
from gfdit.omni.http_inputs import check_inputs
from gfdit.omni.http_operations import add_operations
from gfdit.omni.retryable import SEND_AGAIN, retryable
from gfdit.omni.settings import Settings
from gfdit.runtime.guard import guarded

logger = logging.getLogger("gfdit.http")

Message = MutableMapping[str, Any]
Header = tuple[bytes, bytes]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# In front of vLLM's check of the key, which a browser cannot send for a page: it has nothing in it, and asks.
PAGE_PATH = "/v1/gfdit/ui"
_PAGE = Path(__file__).with_name("ui.html")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'"
)
_PAGE_HEADERS: list[Header] = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", _POLICY.encode()),
]

OF_OPERATORS = (
    "/v1/gfdit/",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/start_profile",
    "/stop_profile",
    "/v1/omni/",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
"""Beginnings of paths that go on while an operator drains the server."""

STOPPING = retryable("the server is shutting down")
DRAINING = retryable("the server is drained: it takes no new requests")
TOO_DEEP = f"JSON must not be nested more than {MAX_DEPTH} deep"
DOWN = retryable("the engine is down, the server's log says why")
# What a request that was told to give up has to do so, and then a task that was cancelled.
_GIVE_UP_S = 2.0


class HttpFront:
    """See the module. One instance serves an application, on its event loop."""

    def __init__(self, app: App) -> None:
        put_under_vllm()
        self._app = app
        self._running: dict[asyncio.Task[Any], None] = {}  # in order of arrival
        self._none_runs = asyncio.Event()
        self._none_runs.set()
        self._stopping = False
        self._time_is_over = asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, lambda message: self._on_lifespan(scope["app"], message, send))
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._stopping and (scope["method"] == "POST" or scope["path"] == "/health"):
            if scope["method"] == "POST" and SHOWN.server is not None:
                SHOWN.server.refused("draining")
            await _refuse(send)
        elif scope["method"] == "POST" and (server := SHOWN.server) is not None and server.draining:
            if scope["path"].startswith(OF_OPERATORS):
                await self._pass_on(scope, receive, send)
            else:
                server.refused("draining")
                await _refuse(send, DRAINING)
        elif scope["path"] == PAGE_PATH and scope["method"] == "GET":
            await _show_page(send)
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope["app"], receive, send, self._time_is_over)
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = None
        self._none_runs.clear()
        note_caller(scope["headers"])
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not self._time_is_over.is_set() or exchange.started:
                raise
            task.uncancel()
            await _refuse(send)
        except RecursionError:  # vLLM-Omni parses JSON in the fields of forms, however deep
            if exchange.started:
                raise
            await _answer(send, HTTPStatus.BAD_REQUEST, TOO_DEEP, ())
        finally:
            self._running.pop(task, None)
            if not self._running:
                self._none_runs.set()

    # Stopping

    async def _on_lifespan(self, app: Any, message: Message, send: Send) -> None:
        """Take the signals over once the server listens: vLLM's launcher has set its own handlers just before."""
        if message["type"] == "lifespan.startup.complete":
            check_inputs(app.state.engine_client)
            complete_edits(app)
            add_operations(app)
            carry_callers(app.state.engine_client)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, app)
        await send(message)

    def _on_signal(self, app: Any) -> None:
        if self._stopping:
            self._time_is_over.set()
        else:
            self._stopping = True
            if SHOWN.server is not None:
                SHOWN.server.stopping = True
            self._stop = asyncio.get_running_loop().create_task(self._drain(app))

    async def _drain(self, app: Any) -> None:
        """Whatever goes wrong here, the server stops."""
        try:
            with guarded("waiting for requests to end", lambda _: None):
                await self._let_end(_grace_s(app))
        finally:
            # From here on as when vLLM's server ends by itself: it closes connections, then the engine.
            app.state.server.config.timeout_graceful_shutdown = _GIVE_UP_S
            app.state.server.should_exit = True

    async def _let_end(self, grace_s: float) -> None:
        logger.info("stopping: %d requests have %g s to end", len(self._running), grace_s)
        await _first_of(self._none_runs, self._time_is_over, grace_s)
        if self._running:
            logger.info("stopping: %d requests are given up", len(self._running))
            self._time_is_over.set()
            await _within(_GIVE_UP_S, self._none_runs)
        for task in self._running:
            task.cancel()
        await _within(_GIVE_UP_S, self._none_runs)


async def _show_page(send: Send) -> None:
    await send({"type": "http.response.start", "status": HTTPStatus.OK.value, "headers": _PAGE_HEADERS})
    await send({"type": "http.response.body", "body": _PAGE.read_bytes()})


class _Exchange:
    """One request and its response. Errors are held back until they are whole, to be seen to."""

    def __init__(self, app: Any, receive: Receive, send: Send, time_is_over: asyncio.Event) -> None:
        self.started = False
        self._app = app
        self._receive = receive
        self._send = send
        self._time_is_over = time_is_over
        self._given_up = False
        self._held: Message | None = None
        self._body = b""

    async def receive(self) -> Message:
        """When time is over, what a client sends that goes away: the handler then ends and frees its ranks."""
        message = asyncio.ensure_future(self._receive())
        over = asyncio.ensure_future(self._time_is_over.wait())
        try:
            await asyncio.wait({message, over}, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return message.result()
            self._given_up = True
            return {"type": "http.disconnect"}
        finally:
            message.cancel()
            over.cancel()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            if message["status"] >= HTTPStatus.BAD_REQUEST or self._given_up:
                self._held = message
                return
        if self._held is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._send_held(self._held)

    async def _send_held(self, start: Message) -> None:
        text = self._body.decode(errors="replace")
        if self._given_up:
            await _refuse(self._send)
        elif (answer := await self._retryable(start["status"], text)) is not None:
            await _answer(self._send, *answer, start["headers"])
        else:
            await self._send(start)
            await self._send({"type": "http.response.body", "body": self._body})

    async def _retryable(self, status: int, text: str) -> tuple[HTTPStatus, str] | None:
        """Status and text of an error after which the request may be sent again."""
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return HTTPStatus.TOO_MANY_REQUESTS, _error_of(text)
        if status != HTTPStatus.INTERNAL_SERVER_ERROR:
            return None
        if SEND_AGAIN in text:
            return HTTPStatus.SERVICE_UNAVAILABLE, _error_of(text)
        try:
            await self._app.state.engine_client.check_health()
        except Exception as error:
            logger.error("the engine is down: %s", error)
            # What went wrong with a request of a dead engine is whatever part of it was missed first.
            return HTTPStatus.SERVICE_UNAVAILABLE, DOWN
        return None


def _grace_s(app: Any) -> float:
    """``shutdown_timeout_s`` as given. The engine has checked all settings; parsing loads the policy again."""
    config = app.state.engine_client.get_diffusion_od_config()
    given = (getattr(config, "additional_config", None) or {}).get("gfdit") or {}
    return float(given.get("shutdown_timeout_s", Settings().shutdown_timeout_s))


async def _refuse(send: Send, why: str = STOPPING) -> None:
    """The connection ends, too: the next request should go elsewhere."""
    await _answer(send, HTTPStatus.SERVICE_UNAVAILABLE, why, [(b"connection", b"close")])


async def _answer(send: Send, status: HTTPStatus, error: str, headers: Iterable[Header]) -> None:
    """An error in vLLM's format, and after how long to send the request again if that is of any use."""
    words = {"message": error, "type": status.phrase, "param": None, "code": status.value}
    body = json.dumps({"error": words}).encode()
    found = re.search(r"retry after (\d+) s", error)
    own = {
        b"content-type": b"application/json",
        b"content-length": str(len(body)).encode(),
    }
    if status != HTTPStatus.BAD_REQUEST:
        own[b"retry-after"] = str(max(1, int(found[1])) if found else 1).encode()
    kept = [(name, value) for name, value in headers if name.lower() not in own]
    await send({"type": "http.response.start", "status": status.value, "headers": [*own.items(), *kept]})
    await send({"type": "http.response.body", "body": body})


def _error_of(text: str) -> str:
    """What an error response says, in either of the two forms that vLLM-Omni's have."""
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(text)
        return str(found["detail"] if "detail" in found else found["error"]["message"])
    return text


async def _within(timeout_s: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


async def _first_of(one: asyncio.Event, other: asyncio.Event, timeout_s: float) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
