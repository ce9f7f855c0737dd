"""HAProxy with the configuration in deploy/, in front of two servers that answer as gfdit's do.

One dies with requests in flight, or drains; what its agent says counts. ``benchmarks/fleet.py`` does this with
real servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gfdit.cli.server_process import free_port
from tests.support.waiting import HANG_S

CONFIGURATION = Path(__file__).resolve().parent.parent / "deploy" / "haproxy" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy, of Debian's package haproxy, is absent")

HELD_S = 0.05  # by each server
BODY = b'{"prompt": "a red panda"}'


class FakeServer:
    """A server of images and its agent, on ports of their own."""

    def __init__(self) -> None:
        self.port, self.agent_port = free_port(), free_port()
        self.says = "ready up 100%"
        self.num_answered = 0
        self.num_asked = 0  # the agent
        self.holds = False  # what it has, until it dies
        self.num_held = 0
        self._dead = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        self._servers.append(await asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self._servers.append(await asyncio.start_server(self._tell, "127.0.0.1", self.agent_port))

    def die(self) -> None:
        self._dead.set()
        for server in self._servers:
            server.close()
        for writer in self._open:
            writer.transport.abort()

    @property
    def drains(self) -> bool:
        return self.says == "drain"

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_asked += 1
        writer.write(f"{self.says}\n".encode())
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if found := re.search(r"content-length: (\d+)", head, re.IGNORECASE):
                    await reader.readexactly(int(found[1]))
                await self._answer(writer, is_request=head.startswith("POST"))
        self._open.discard(writer)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, *, is_request: bool) -> None:
        if is_request and not self.drains:
            if self.holds:
                self.num_held += 1
                await self._dead.wait()
                raise ConnectionError
            await asyncio.sleep(HELD_S)
            self.num_answered += 1
        # A server that drains says so to checks and to requests alike.
        status = "503 Service Unavailable" if self.drains else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\nok".encode())
        await writer.drain()


@contextlib.asynccontextmanager
async def haproxy(text: str, servers: list[FakeServer], folder: Path) -> AsyncIterator[str]:
    """Once all agents have been heard."""
    assert HAPROXY is not None
    port = free_port()
    text = text.replace("bind :8080", f"bind 127.0.0.1:{port}").replace("inter 1s", "inter 100ms")
    text = re.sub(r"^ +server .*\n", "", text, flags=re.MULTILINE)
    for number, server in enumerate(servers):
        text += f"    server replica-{number} 127.0.0.1:{server.port} agent-port {server.agent_port}\n"
        await server.start()
    (folder / "haproxy.cfg").write_text(text)
    process = subprocess.Popen([HAPROXY, "-db", "-f", str(folder / "haproxy.cfg")])
    try:
        await heard(servers)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        for server in servers:
            server.die()


async def heard(servers: list[FakeServer]) -> None:
    """Until each agent has been asked once more, and what it said is known."""
    for server in servers:
        wanted = server.num_asked + 2
        while server.num_asked < wanted:
            await asyncio.sleep(0.05)


async def late_body() -> AsyncIterator[bytes]:
    """As over a network: HAProxy sees the head of a request first."""
    await asyncio.sleep(0.02)
    yield BODY


async def ask(url: str, num_clients: int, num_requests: int) -> Counter[str]:
    """What they get, each on a connection of its own that it keeps."""
    got: Counter[str] = Counter()

    async def one(client: httpx.AsyncClient) -> None:
        for _ in range(num_requests):
            try:
                answer = await client.post(
                    f"{url}/v1/images/generations", content=late_body(), headers={"content-length": f"{len(BODY)}"}
                )
                got[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                got[repr(error)] += 1

    limits = httpx.Limits(max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S, limits=limits) as client:
        await asyncio.gather(*[one(client) for _ in range(num_clients)])
    return got


def test_the_configuration_is_right() -> None:
    done = subprocess.run([str(HAPROXY), "-c", "-f", str(CONFIGURATION)], capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr.lower(), done.stderr


@pytest.mark.parametrize("buffers", [True, False])
def test_one_dies_with_requests_in_flight(buffers: bool, tmp_path: Path) -> None:
    """Negative control: without http-buffer-request HAProxy sends none again, and says nothing of it."""
    text = CONFIGURATION.read_text()
    if not buffers:
        assert "    option http-buffer-request\n" in text
        text = text.replace("    option http-buffer-request\n", "")

    async def strike() -> Counter[str]:
        dying, _ = servers = [FakeServer(), FakeServer()]
        async with haproxy(text, servers, tmp_path) as url:
            await ask(url, 4, 1)
            dying.holds = True
            asking = asyncio.create_task(ask(url, 4, 5))
            while dying.num_held < 2 and not asking.done():
                await asyncio.sleep(0.01)
            dying.die()
            return await asking

    got = asyncio.run(strike())
    assert got.total() == 20
    assert (got["200"] == 20) == buffers, got


def test_one_drains(tmp_path: Path) -> None:
    """What comes before its agent is asked again gets HTTP 503 there, and is sent to the other."""

    async def strike() -> None:
        draining, _ = servers = [FakeServer(), FakeServer()]
        async with haproxy(CONFIGURATION.read_text(), servers, tmp_path) as url:
            asking = asyncio.create_task(ask(url, 4, 10))
            while not draining.num_answered:
                await asyncio.sleep(0.01)
            draining.says = "drain"
            assert await asking == {"200": 40}
            before = draining.num_answered
            await heard(servers)
            assert await ask(url, 4, 2) == {"200": 8}
            assert draining.num_answered == before
            draining.says = "ready up 100%"  # it was called off
            await heard(servers)
            while draining.num_answered == before:
                assert await ask(url, 4, 2) == {"200": 8}

    asyncio.run(strike())


def test_weights_count(tmp_path: Path) -> None:
    async def compare() -> tuple[int, int]:
        busy, idle = servers = [FakeServer(), FakeServer()]
        busy.says, idle.says = "ready up 10%", "ready up 100%"
        async with haproxy(CONFIGURATION.read_text(), servers, tmp_path) as url:
            assert await ask(url, 8, 10) == {"200": 80}
        return busy.num_answered, idle.num_answered

    busy, idle = asyncio.run(compare())
    assert busy < idle
