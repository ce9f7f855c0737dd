"""The two seams below the collectives: the memory every rank can address, and what moves data over it.

``GroupFreeComm`` speaks only these protocols, so it is the same on CPU and CUDA. A heap is set up once for
the world (paper §4.3) and knows its rank; ``open_lane`` gives the transport that agrees and moves data on
one lane. Host transports keep their counters in Python; device transports keep them in device memory and
launch kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from gfdit.comm.layout import SegmentLayout

if TYPE_CHECKING:
    from gfdit.comm.heads import HeadExchange
    from gfdit.comm.heap_tensors import HeapTensors
    from gfdit.comm.selector import Selector
    from gfdit.comm.selector_table import SelectorTable


class Operation(IntEnum):
    """What a token says was issued; part of its digest, so the numbers are part of the protocol."""

    BARRIER = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    BROADCAST = 4
    ALL_REDUCE = 5
    SEND = 6
    SCATTER_HEADS = 7
    GATHER_HEADS = 8


class Call(NamedTuple):
    """One collective as the transport sees it: ``seed`` identifies the ordered group within the session.

    ``num_bytes`` is the most that any two members send each other, where all of them know it; else None.
    """

    operation: Operation
    seed: int
    ranks: tuple[int, ...]
    num_bytes: int | None = None

    def describe(self) -> str:
        return f"{self.operation.name.lower()} of group {self.ranks}"


class PeerSlice(NamedTuple):
    """What one member exchanges with ``rank``: byte ranges of the contiguous input and output."""

    rank: int
    send_offset: int
    send_bytes: int
    recv_offset: int
    recv_bytes: int


class Transport(Protocol):
    """Agreement and data movement on one lane. Tensors are contiguous, on the heap's device, and validated.

    One thread at a time issues operations on a lane; ``abort`` may come from any thread.
    """

    @property
    def selector(self) -> Selector | None:
        """What chooses how kernels move data; None where the host does."""

    def exchange(self, call: Call, source: torch.Tensor, target: torch.Tensor, peers: Sequence[PeerSlice]) -> None:
        """Two-way: with every peer, send one byte range of ``source``, receive one into ``target``.

        A slice whose rank is the caller's is a local copy. Zero bytes still agree: that is a barrier.
        """

    def exchange_heads(self, call: Call, heads: HeadExchange) -> None:
        """Two-way: the head and sequence all-to-all of Ulysses attention."""

    def all_reduce(self, call: Call, flat: torch.Tensor) -> bool:
        """``flat`` (elements,) := the sum over the members in group order, in one go; False if it cannot.

        Then nothing has happened, in any member.
        """

    def push(self, call: Call, source: torch.Tensor, ranks: Sequence[int]) -> None:
        """One-way: all bytes of ``source`` to each of ``ranks``."""

    def pull(self, call: Call, target: torch.Tensor, rank: int) -> None:
        """One-way: fill ``target`` from ``rank``'s matching push."""

    def check(self) -> None:
        """Raise what operations so far have run into, if they do not raise themselves. Waits for none of them."""

    @property
    def num_failures(self) -> int:
        """How many failures of the device were raised so far; 0 where operations raise their own."""

    def warm_up(self) -> None:
        """Prepare all that operations may need, so that none of them has to. Communicates nothing."""

    def abort(self, ranks: Iterable[int]) -> None:
        """Make waits on the edges shared with ``ranks``, at both ends, raise CommAborted until a reset."""

    def reset(self, ranks: Iterable[int], generation: int | None = None) -> None:
        """Start the edges shared with ``ranks`` afresh on this side."""


class SymmetricHeap(Protocol):
    """One segment per rank, each addressable by every rank.

    ``session`` is a 64-bit number shared by the world; ``lanes`` names the lanes laid out in the segments.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def session(self) -> int: ...
    @property
    def lanes(self) -> tuple[str, ...]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def tensors(self) -> HeapTensors:
        """Where tensors of this rank's segment come from."""

    def base_pointer(self, rank: int) -> int:
        """Address, in this process, of the first byte of ``rank``'s segment."""

    def open_lane(self, lane: str, *, timeout_s: float) -> Transport:
        """The transport of ``lane``; each lane can be opened once per heap, since it owns the counters."""

    def close(self) -> None:
        """Unmap; the heap and everything opened from it is unusable afterwards."""


class KernelHeap(SymmetricHeap, Protocol):
    """A heap whose lanes are driven by kernels."""

    @property
    def layout(self) -> SegmentLayout: ...

    @property
    def multicast_pointer(self) -> int:
        """Where a store reaches every rank's segment at the same offset; 0 if the hardware cannot."""

    @property
    def selector_table(self) -> SelectorTable | None:
        """What was measured on this machine, to choose paths by; the same in all ranks."""

    def segment(self, rank: int) -> torch.Tensor:
        """All of ``rank``'s segment, uint8; a peer's can be written, too."""
