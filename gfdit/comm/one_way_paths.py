"""The ways in which kernels carry out a one-way operation (send, broadcast), two functions each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gfdit.comm.choice import Choice, Path
from gfdit.kernels import gate, low_latency_broadcast, multicast_broadcast, recv, send
from gfdit.kernels.members import Members

Run = Callable[[int, int], None]
"""Enqueues an operation, given its label and the address of its bytes."""


@dataclass(frozen=True, slots=True)
class OneWayPath:
    """``num_bytes`` from position 0 to the other members: what the one and the others launch."""

    push: Callable[[Members, int, Choice], Run]
    pull: Callable[[Members, int, Choice], Run]


def _push(members: Members, num_bytes: int, choice: Choice) -> Run:
    num_programs = _num_programs(num_bytes, choice)
    return send.plan(members, num_bytes, chunk_bytes=choice.chunk_bytes, num_programs=num_programs)


def _pull(members: Members, num_bytes: int, choice: Choice) -> Run:
    num_programs = _num_programs(num_bytes, choice)
    receive = recv.plan(members, num_bytes, chunk_bytes=choice.chunk_bytes, num_programs=num_programs)
    if num_programs == 1:
        return receive
    wait = gate.plan(members)

    def run(label: int, target: int) -> None:
        wait(label)
        receive(label, target)

    return run


def _num_programs(num_bytes: int, choice: Choice) -> int:
    """No more than there are chunks."""
    return max(min(choice.num_programs, -(-num_bytes // choice.chunk_bytes)), 1)


def _low_latency_push(members: Members, num_bytes: int, choice: Choice) -> Run:
    return low_latency_broadcast.plan_push(members, num_bytes, num_programs=choice.num_programs)


def _low_latency_pull(members: Members, num_bytes: int, choice: Choice) -> Run:
    return low_latency_broadcast.plan_pull(members, num_bytes, num_programs=choice.num_programs)


def _multicast_push(members: Members, num_bytes: int, choice: Choice) -> Run:
    return multicast_broadcast.plan_push(members, num_bytes, num_programs=choice.num_programs)


def _multicast_pull(members: Members, num_bytes: int, choice: Choice) -> Run:
    return multicast_broadcast.plan_pull(members, num_bytes, num_programs=choice.num_programs)


ONE_WAY_PATHS: Mapping[Path, OneWayPath] = {
    Path.LOW_LATENCY: OneWayPath(_low_latency_push, _low_latency_pull),
    Path.PUSH: OneWayPath(_push, _pull),
    Path.MULTICAST: OneWayPath(_multicast_push, _multicast_pull),
}
