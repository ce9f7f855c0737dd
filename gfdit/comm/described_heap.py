"""What heaps have in common that are made of a descriptor: whose they are, lanes, scratch region, measurements."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from gfdit.comm.heap_descriptor import HeapDescriptor, Lanes
from gfdit.comm.heap_tensors import HeapTensors
from gfdit.comm.selector_table import SelectorTable


class DescribedHeap:
    """A heap says where the segments are (``segment``, ``base_pointer``), and what moves data (``open_lane``)."""

    multicast_pointer = 0

    def __init__(self, descriptor: HeapDescriptor, rank: int) -> None:
        """Raises ValueError for a rank out of range."""
        descriptor.check_rank(rank)
        self.descriptor = descriptor
        self.layout = descriptor.layout
        self.rank = rank
        table = descriptor.selector_table
        self.selector_table = SelectorTable.load(Path(table)) if table else None
        self.tensors = HeapTensors(lambda: self.scratch(rank), self.layout.scratch_bytes)
        self._lanes = Lanes(rank, descriptor.lanes)

    @property
    def world_size(self) -> int:
        return self.descriptor.world_size

    @property
    def session(self) -> int:
        return self.descriptor.session

    @property
    def lanes(self) -> tuple[str, ...]:
        return self.descriptor.lanes

    def segment(self, rank: int) -> torch.Tensor:
        """All of ``rank``'s segment, uint8."""
        raise NotImplementedError

    def scratch(self, rank: int) -> torch.Tensor:
        """``rank``'s scratch region, uint8 of ``scratch_bytes``."""
        begin = self.layout.scratch_offset
        return self.segment(rank)[begin : begin + self.layout.scratch_bytes]

    def close(self) -> None:
        """No lane can be opened any more. The memory goes with who uses it: peers may still be reading it."""
        self._lanes.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
