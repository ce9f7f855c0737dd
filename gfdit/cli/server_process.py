"""A real server in a process group of its own: start it, wait until it answers, leave nothing behind.

with start_server(["vllm", "serve", model, "--omni"], free_port(), Path("server.log")) as server:
    httpx.post(f"{server.base_url}/v1/images/generations", json=...)
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

LOG_TAIL_LINES = 60
# Against hangs: on a busy machine a server that starts or ends takes minutes.
STOP_GRACE_S = 120.0
START_TIMEOUT_S = 1200.0
FIRST_PORT = 10_000

_reserved: list[socket.socket] = []  # for as long as this process lives


class ServerError(RuntimeError):
    """The server did not come up. The message ends with the tail of its log."""


class ServerProcess:
    """A running server and the process group it started; stops all of it on exit."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        self.process = process
        self.port = port
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
        self.resume()
        # Only the leader: it ends its workers in order, and what they write is then complete.
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)
        self._signal_group(signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        """Freeze every process of the server, so that it takes no time from another; nothing may be in flight."""
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_group(signal.SIGCONT)

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

    def _signal_group(self, number: signal.Signals) -> None:
        # start_new_session made the leader's pid the id of the group; the group outlives its leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def start_server(
    argv: Sequence[str],
    port: int,
    log_path: Path,
    timeout_s: float = START_TIMEOUT_S,
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
    """A port that nobody else gets before a server that takes a minute to start listens on it.

    The system gives it to nobody who asks for any, unless all are among those that it gives. While this process
    lives, which holds an abstract socket of that name, this function gives it to nobody else on this machine.
    Raises ``OSError`` if none is left.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = _outside(low, high)
    for port in random.SystemRandom().sample(ports, len(ports)):
        reservation = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                reservation.bind(f"\0gfdit-port-{port}")
                probe.bind(("", port))
            except OSError:  # somebody has it
                reservation.close()
                continue
        _reserved.append(reservation)
        return port
    raise OSError(f"no port from {FIRST_PORT} on is free, {len(ports)} were tried")


def _outside(low: int, high: int) -> list[int]:
    ports = list(range(FIRST_PORT, 2**16))
    return [port for port in ports if not low <= port <= high] or ports


def _is_healthy(base_url: str) -> bool:
    # No proxy from the environment: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base_url}/health", timeout=5.0) as response:
            return bool(response.status == HTTPStatus.OK)
    except (urllib.error.URLError, OSError):
        return False
