"""The ways in which kernels carry out an exchange (all-gather, all-to-all, barrier), one function each.

Which one is taken is up to ``gfdit.comm.selector``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gfdit.comm.choice import Choice, Path, Site, Situation
from gfdit.comm.even import EvenParts
from gfdit.comm.heap import KernelHeap, PeerSlice
from gfdit.comm.kernel_state import LaneState
from gfdit.kernels import push_exchange
from gfdit.kernels.members import Members


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


@dataclass(frozen=True, slots=True)
class ExchangePath:
    """``obstacle`` says why the path cannot serve a situation at a site; None if it can."""

    run: Callable[[Exchange], None]
    obstacle: Callable[[Situation, Site], str | None]


PATHS: Mapping[Path, ExchangePath] = {Path.PUSH: ExchangePath(push, lambda situation, site: None)}
