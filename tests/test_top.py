"""`gfdit top` against a small server that says what a gfdit server would."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from gfdit.cli import main as cli
from gfdit.cli.top import View, fetch_state
from gfdit.observe.metrics import ServerMetrics
from gfdit.observe.snapshot import RankNumbers, RequestState, Snapshot

KEY = "secret"


def numbers(*, up: bool = True, restarts: int = 0) -> RankNumbers:
    return RankNumbers(up, False, False, restarts, 1.0, 0.5, 3 << 20, 0)


def server_metrics() -> ServerMetrics:
    metrics = ServerMetrics(3, clock=lambda: 10.0)
    rows = [
        RequestState("wide", "m", "S", "running", "denoise", (0, 1), 2, 8, 25.0, 5.0, 9.0),
        RequestState("late", "m", "L", "waiting", "", (), 0, 8, 12.0, 7.0, 7.0),
    ]
    ranks = [numbers(), numbers(), numbers(up=False, restarts=2)]
    metrics.take(Snapshot(0, 9.5, policy="triage", ranks=ranks, requests=rows))
    return metrics


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    said: dict[str, Any] = {"status": 200, "state": server_metrics().state()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == f"Bearer {KEY}"
            self.send_response(said["status"] if known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(said["state"]).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", said
        http.shutdown()
        thread.join()


def drawn(view: View) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(view.render())
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_one_look(server: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = server
    assert cli.main(["top", "--url", url, "--api-key", KEY, "--once"]) == 0
    told = capsys.readouterr().out
    for part in ("ready", "policy triage", "ranks 2 of 3", "restarting, 2 restarts", "denoise", "2/8"):
        assert part in " ".join(told.split()), part


def test_lanes_and_slack() -> None:
    metrics, view = server_metrics(), View("http://here")
    for _ in range(3):
        view.take(metrics.state())
    lines = drawn(view).splitlines()
    lanes = [next(line for line in lines if line.startswith(f"{rank} ")) for rank in range(3)]
    assert "███" in lanes[0] and "███" in lanes[1] and "xxx" in lanes[2]
    assert "+10.0" in next(line for line in lines if line.startswith("wide"))
    assert "-5.0" in next(line for line in lines if line.startswith("late"))


@pytest.mark.parametrize(
    ("key", "status", "state", "told"),
    [
        ("", 200, {}, "asks for a key: --api-key"),
        (KEY, 404, {}, "is no server of gfdit: it has no /v1/gfdit/state"),
        (KEY, 503, {}, "answers HTTP 503"),
        (KEY, 200, [], "its /v1/gfdit/state is something else"),
    ],
)
def test_what_is_wrong_is_a_line(
    server: tuple[str, dict[str, Any]], key: str, status: int, state: object, told: str
) -> None:
    url, said = server
    said |= {"status": status, "state": state}
    with pytest.raises(ValueError, match=told):
        fetch_state(url, key)


def test_nobody_there() -> None:
    with pytest.raises(ValueError, match="does not answer"):
        fetch_state("http://127.0.0.1:9", None)
    with pytest.raises(ValueError, match="--url must begin with http"):
        fetch_state("localhost:8000", None)
