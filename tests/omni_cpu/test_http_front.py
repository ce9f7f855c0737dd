"""What the middleware makes of answers, and of the server's end, with an application that needs no model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from gfdit.omni.http_front import HttpFront
from gfdit.omni.retryable import SEND_AGAIN, retryable
from tests.support.waiting import HANG_S

PATIENCE_S = 120.0


class Server:
    """An application with one route for each way to end, behind the middleware."""

    def __init__(self, shutdown_timeout_s: float = 0.0) -> None:
        self.dead = False
        self.uvicorn = SimpleNamespace(should_exit=False, config=SimpleNamespace())
        self.state = SimpleNamespace(engine_client=self, server=self.uvicorn)
        self.settings: dict[str, Any] = {"shutdown_timeout_s": shutdown_timeout_s}
        self.disconnected = False
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.front = HttpFront(self._app)

    def get_diffusion_od_config(self) -> Any:
        return SimpleNamespace(additional_config={"gfdit": self.settings})

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError()

    async def post(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._with_app), base_url="http://x") as client:
            return await client.post(path)

    async def _with_app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.front(scope | {"app": self}, receive, send)

    def stop(self) -> None:
        """As at SIGTERM."""
        self.front._on_signal(self)

    async def stopped(self) -> None:
        await self.front._stop

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.set()
        match scope["path"]:
            case "/ok":
                await _respond(send, 200, {"data": retryable("a text that only looks like it")})
            case "/lost":
                await _respond(send, 500, {"error": {"message": retryable("rank 1 was lost"), "code": 500}})
            case "/bug":
                await _respond(send, 500, {"detail": "[Errno 9] Bad file descriptor"})
            case "/busy":
                await _respond(send, 429, {"detail": "rejected (retry after 12 s)"})
            case "/wrong":
                await _respond(send, 400, {"detail": "gfdit.priority must be an integer"})
            case "/slow":
                self.entered.set()
                await self.release.wait()
                await _respond(send, 200, {})
            case "/listens":  # as vLLM's handlers do
                self.entered.set()
                while (await receive()).get("more_body"):
                    pass
                self.disconnected = (await receive())["type"] == "http.disconnect"
                await _respond(send, 200, None)


async def _respond(send: Any, status: int, content: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"7")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    text = json.dumps(content).encode()
    await send({"type": "http.response.body", "body": text[:3], "more_body": True})
    await send({"type": "http.response.body", "body": text[3:]})


@pytest.mark.parametrize(
    ("path", "dead", "status", "retry_after"),
    [
        ("/ok", False, 200, None),
        ("/ok", True, 200, None),
        ("/lost", False, 503, "1"),
        ("/bug", False, 500, None),
        ("/bug", True, 503, "1"),
        ("/busy", False, 429, "12"),
        ("/wrong", True, 400, None),
    ],
)
def test_what_passes_says_so(path: str, dead: bool, status: int, retry_after: str | None) -> None:
    async def ask() -> httpx.Response:
        server = Server()
        server.dead = dead
        return await server.post(path)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after)
    assert answer.headers["x-request-id"] == "7" and answer.headers["content-type"] == "application/json"
    if retry_after:
        error = answer.json()["error"]
        assert error["code"] == status and error["message"] and "Errno" not in error["message"]
        assert (SEND_AGAIN in error["message"]) == (status == 503)


def test_a_server_that_stops_ends_what_runs_and_turns_away_the_rest() -> None:
    async def serve() -> None:
        server = Server(shutdown_timeout_s=HANG_S)
        running = asyncio.create_task(server.post("/slow"))
        await asyncio.wait_for(server.entered.wait(), PATIENCE_S)
        server.stop()
        refused = await server.post("/ok")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert not server.uvicorn.should_exit
        server.release.set()
        assert (await running).status_code == 200
        await server.stopped()
        assert server.uvicorn.should_exit

    asyncio.run(serve())


@pytest.mark.parametrize("path", ["/listens", "/slow"])
@pytest.mark.parametrize("signals", [1, 2])
def test_what_runs_when_time_is_over_may_be_sent_again(path: str, signals: int) -> None:
    """At once, or when a second signal says that it is. A handler that does not listen is cancelled."""

    async def serve() -> None:
        server = Server(shutdown_timeout_s=0.05 if signals == 1 else HANG_S)
        running = asyncio.create_task(server.post(path))
        await asyncio.wait_for(server.entered.wait(), PATIENCE_S)
        for _ in range(signals):
            server.stop()
        answer = await running
        assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]
        await server.stopped()
        assert server.uvicorn.should_exit and server.disconnected == (path == "/listens")

    asyncio.run(serve())


def test_stopping_does_not_load_the_policy_again(tmp_path: Path) -> None:
    """Its file may be gone since the start, or be another by now."""

    async def serve() -> None:
        server = Server(shutdown_timeout_s=30)
        server.settings["policy"] = f"{tmp_path}/removed.py:Policy"
        running = asyncio.create_task(server.post("/slow"))
        await asyncio.wait_for(server.entered.wait(), PATIENCE_S)
        server.stop()
        assert (await server.post("/ok")).status_code == 503
        await asyncio.sleep(0)  # the turn of what ends the server
        assert not server.uvicorn.should_exit, "what runs has the time that it was promised"
        server.release.set()
        assert (await running).status_code == 200
        await asyncio.wait_for(server.stopped(), PATIENCE_S)
        assert server.uvicorn.should_exit

    asyncio.run(serve())


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("broken", ["get_diffusion_od_config", "settings"])
def test_a_server_whose_end_goes_wrong_ends_all_the_same(broken: str, signals: int) -> None:
    async def serve() -> None:
        server = Server()
        setattr(server, broken, None if broken == "get_diffusion_od_config" else {"shutdown_timeout_s": "soon"})
        for _ in range(signals):
            server.stop()
        await asyncio.wait_for(server.stopped(), PATIENCE_S)
        assert server.uvicorn.should_exit

    asyncio.run(serve())
