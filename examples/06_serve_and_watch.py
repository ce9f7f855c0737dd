"""Requests with deadlines over HTTP, and what a server tells of them while they run.

Uses a server that runs (`--url`), or starts one of its own with a tiny random model on four CPU ranks, which takes
half a minute. Only the standard library speaks to it; any OpenAI client does as well (docs/serving.md).

    python examples/06_serve_and_watch.py [--url http://localhost:8000]
"""

import argparse
import json
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gfdit.cli.main import main as gfdit
from gfdit.cli.server_process import free_port, start_server

TIMEOUT_S = 600.0
ORDERS = [  # name, side of the image, steps, seconds it may take
    ("large", 256, 40, 300.0),
    ("small", 128, 8, 120.0),
    ("urgent", 128, 8, 60.0),
]


def call(url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """GET, or POST with a body; the status and the JSON that came back."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def order(url: str, name: str, side: int, steps: int, allowed_s: float) -> str:
    began = time.monotonic()
    body = {
        "prompt": "a red panda",
        "size": f"{side}x{side}",
        "num_inference_steps": steps,
        "extra_params": {"gfdit": {"deadline_ms": 1000 * allowed_s, "slo_class": name}},
    }
    status, _ = call(f"{url}/v1/images/generations", body)
    took_s = time.monotonic() - began
    return f"{name}: HTTP {status} after {took_s:.1f} s, {'in time' if took_s <= allowed_s else 'late'}"


def watch(url: str) -> None:
    """One line for what is alive: ranks it runs on, steps done, seconds to spare before its deadline."""
    for one in call(f"{url}/v1/gfdit/requests")[1]["requests"]:
        spare = "?" if one["slack_s"] is None else f"{one['slack_s']:.1f} s"
        steps = f"{one['steps_done']} of {one['num_steps']} steps"
        print(f"  {one['slo_class']}: {one['state']} on {one['degree']} ranks, {steps}, {spare} to spare")


def serve(stack: ExitStack) -> str:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    assert gfdit(["tiny-model", "qwen-image", str(folder / "model")]) == 0
    command = [
        "gfdit",
        "serve",
        str(folder / "model"),
        "--ranks",
        "4",
        "--",
        "--enforce-eager",
        "--dtype",
        "float32",
    ]
    print("starting a server ...", flush=True)
    return stack.enter_context(start_server(command, free_port(), folder / "log")).base_url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs; without, one is started")
    given: str | None = parser.parse_args().url
    with ExitStack() as stack:
        url = given or serve(stack)
        pool = stack.enter_context(ThreadPoolExecutor())
        answers = [pool.submit(order, url, *one) for one in ORDERS]
        while not all(answer.done() for answer in answers):
            time.sleep(1.0)
            watch(url)
        for answer in answers:
            print(answer.result())
        load = call(f"{url}/v1/gfdit/load")[1]
        print(
            f"{load['live_ranks']} of {load['ranks']} ranks serve, {load['backlog_rank_s']:.1f} rank-seconds left"
        )


if __name__ == "__main__":
    main()
