"""One exchange (all-gather, all-to-all, barrier) as kernels are prepared for it: everything but the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gfdit.comm.choice import Choice
from gfdit.comm.even import EvenParts
from gfdit.comm.heap import Call, KernelHeap, Operation, PeerSlice
from gfdit.comm.kernel_state import LaneState
from gfdit.kernels.members import Members


@dataclass(frozen=True, slots=True)
class Exchange:
    """``even`` is None exactly if the table of ``members`` is used.

    ``parts`` are by rank; a rank without one neither sends nor receives anything. ``alignment``: all offsets
    combined with "or".
    """

    call: Call
    heap: KernelHeap
    state: LaneState
    lane_index: int
    members: Members
    even: EvenParts | None
    parts: Mapping[int, PeerSlice]
    alignment: int
    choice: Choice

    def export_areas(self) -> tuple[int, int]:
        """How the export area is shared by the positions of the group: stride and size, multiples of 16."""
        export_bytes = self.heap.layout.export_bytes
        if self.call.operation == Operation.ALL_GATHER:  # everybody gets the same
            return 0, export_bytes
        area_bytes = export_bytes // self.members.size // 16 * 16
        return area_bytes, area_bytes

    def export_area(self, rank: int) -> torch.Tensor:
        """What ``rank`` lets its peers read on this lane, uint8."""
        layout = self.heap.layout
        begin = layout.export_offset(self.lane_index)
        return self.heap.segment(rank)[begin : begin + layout.export_bytes]
