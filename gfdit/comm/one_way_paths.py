"""The ways in which kernels carry out a one-way operation (send, broadcast), two functions each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gfdit.comm.choice import Choice, Path
from gfdit.kernels import low_latency_broadcast, multicast_broadcast, recv, send
from gfdit.kernels.members import Members


@dataclass(frozen=True, slots=True)
class OneWay:
    """One operation, ready to launch: ``num_bytes`` at ``address``, from position 0 to the other members."""

    members: Members
    address: int
    num_bytes: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class OneWayPath:
    push: Callable[[OneWay], None]
    pull: Callable[[OneWay], None]


def _push(operation: OneWay) -> None:
    send.run(
        operation.members,
        operation.address,
        operation.num_bytes,
        chunk_bytes=operation.choice.chunk_bytes,
        num_programs=_num_programs(operation),
    )


def _pull(operation: OneWay) -> None:
    recv.run(
        operation.members,
        operation.address,
        operation.num_bytes,
        chunk_bytes=operation.choice.chunk_bytes,
        num_programs=_num_programs(operation),
    )


def _num_programs(operation: OneWay) -> int:
    """No more than there are chunks."""
    num_chunks = -(-operation.num_bytes // operation.choice.chunk_bytes)
    return max(min(operation.choice.num_programs, num_chunks), 1)


def _low_latency_push(operation: OneWay) -> None:
    num_programs = operation.choice.num_programs
    low_latency_broadcast.run_push(
        operation.members, operation.address, operation.num_bytes, num_programs=num_programs
    )


def _low_latency_pull(operation: OneWay) -> None:
    num_programs = operation.choice.num_programs
    low_latency_broadcast.run_pull(
        operation.members, operation.address, operation.num_bytes, num_programs=num_programs
    )


def _multicast_push(operation: OneWay) -> None:
    num_programs = operation.choice.num_programs
    multicast_broadcast.run_push(
        operation.members, operation.address, operation.num_bytes, num_programs=num_programs
    )


def _multicast_pull(operation: OneWay) -> None:
    num_programs = operation.choice.num_programs
    multicast_broadcast.run_pull(
        operation.members, operation.address, operation.num_bytes, num_programs=num_programs
    )


ONE_WAY_PATHS: Mapping[Path, OneWayPath] = {
    Path.LOW_LATENCY: OneWayPath(_low_latency_push, _low_latency_pull),
    Path.PUSH: OneWayPath(_push, _pull),
    Path.MULTICAST: OneWayPath(_multicast_push, _multicast_pull),
}
