"""The ways in which kernels carry out a one-way operation (send, broadcast), two functions each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

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


def _of_shares(kernels: ModuleType) -> OneWayPath:
    """Kernels whose programs take their shares of a message, in no chunks."""

    def planned(plan: Callable[..., Run]) -> Callable[[Members, int, Choice], Run]:
        return lambda members, num_bytes, choice: plan(members, num_bytes, num_programs=choice.num_programs)

    return OneWayPath(planned(kernels.plan_push), planned(kernels.plan_pull))


ONE_WAY_PATHS: Mapping[Path, OneWayPath] = {
    Path.LOW_LATENCY: _of_shares(low_latency_broadcast),
    Path.PUSH: OneWayPath(_push, _pull),
    Path.MULTICAST: _of_shares(multicast_broadcast),
}
