"""A real server in a test: start it, wait until it answers, talk to it, leave nothing behind.

with start_server(["vllm", "serve", model, "--omni", ...], free_port(), tmp_path / "log") as server:
    status, image = generate_image(server.base_url, "a red panda", (128, 128), steps=4, seed=1)
"""

import base64
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from PIL import Image

LOG_TAIL_LINES = 60
STOP_GRACE_S = 10.0


class ServerError(RuntimeError):
    """The server did not come up. The message ends with the tail of its log."""


class ServerProcess:
    """A running server and the process group it started; stops all of it on exit."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        self.process = process
        self.base_url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self.startup_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            print(f"--- tail of {self.log_path}\n{self.log_tail()}", file=sys.stderr)

    def stop(self) -> None:
        """End the server gracefully, then whatever is left of its process group. Safe to call twice."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def wait_healthy(self, timeout_s: float) -> None:
        """Return once `/health` answers 200; a server that ends or stays silent is a ServerError."""
        started_s = time.monotonic()
        while not _is_healthy(self.base_url):
            waited_s = time.monotonic() - started_s
            if self.process.poll() is not None:
                raise ServerError(f"server ended with status {self.process.returncode}\n{self.log_tail()}")
            if waited_s > timeout_s:
                raise ServerError(f"server not healthy after {timeout_s:.0f} s\n{self.log_tail()}")
            time.sleep(0.2)
        self.startup_s = time.monotonic() - started_s

    def _signal(self, number: signal.Signals) -> None:
        # start_new_session made the leader's pid the id of the group; the group outlives its leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def start_server(
    argv: Sequence[str],
    port: int,
    log_path: Path,
    timeout_s: float = 180.0,
    env: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Run `vllm serve ...` or `gfdit serve ...` of this environment on `port` and wait until it is healthy.

    `--port` is added to `argv`. `env` is added to this process's environment; compute threads default to one
    per process, because the ranks share few cores and reproducible sums need a fixed number.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    program = Path(sys.executable).with_name(argv[0])
    command = [str(program), *argv[1:end], "--port", str(port), *argv[end:]]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
        )
    server = ServerProcess(process, port, log_path)
    try:
        server.wait_healthy(timeout_s)
    except BaseException:
        server.stop()
        raise
    return server


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def generate_image(
    base_url: str,
    prompt: str,
    size: tuple[int, int],
    steps: int,
    seed: int,
    negative_prompt: str | None = None,
    extra_params: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
) -> tuple[int, Any]:
    """POST one request; `size` is (width, height). Returns the status and the image, or the error's JSON."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "size": f"{size[0]}x{size[1]}",
        "num_inference_steps": steps,
        "seed": seed,
        "response_format": "b64_json",
    }
    if negative_prompt is not None:
        body["negative_prompt"] = negative_prompt
    if extra_params is not None:
        body["extra_params"] = dict(extra_params)
    with httpx.Client(timeout=timeout_s, trust_env=False) as client:
        response = client.post(f"{base_url}/v1/images/generations", json=body)
    if response.status_code != httpx.codes.OK:
        return response.status_code, response.json()
    png = base64.b64decode(response.json()["data"][0]["b64_json"])
    return response.status_code, Image.open(io.BytesIO(png))


def _is_healthy(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
