"""A server that answers like an image server, in a thread: what it was asked, and how it is to answer."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class FakeServer:
    """``answer(body)`` gives status and text; ``seen`` has the JSON of each request."""

    answer: Callable[[dict[str, Any]], tuple[int, str]]
    seen: list[dict[str, Any]] = field(default_factory=list)
    base_url: str = ""


def image_answer(data: bytes) -> tuple[int, str]:
    return 200, json.dumps({"data": [{"b64_json": base64.b64encode(data).decode()}]})


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    state = FakeServer(lambda body: image_answer(b"png of " + body["prompt"].encode()))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.seen.append(body)
            status, text = state.answer(body) if self.path == "/v1/images/generations" else (404, "not here")
            if status == 0:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.base_url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()
