"""The two seams below the collectives: the memory every rank can address, and what moves data over it.

``GroupFreeComm`` speaks only these protocols, so it is the same on CPU and CUDA. A heap is set up once for
the world (paper §4.3) and knows its rank; ``open_lane`` gives the transport that agrees and moves data on
one lane. Host transports keep their counters in Python; device transports keep them in device memory and
launch kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from gfdit.comm.layout import SegmentLayout

if TYPE_CHECKING:
    from gfdit.comm.heads import HeadExchange
    from gfdit.comm.heap_tensors import HeapTensors
    from gfdit.comm.places import Places
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


Plan = Callable[..., None]
"""An operation, given its tensors: of the shapes, strides and dtypes that it was planned for."""


class Transport(Protocol):
    """Agreement and data movement on one lane. Tensors are contiguous, on the heap's device, and validated.

    What does not depend on the tensors is planned, once for any number of operations. One thread at a time issues
    operations on a lane; ``abort`` may come from any thread.
    """

    @property
    def selector(self) -> Selector | None:
        """What chooses how kernels move data; None where the host does."""

    @property
    def places(self) -> Places | None:
        """Where outputs of an exchange of heads had best be; None if that makes no difference."""

    def plan_exchange(self, call: Call, peers: Sequence[PeerSlice]) -> Plan:
        """Two-way, of (source, target): with every peer, send one byte range of it, receive one into it.

        A slice whose rank is the caller's is a local copy. Zero bytes still agree: that is a barrier.
        """

    def plan_heads(self, call: Call, heads: HeadExchange) -> Plan:
        """Two-way, of (sources, targets) like those of ``heads``: the all-to-all of Ulysses attention."""

    def plan_all_reduce(self, call: Call, num_elements: int, dtype: torch.dtype) -> Plan | None:
        """Of one (elements,): becomes the sum over the members in group order, in one go; None if that cannot be.

        The same answer in all members.
        """

    def plan_push(self, call: Call, num_bytes: int) -> Plan:
        """One-way, of one tensor: all its bytes to the other ranks of the call, whose first is the caller."""

    def plan_pull(self, call: Call, num_bytes: int) -> Plan:
        """One-way, of one tensor: fill it from the first rank of the call."""

    def check(self) -> None:
        """Raise what operations so far have run into, if they do not raise themselves. Waits for none of them."""

    @property
    def num_failures(self) -> int:
        """How many failures of the device were raised so far; 0 where operations raise their own."""

    def warm_up(self) -> None:
        """Prepare all that operations may need, so that none of them has to. Communicates nothing."""

    def abort(self, ranks: Iterable[int], newest: int | None = None) -> None:
        """Make waits on the edges shared with ``ranks``, at both ends, raise CommAborted until a reset.

        Edges of a generation above ``newest`` are left alone.
        """

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
