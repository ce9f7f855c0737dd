"""A server whose control process dies and is not replaced, seen by its clients and by who runs it."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support import local_http
from tests.support.leftovers import command_line, nothing_left
from tests.support.server import ServerProcess, free_port, start_server
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]


def post(server: ServerProcess, side: int = 256, steps: int = 2, timeout_s: float = 60.0) -> httpx.Response:
    body = {"prompt": "a red panda", "size": f"{side}x{side}", "num_inference_steps": steps, "seed": 1}
    url = f"{server.base_url}/v1/images/generations"
    return local_http.post(url, json=body, timeout=timeout_s)


def processes(server: ServerProcess, what: str) -> list[psutil.Process]:
    """Those of the server whose command line contains ``what``."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if what in " ".join(command_line(child))]


def test_a_server_without_control_process_says_so(model: Path, tmp_path: Path) -> None:
    """Requests that run get HTTP 503, and so does who comes later; workers end, the server when it is told to."""
    argv = ["gfdit", "serve", str(model), "--ranks", "2", "--set", "max_control_restarts=0"]
    argv += ["--", "--enforce-eager", "--dtype", "float32"]
    with nothing_left() as left, start_server(argv, free_port(), tmp_path / "log") as server:
        left.watch(server.process.pid, server.port)
        with pytest.raises(httpx.ReadTimeout):
            post(server, side=1024, steps=200, timeout_s=1.0)
        assert post(server).status_code == 200, "a client that gives up does no harm"
        (control,) = processes(server, "gfdit.runtime.control_process")
        workers = control.children(recursive=True)
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(post, server, side=1024, steps=200) for _ in range(3)]
            time.sleep(1.0)
            os.kill(control.pid, signal.SIGKILL)
            killed_s = time.monotonic()
            answers = [future.result() for future in running]
        assert time.monotonic() - killed_s < HANG_S
        answers.append(post(server))
        for answer in answers:
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == 503
        assert local_http.get(f"{server.base_url}/health").status_code == 503
        assert not psutil.wait_procs(workers, timeout=15)[1], "workers end by themselves"
        server.process.terminate()
        assert server.process.wait(30) == 0
