"""Where things are inside a rank's segment.

Segment of rank ``r``::

    for each lane, for each peer p:   one line of 64-bit words, written by p (and by r: abort, offsets it read)
    for each lane, for each peer p:   two data slots, written by p, read by r
    for each lane, for each peer p:   two low-latency slots (data and flag in one word), written by p, read by r
    for each lane:                    export area, written by r, read by its peers
    for each lane, for each rank s:   multicast area of s, written by s in every segment at once
    places                            of the first lane: where peers put heads, written by them
    scratch                           tensors allocated from the heap; free for tests

Everything ``r`` waits on is in its own segment, so waiting never crosses a link. The host transport uses the first
signal word of a slot and the data slots; kernels use all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.comm.agreement import NUM_SLOTS

WORD_BYTES = 8
PAGE_BYTES = 4096
# A kernel splits what it puts into a slot into at most this many chunks, each with its own token: so many that
# those of a slot of 8 MiB are still small enough for messages of some KB per program.
MAX_CHUNKS = 512
MAX_PROGRAMS = 64  # of a launch
# Word indices (8 bytes each) inside an edge's line.
CREDIT_WORD = 0
ABORT_WORD = 1
ARMED_WORD = 2  # the receiver cleared its low-latency slots in this generation
# NUM_SLOTS x MAX_TENSORS x PLACE_FIELDS words: where in the writer's segment a tensor is, and its strides.
PLACE_WORD = 4
MAX_TENSORS = 3  # of an exchange of heads: query, key and value
PLACE_FIELDS = 3
SIGNAL_WORD = 32  # NUM_SLOTS x MAX_CHUNKS tokens
CHANNEL_CREDIT_WORD = SIGNAL_WORD + NUM_SLOTS * MAX_CHUNKS  # MAX_PROGRAMS credits, one per program of a launch
assert PLACE_WORD + NUM_SLOTS * MAX_TENSORS * PLACE_FIELDS <= SIGNAL_WORD
LINE_BYTES = (CHANNEL_CREDIT_WORD + MAX_PROGRAMS) * WORD_BYTES
# Two exchanges' outputs are in use at a time, a third is being filled; the last one is never handed out.
NUM_PLACES = 4


def _align(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Byte offsets inside a segment; identical in every rank by construction.

    ``low_latency_bytes`` counts payload: a low-latency slot takes twice that. ``place_bytes``: of each of the
    ``NUM_PLACES``.
    """

    world_size: int
    num_lanes: int
    slot_bytes: int
    scratch_bytes: int = 0
    low_latency_bytes: int = 0
    export_bytes: int = 0
    multicast_bytes: int = 0
    place_bytes: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.num_lanes < 1:
            raise ValueError(f"a heap needs ranks and lanes, got {self.world_size} and {self.num_lanes}")
        if self.slot_bytes < 64 or self.slot_bytes % 64:
            raise ValueError(f"slot_bytes must be a positive multiple of 64, got {self.slot_bytes}")
        for name in ("scratch_bytes", "low_latency_bytes", "export_bytes", "multicast_bytes", "place_bytes"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
            if value % 64 and name != "scratch_bytes":
                raise ValueError(f"{name} must be a multiple of 64, got {value}")

    @property
    def edges_per_lane(self) -> int:
        """A rank shares no edge with itself: peers above the owner move down by one."""
        return self.world_size - 1

    @property
    def _num_edges(self) -> int:
        return self.num_lanes * self.edges_per_lane

    @property
    def low_latency_slot_bytes(self) -> int:
        return 2 * self.low_latency_bytes

    @property
    def _data_offset(self) -> int:
        return _align(self._num_edges * LINE_BYTES, PAGE_BYTES)

    @property
    def _low_latency_offset(self) -> int:
        return self._data_offset + _align(self._num_edges * NUM_SLOTS * self.slot_bytes, PAGE_BYTES)

    @property
    def _export_offset(self) -> int:
        slots = self._num_edges * NUM_SLOTS * self.low_latency_slot_bytes
        return self._low_latency_offset + _align(slots, PAGE_BYTES)

    @property
    def _multicast_offset(self) -> int:
        return self._export_offset + _align(self.num_lanes * self.export_bytes, PAGE_BYTES)

    @property
    def _places_offset(self) -> int:
        areas = self.num_lanes * self.world_size * self.multicast_bytes
        return self._multicast_offset + _align(areas, PAGE_BYTES)

    @property
    def scratch_offset(self) -> int:
        return self._places_offset + _align(NUM_PLACES * self.place_bytes, PAGE_BYTES)

    @property
    def segment_bytes(self) -> int:
        # A world of one has no edges, yet something to map.
        return max(self.scratch_offset + _align(self.scratch_bytes, PAGE_BYTES), PAGE_BYTES)

    def lines_offset(self, lane: int) -> int:
        """The lines of a lane, one per edge."""
        return lane * self.edges_per_lane * LINE_BYTES

    def line_offset(self, lane: int, owner: int, peer: int) -> int:
        """The line in ``owner``'s segment that ``peer`` writes."""
        return self.lines_offset(lane) + _edge_index(owner, peer) * LINE_BYTES

    def slots_offset(self, lane: int) -> int:
        """The data slots of a lane, ``NUM_SLOTS`` per edge."""
        return self._data_offset + lane * self.edges_per_lane * NUM_SLOTS * self.slot_bytes

    def slot_offset(self, lane: int, owner: int, peer: int, slot: int) -> int:
        """Data slot ``slot`` in ``owner``'s segment that ``peer`` writes."""
        index = _edge_index(owner, peer) * NUM_SLOTS + slot
        return self.slots_offset(lane) + index * self.slot_bytes

    def low_latency_offset(self, lane: int) -> int:
        """The low-latency slots of a lane, ``NUM_SLOTS`` per edge."""
        return self._low_latency_offset + lane * self.edges_per_lane * NUM_SLOTS * self.low_latency_slot_bytes

    def export_offset(self, lane: int) -> int:
        """What the owner of a segment lets its peers read."""
        return self._export_offset + lane * self.export_bytes

    def multicast_offset(self, lane: int, source: int) -> int:
        """What ``source`` writes into all segments at once."""
        return self._multicast_offset + (lane * self.world_size + source) * self.multicast_bytes

    def place_offset(self, place: int) -> int:
        """Where peers put heads."""
        return self._places_offset + place * self.place_bytes


def _edge_index(owner: int, peer: int) -> int:
    return peer - (peer > owner)
