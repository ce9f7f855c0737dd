"""`gfdit agent` against a server that says what one of gfdit would, asked as HAProxy does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gfdit.cli import main as cli
from gfdit.cli.agent import say
from gfdit.cli.server_process import free_port
from gfdit.core.tasks import Request, Shape
from gfdit.observe.metrics import ServerMetrics
from gfdit.observe.snapshot import RankNumbers, RequestState, Service, Snapshot
from tests.support.waiting import HANG_S, wait_until

KEY = "secret"


def metrics() -> ServerMetrics:
    """Two ranks with 8 rank-seconds to do; requests like that take 8."""
    server = ServerMetrics(2, clock=lambda: 10.0)
    server.arrived(Request("one", "m", Shape(64, 64), 4, 9.0, cfg=False))
    rows = [RequestState("one", "m", "default", "running", "denoise", (0,), 0, 4, None, 8.0, 8.0)]
    ranks = [RankNumbers(True, False, False, 0, 1.0, 0.5, 0, 0)] * 2
    server.take(Snapshot(0, 9.5, ranks=ranks, requests=rows, services=[Service("m", "64x64", 4, False, {1: 8.0})]))
    return server


@pytest.fixture
def server() -> Iterator[tuple[str, ServerMetrics]]:
    shown = metrics()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == f"Bearer {KEY}" and self.path == "/v1/gfdit/load"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(shown.load()).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", shown
        http.shutdown()
        thread.join()


def test_what_it_says(server: tuple[str, ServerMetrics]) -> None:
    url, shown = server
    assert say(url, KEY) == "ready up 50%"
    shown.draining = True
    assert say(url, KEY) == "drain"
    shown.draining = False
    assert say(url, KEY) == "ready up 50%"  # "ready" takes "drain" back, "up" takes "down" back
    assert say(url, "another").startswith("down #")
    assert say(f"http://127.0.0.1:{free_port()}", KEY).startswith("down #")


def test_a_server_that_is_slow_is_not_called_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gfdit.cli.agent.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert say(f"http://127.0.0.1:{silent.getsockname()[1]}", None) == "ready up 1%"


def ask(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as asked:
        return asked.makefile().readline()


def test_over_its_port(server: tuple[str, ServerMetrics]) -> None:
    url, shown = server
    port = free_port()
    command = [sys.executable, "-c", "from gfdit.cli.main import main; raise SystemExit(main())"]
    process = subprocess.Popen([*command, "agent", "--url", url, "--api-key", KEY, "--port", str(port)])
    try:
        wait_until(lambda: _listens(port) or process.poll() is not None, "the agent listens")
        assert ask(port) == "ready up 50%\n"
        shown.draining = True
        assert ask(port) == "drain\n"
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=HANG_S).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--url", "here:8000"], "must begin with http://"), (["--api-key", "no"], "--api-key")],
)
def test_mistakes_end_it(
    server: tuple[str, ServerMetrics], arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--url" in arguments else ["--url", server[0], *arguments]
    assert cli.main(["agent", *given]) == cli.USAGE_ERROR
    assert told in capsys.readouterr().err
