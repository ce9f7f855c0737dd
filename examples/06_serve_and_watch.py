"""Requests with deadlines over HTTP, what a server tells of them while they run, and another policy meanwhile.

Uses a server that runs (`--url`), or starts one of its own with a tiny random model on four CPU ranks, which takes
half a minute. Only the standard library speaks to it; any OpenAI client does as well (docs/serving.md). The policy
is changed only with the server's key, and changed back.

    python examples/06_serve_and_watch.py [--url http://localhost:8000 [--api-key KEY]]
"""

import argparse
import json
import secrets
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from gfdit.cli.main import main as gfdit
from gfdit.cli.server_process import free_port, start_server

TIMEOUT_S = 600.0
ORDERS = [  # name, side of the image, steps, seconds it may take
    ("large", 256, 40, 600.0),
    ("small", 128, 8, 600.0),
    ("urgent", 128, 8, 300.0),
]


class Server(NamedTuple):
    url: str
    key: str | None


def call(server: Server, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """GET, or POST with a body; the status and the JSON that came back."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    request = urllib.request.Request(f"{server.url}/v1/{path}", data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def order(server: Server, name: str, side: int, steps: int, allowed_s: float) -> str:
    began = time.monotonic()
    body = {
        "prompt": "a red panda",
        "size": f"{side}x{side}",
        "num_inference_steps": steps,
        "extra_params": {"gfdit": {"deadline_ms": 1000 * allowed_s, "slo_class": name}},
    }
    status, _ = call(server, "images/generations", body)
    took_s = time.monotonic() - began
    return f"{name}: HTTP {status} after {took_s:.1f} s, {'in time' if took_s <= allowed_s else 'late'}"


def watch(server: Server) -> None:
    """One line for what is alive: ranks it runs on, steps done, seconds to spare before its deadline."""
    for one in call(server, "gfdit/requests")[1]["requests"]:
        spare = "?" if one["slack_s"] is None else f"{one['slack_s']:.1f} s"
        steps = f"{one['steps_done']} of {one['num_steps']} steps"
        print(f"  {one['slo_class']}: {one['state']} on {one['degree']} ranks, {steps}, {spare} to spare")


def use_policy(server: Server, policy: str, arguments: dict[str, Any]) -> None:
    """The next decision is this policy's; no request fails for it."""
    status, now = call(server, "gfdit/admin", {"policy": policy, "policy_args": arguments})
    print(f"policy {now['policy']}" if status == HTTPStatus.OK else f"not changed: HTTP {status} {now}")


def serve(stack: ExitStack) -> Server:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    assert gfdit(["tiny-model", "qwen-image", str(folder / "model")]) == 0
    key = secrets.token_hex()
    command = ["gfdit", "serve", str(folder / "model"), "--ranks", "4"]
    command += ["--", "--enforce-eager", "--dtype", "float32", "--api-key", key]
    print("starting a server ...", flush=True)
    return Server(stack.enter_context(start_server(command, free_port(), folder / "log")).base_url, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs; without, one is started")
    parser.add_argument("--api-key", help="its key, with which its policy may be changed")
    args = parser.parse_args()
    with ExitStack() as stack:
        server = Server(args.url, args.api_key) if args.url else serve(stack)
        pool = stack.enter_context(ThreadPoolExecutor())
        answers = [pool.submit(order, server, *one) for one in ORDERS]
        time.sleep(1.0)
        watch(server)
        if server.key:
            before = call(server, "gfdit/admin")[1]
            use_policy(server, "equipartition", {})
        while not all(answer.done() for answer in answers):
            time.sleep(1.0)
            watch(server)
        for answer in answers:
            print(answer.result())
        if server.key:
            use_policy(server, before["policy"], before["policy_args"])
        load = call(server, "gfdit/load")[1]
        print(
            f"{load['live_ranks']} of {load['ranks']} ranks serve, {load['backlog_rank_s']:.1f} rank-seconds left"
        )


if __name__ == "__main__":
    main()
