"""Ports of servers that take long to start: nobody else has them by then."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gfdit.cli import server_process
from gfdit.cli.server_process import free_port

ANOTHER = """
import random, sys
from gfdit.cli.server_process import free_port
random.SystemRandom.sample = lambda self, ports, k: [int(sys.argv[1])]
print(free_port(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def only_two(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ports that are tried in this process."""
    ports = [free_port(), free_port()]
    for reservation in server_process._reserved[-2:]:
        reservation.close()

    class Few:
        def sample(self, population: list[int], k: int) -> list[int]:
            assert {*ports} <= {*population}
            return ports

    monkeypatch.setattr(server_process.random, "SystemRandom", Few)
    return {*ports}


def test_none_is_one_that_the_system_gives_unless_it_gives_all() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert free_port() in server_process._outside(low, high)
    ports = server_process._outside(32_768, 60_999)
    assert {10_000, 32_767, 61_000, 65_535} <= {*ports} and not {*range(32_768, 61_000)} & {*ports}
    assert server_process._outside(1024, 65_535) == list(range(10_000, 2**16))


def test_each_is_given_once(only_two: set[int]) -> None:
    assert {free_port(), free_port()} == only_two
    with pytest.raises(OSError, match="no port from 10000 on is free, "):
        free_port()


def test_one_that_is_listened_on_is_not_given(only_two: set[int]) -> None:
    taken = min(only_two)
    with socket.socket() as server:
        server.bind(("127.0.0.1", taken))
        server.listen()
        assert free_port() == max(only_two)


def test_one_that_another_process_was_given_is_not(only_two: set[int]) -> None:
    """Though nobody listens on it yet; when that process is gone, it is free again."""
    taken = min(only_two)
    command = [sys.executable, "-c", ANOTHER, str(taken)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout and int(other.stdout.readline()) == taken
        assert free_port() == max(only_two)
        other.stdin.close()
    assert free_port() == taken
