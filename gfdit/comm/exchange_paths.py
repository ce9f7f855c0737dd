"""The ways in which kernels carry out an exchange (all-gather, all-to-all, barrier), one function each.

Every member must choose the same way: the choice is part of the digest that tokens carry, so a difference is a
mismatch and never wrong data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from gfdit.comm.even import EvenParts
from gfdit.comm.heap import KernelHeap, PeerSlice
from gfdit.comm.kernel_state import LaneState
from gfdit.kernels import push_exchange
from gfdit.kernels.members import Members


class Path(StrEnum):
    """How bytes travel. See the module of the kernel with that name for its range."""

    PUSH = "push"


@dataclass(frozen=True, slots=True)
class Choice:
    """A path with its parameters; equal in all members. ``chunk_bytes`` is a multiple of 16."""

    path: Path
    chunk_bytes: int
    num_programs: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """One operation, ready to launch. ``even`` is None exactly if the table of ``members`` is used.

    ``parts`` are by rank; a rank without one neither sends nor receives anything. ``alignment``: all offsets
    combined with "or".
    """

    heap: KernelHeap
    state: LaneState
    lane_index: int
    members: Members
    source: torch.Tensor
    target: torch.Tensor
    even: EvenParts | None
    parts: Mapping[int, PeerSlice]
    alignment: int
    choice: Choice


def push(exchange: Exchange) -> None:
    push_exchange.run(
        exchange.members,
        exchange.source.data_ptr(),
        exchange.target.data_ptr(),
        exchange.even or EvenParts(0, 0, 0),
        alignment=exchange.alignment,
        chunk_bytes=exchange.choice.chunk_bytes,
        num_programs=exchange.choice.num_programs,
    )


PATHS: Mapping[Path, Callable[[Exchange], None]] = {Path.PUSH: push}
