"""Where things are inside a rank's segment.

Segment of rank ``r``::

    for each lane, for each peer p:   one 64-byte line of words, written by p (and by r: abort only)
    for each lane, for each peer p:   two data slots, written by p, read by r
    scratch                           free for kernels and tests

Everything ``r`` waits on is in its own segment, so waiting never crosses a link.
"""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.comm.agreement import NUM_SLOTS

LINE_BYTES = 64
PAGE_BYTES = 4096
# Word indices (8 bytes each) inside an edge's line: NUM_SLOTS signal tokens, then these.
CREDIT_WORD = NUM_SLOTS
ABORT_WORD = NUM_SLOTS + 1


def _align(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Byte offsets inside a segment; identical in every rank by construction."""

    world_size: int
    num_lanes: int
    slot_bytes: int
    scratch_bytes: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.num_lanes < 1:
            raise ValueError(f"a heap needs ranks and lanes, got {self.world_size} and {self.num_lanes}")
        if self.slot_bytes < LINE_BYTES or self.slot_bytes % LINE_BYTES:
            raise ValueError(f"slot_bytes must be a positive multiple of {LINE_BYTES}, got {self.slot_bytes}")
        if self.scratch_bytes < 0:
            raise ValueError(f"scratch_bytes must not be negative, got {self.scratch_bytes}")

    @property
    def _edges_per_lane(self) -> int:
        return self.world_size - 1

    @property
    def _data_offset(self) -> int:
        return _align(self.num_lanes * self._edges_per_lane * LINE_BYTES, PAGE_BYTES)

    @property
    def scratch_offset(self) -> int:
        num_slots = self.num_lanes * self._edges_per_lane * NUM_SLOTS
        return self._data_offset + _align(num_slots * self.slot_bytes, PAGE_BYTES)

    @property
    def segment_bytes(self) -> int:
        # A world of one has no edges, yet something to map.
        return max(self.scratch_offset + _align(self.scratch_bytes, PAGE_BYTES), PAGE_BYTES)

    def line_offset(self, lane: int, owner: int, peer: int) -> int:
        """The line in ``owner``'s segment that ``peer`` writes."""
        return self._edge_index(lane, owner, peer) * LINE_BYTES

    def slot_offset(self, lane: int, owner: int, peer: int, slot: int) -> int:
        """Data slot ``slot`` in ``owner``'s segment that ``peer`` writes."""
        index = self._edge_index(lane, owner, peer) * NUM_SLOTS + slot
        return self._data_offset + index * self.slot_bytes

    def _edge_index(self, lane: int, owner: int, peer: int) -> int:
        # A rank shares no edge with itself: peers above the owner move down by one.
        return lane * self._edges_per_lane + peer - (peer > owner)
