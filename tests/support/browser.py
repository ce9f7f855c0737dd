"""A page in Chromium without a window, driven by its DevTools protocol.

with open_page("http://127.0.0.1:8000/v1/gfdit/ui", tmp_path) as page:
    page.run("document.title")
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.support import local_http
from tests.support.waiting import HANG_S, wait_until

PROGRAM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="chromium, of Debian's package, is absent")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)


class Page:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    def run(self, script: str) -> Any:
        """The value of an expression in the page. Raises ``RuntimeError`` if it throws."""
        number = next(self._numbers)
        params = {"expression": script, "returnByValue": True, "awaitPromise": True}
        self._socket.send(json.dumps({"id": number, "method": "Runtime.evaluate", "params": params}))
        while (answer := json.loads(self._socket.recv(HANG_S))).get("id") != number:
            pass
        if (thrown := answer["result"].get("exceptionDetails")) is not None:
            raise RuntimeError(thrown.get("exception", {}).get("description", thrown["text"]))
        return answer["result"]["result"].get("value")

    def text(self, element: str) -> str:
        """What is read in the element of that id; nothing as long as there is none."""
        return str(self.run(f"document.getElementById({element!r})?.innerText ?? ''"))

    def submit(self, form: str, **fields: str) -> None:
        """Fill in the fields, by id, and press the form's button."""
        filled = "".join(
            f"document.getElementById({name!r}).value = {json.dumps(v)};" for name, v in fields.items()
        )
        self.run(f"{filled} document.querySelector('#{form} button').click()")


@contextmanager
def open_page(url: str, folder: Path) -> Iterator[Page]:
    """``folder`` is for the browser's own files."""
    assert PROGRAM is not None
    profile, port_file = folder / "browser", folder / "browser" / "DevToolsActivePort"
    process = subprocess.Popen(
        [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n"), "the browser listens")
        address = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}/json/list"

        def targets() -> list[str]:
            found = local_http.get(address).json()
            return [one["webSocketDebuggerUrl"] for one in found if one["type"] == "page" and one["url"] == url]

        wait_until(targets, "the page is open")
        with connect(targets()[0], open_timeout=HANG_S, proxy=None, max_size=None) as socket:
            page = Page(socket)
            wait_until(lambda: page.run("document.readyState") == "complete", "the page is there")
            yield page
    finally:
        process.terminate()
        try:
            process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
