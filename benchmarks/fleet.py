"""Two replicas behind a router, under load: one is killed and started again, the other drained. What is lost?

Each replica is `gfdit serve` with a tiny model on one CPU rank. ``--requests`` requests go through the router,
``IN_FLIGHT`` at a time, two thirds of them with a deadline. When a third is answered, replica 1 is killed, with
all its processes, and started again. Once the router uses it again, replica 2 is told to end, as by Kubernetes.
Every answer has to be the image that a lone server makes of that request. What gets HTTP 502 or 503, or no answer,
the client sends again, as OpenAI's own does; how often is counted, since a router should spare it that.

``make fleet`` runs it with every router in ``deploy/``; Ray Serve and vllm-router have environments of their own,
made at their first run in ``out/fleet``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from gfdit.cli.http_requests import Generation, generation
from gfdit.cli.main import main as gfdit
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.server_process import ServerProcess, free_port, start_server
from gfdit.sim.trace import TraceRequest

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
NUM_REQUESTS = 200
NUM_KINDS = 20  # different requests: a lone server makes each once
IN_FLIGHT = 6
SEND_AGAIN = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE)
MOST_ATTEMPTS = 20
OTHER_IMAGE = "another image"
HANG_S = 1800.0
POLL_S = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", choices=ROUTERS, action="append", help="repeat; default: all")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = folder / "qwen-image"
        assert gfdit(["tiny-model", "qwen-image", str(model)]) == 0
        report["routers"] = {}
        with replicas_in(model, folder) as replicas:
            expected = make_alone(replicas[0])
            for router in args.router or ROUTERS:
                (there := folder / router).mkdir()
                report["routers"][router] = result = run(router, replicas, expected, args.requests, there)
                print(router, result, flush=True)
                name = "_".join(["fleet", *(args.router or [])])
                write_report(args.out, name, report, markdown(report))  # as far as it has got
    print(markdown(report))
    return 0 if all(one["right"] == one["requests"] for one in report["routers"].values()) else 1


# Replicas


@dataclass
class Replica:
    """One `gfdit serve` at a fixed address."""

    model: Path
    folder: Path
    name: str
    port: int = field(default_factory=free_port)
    server: ServerProcess | None = None
    starts: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns once it is healthy."""
        self.starts += 1
        argv = ["gfdit", "serve", str(self.model), "--ranks", "1", "--shutdown-timeout", "600"]
        argv += ["--set", "warmup_size=0"]  # nothing is compiled on a CPU
        # Requests that share a step differ from those alone by rounding: images are to be equal to the last bit.
        argv += ["--policy-arg", "batching=false", "--", "--enforce-eager", "--dtype", "float32"]
        self.server = start_server(argv, self.port, self.folder / f"{self.name}-{self.starts}.log", HANG_S)

    def kill(self) -> None:
        """All of its processes at once, as when a node is lost."""
        assert self.server is not None
        os.killpg(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()

    async def state(self) -> dict[str, Any] | None:
        """Of ``/v1/gfdit/state``; None if it does not answer."""
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.get(f"{self.url}/v1/gfdit/state")
                return dict(answer.json()) if answer.status_code == httpx.codes.OK else None
        return None

    async def num_completed(self) -> int:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            with contextlib.suppress(httpx.HTTPError):
                text = (await client.get(f"{self.url}/metrics")).text
                found = re.findall(r'^gfdit_requests_total\{.*outcome="completed".*\} (\S+)$', text, re.MULTILINE)
                return int(sum(map(float, found)))
        return 0


# Routers. Each is a context that yields its address; it may not answer yet.


@contextlib.contextmanager
def haproxy(replicas: Sequence[Replica], folder: Path) -> Iterator[str]:
    """The configuration in deploy/, with these addresses, and an agent beside each replica."""
    agents = [free_port() for _ in replicas]
    text = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    port = free_port()
    text = text.replace("bind :8080", f"bind 127.0.0.1:{port}")
    text = re.sub(r"^ +server .*\n", "", text, flags=re.MULTILINE)
    for replica, agent in zip(replicas, agents, strict=True):
        text += f"    server {replica.name} 127.0.0.1:{replica.port} agent-port {agent}\n"
    (folder / "haproxy.cfg").write_text(text)
    commands = [
        [str(Path(sys.executable).with_name("gfdit")), "agent", "--url", replica.url, "--port", str(agent)]
        for replica, agent in zip(replicas, agents, strict=True)
    ]
    commands.append(["haproxy", "-db", "-f", str(folder / "haproxy.cfg")])
    with running(commands, folder / "router.log"):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def vllm_router(replicas: Sequence[Replica], folder: Path) -> Iterator[str]:
    program = environment("vllm_router", ["vllm-router==0.1.17"]) / "bin" / "vllm-router"
    port = free_port()
    command = [str(DEPLOY / "vllm_router" / "run.sh"), *[replica.url for replica in replicas]]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with running([command], folder / "router.log", env={**os.environ, "VLLM_ROUTER": str(program)}):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def ray_serve(replicas: Sequence[Replica], folder: Path) -> Iterator[str]:
    there = DEPLOY / "ray_serve"
    programs = environment("ray_serve", ["-r", str(there / "requirements.txt"), str(ROOT)]) / "bin"
    port = free_port()
    text = (there / "serve.yaml").read_text()
    text = text.replace("host: 0.0.0.0", "host: 127.0.0.1").replace("port: 8080", f"port: {port}")
    text = re.sub(r"^ +- http://.*\n", "", text, flags=re.MULTILINE)
    text += "".join(f"        - {replica.url}\n" for replica in replicas)
    (folder / "serve.yaml").write_text(text)
    command = [str(programs / "serve"), "run", str(folder / "serve.yaml")]
    # Ray finds its own programs by PATH. Its sockets have long names: not in a deep folder.
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    with running([command], folder / "router.log", env=env, cwd=there):
        yield f"http://127.0.0.1:{port}"


Router = Callable[[Sequence[Replica], Path], contextlib.AbstractContextManager[str]]
ROUTERS: dict[str, Router] = {"haproxy": haproxy, "ray-serve": ray_serve, "vllm-router": vllm_router}


def environment(name: str, packages: Sequence[str]) -> Path:
    """A virtual environment with ``packages`` in ``out/fleet``, made at the first run."""
    folder = ROOT / "out" / "fleet" / name
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *packages], check=True)
        (folder / "complete").touch()
    return folder


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]], log_path: Path, **more: Any) -> Iterator[None]:
    """All of them at once, each in a process group of its own; ended, with what they started, at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    with log_path.open("wb") as log:
        try:
            for command in commands:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **more))
            yield
            if ended := [process.args for process in processes if process.poll() is not None]:
                raise RuntimeError(f"ended by itself: {ended}\n{log_path.read_text()[-2000:]}")
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# The load


def kinds() -> list[TraceRequest]:
    sizes = ((128, 128), (96, 128), (64, 64), (128, 96))
    return [
        TraceRequest(
            f"kind-{n}", 0.0, "tiny", *sizes[n % len(sizes)], 1, 4 + n % 3, deadline_s=(None, 600.0, 60.0)[n % 3]
        )
        for n in range(NUM_KINDS)
    ]


@dataclass
class Load:
    """``num_requests`` requests to ``url``, one after the other by each of ``IN_FLIGHT`` clients."""

    url: str
    expected: Sequence[bytes]
    num_requests: int
    num_sent: int = 0
    answers: list[tuple[int, str]] = field(default_factory=list)  # request, what was wrong; empty if nothing
    again: Counter[str] = field(default_factory=Counter)  # why requests were sent again
    may_send: int = 0  # up to this many
    slowly: bool = False

    async def run(self) -> None:
        generations = [generation(kind, send_slo=True) for kind in kinds()]
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client, asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(self._one_client(client, generations))

    async def _one_client(self, client: httpx.AsyncClient, generations: Sequence[Generation]) -> None:
        while self.num_sent < self.num_requests:
            if self.num_sent >= self.may_send:
                await asyncio.sleep(POLL_S)
                continue
            number = self.num_sent
            self.num_sent += 1
            if self.slowly:
                await asyncio.sleep(1.0)
            kind = number % len(generations)
            self.answers.append((number, await self._ask(client, generations[kind], self.expected[kind])))

    async def _ask(self, client: httpx.AsyncClient, asked: Generation, expected: bytes) -> str:
        """What is wrong with the answer, at last."""
        for attempt in itertools.count(1):
            try:
                answer = await client.post(self.url + asked.path, **asked.arguments)
            except httpx.HTTPError as error:
                what = repr(error)
            else:
                if answer.status_code == httpx.codes.OK:
                    image = asked.read(answer)
                    return "" if image == expected else f"{OTHER_IMAGE}, {difference(image, expected)}"
                what = f"HTTP {answer.status_code}: {answer.text[:200]}"
                if answer.status_code not in SEND_AGAIN:
                    return what
            if attempt == MOST_ATTEMPTS:
                return what
            self.again[what] += 1
            await asyncio.sleep(1.0)
        raise AssertionError

    async def until(self, num_answers: int) -> None:
        while len(self.answers) < num_answers:
            await asyncio.sleep(POLL_S)


def difference(image: bytes, expected: bytes) -> str:
    one, other = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=int) for png in (image, expected)]
    return "of another size" if one.shape != other.shape else f"by up to {np.abs(one - other).max()} of 255"


@contextlib.contextmanager
def replicas_in(model: Path, folder: Path) -> Iterator[list[Replica]]:
    """Two, not started but the first; their logs are shown if something goes wrong."""
    replicas = [Replica(model, folder, f"replica-{number}") for number in (1, 2)]
    try:
        replicas[0].start()
        yield replicas
    except BaseException:
        for log in sorted(folder.rglob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise
    finally:
        for replica in replicas:
            replica.stop()


def run(
    router: str, replicas: Sequence[Replica], expected: list[bytes], num_requests: int, folder: Path
) -> dict[str, Any]:
    """The first of ``replicas`` serves before and after, the second is drained and ends."""
    one, two = replicas
    started_s = time.monotonic()
    two.start()
    with ROUTERS[router](replicas, folder) as url:
        result = asyncio.run(strike(url, one, two, expected, num_requests))
    return result | {"seconds": round(time.monotonic() - started_s)}


def make_alone(replica: Replica) -> list[bytes]:
    """What a server makes of every kind that has nothing else to do."""
    images = []
    with httpx.Client(trust_env=False, timeout=HANG_S) as client:
        for kind in kinds():
            asked = generation(kind, send_slo=True)
            answer = client.post(replica.url + asked.path, **asked.arguments)
            answer.raise_for_status()
            images.append(asked.read(answer))
    return images


async def strike(url: str, one: Replica, two: Replica, expected: list[bytes], num_requests: int) -> dict[str, Any]:
    await answers(url)
    load = Load(url, expected, num_requests, may_send=num_requests * 6 // 10)
    sending = asyncio.create_task(load.run())
    await load.until(num_requests * 3 // 10)
    killed_with = num_alive(await one.state())
    one.kill()
    await asyncio.to_thread(one.start)
    while not ((state := await one.state()) and state["ready"]):
        await asyncio.sleep(POLL_S)
    with_one = len(load.answers)
    # The rest comes slowly until the router has taken it back: a rolling restart waits for that, too.
    load.slowly, load.may_send = True, num_requests
    while await one.num_completed() < 1:
        if sending.done():
            raise RuntimeError("the router has not used the replica that came back, and all requests are sent")
        await asyncio.sleep(POLL_S)
    load.slowly = False
    while not (drained_with := num_alive(await two.state())) and not sending.done():
        await asyncio.sleep(0.05)
    if sending.done():
        raise RuntimeError("nothing was left to drain")
    assert two.server is not None
    two.server.process.terminate()
    await asyncio.gather(sending, asyncio.to_thread(two.server.process.wait))
    wrong = Counter(what for _, what in load.answers if what)
    for what, number in [*wrong.items(), *load.again.items()]:
        print(f"{number} times {what}", file=sys.stderr)
    return {
        "requests": num_requests,
        "right": sum(not what for _, what in load.answers),
        "other_image": sum(number for what, number in wrong.items() if what.startswith(OTHER_IMAGE)),
        "lost": sum(number for what, number in wrong.items() if not what.startswith(OTHER_IMAGE)),
        "sent_again_by_the_client": load.again.total(),
        "in_flight_when_killed": killed_with,
        "answered_by_one_replica": with_one - num_requests * 3 // 10,
        "in_flight_when_drained": drained_with,
        "answered_by_the_restarted": await one.num_completed(),
    }


def num_alive(state: dict[str, Any] | None) -> int:
    return 0 if state is None else int(state["alive"])


async def answers(url: str) -> None:
    """Until the router passes a request on."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/v1/models")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(POLL_S)


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Two replicas behind a router",
        "",
        *source_lines(report),
        f"- `gfdit serve` with a tiny Qwen-Image on one CPU rank each, {IN_FLIGHT} requests at a time, two thirds",
        "  with a deadline. Replica 1 is killed and started again, then replica 2 drained (SIGTERM).",
        "- In flight: on that replica, as it said just before.",
        "",
        "| router | requests | right | other image | lost | sent again by the client | in flight when killed | "
        "answered by the other alone | in flight when drained | answered by the restarted one | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in report["routers"].items():
        lines.append(f"| {name} | " + " | ".join(str(value) for value in one.values()) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
