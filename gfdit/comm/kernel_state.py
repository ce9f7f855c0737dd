"""What a lane's kernels need in device memory: the constants of the lane, its counters, and a status cell."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref

import torch

from gfdit.comm.choice import Site
from gfdit.comm.heap import KernelHeap
from gfdit.kernels import edges
from gfdit.kernels.tma_copy import WORKSPACE_BYTES

_CLOCK_TICK_S = 0.001


class LaneState:
    """Allocated once per lane, at start; nothing here is allocated while serving.

    ``constants`` is what kernels call ``lane``. ``state`` holds the counters, rows of ``edges.EDGE_WORDS``
    after the first ``edges.STATE_WORDS``. ``status`` is host memory that the device writes, so reading it
    waits for nothing. ``workspace`` is for the descriptors of ``gfdit.kernels.tma_copy``.
    """

    def __init__(self, heap: KernelHeap, lane_index: int, timeout_s: float) -> None:
        self.on_gpu = heap.device.type == "cuda"
        num_words = edges.STATE_WORDS + heap.world_size * edges.EDGE_WORDS
        self.state = torch.zeros(num_words, dtype=torch.int64, device=heap.device)
        self.status = torch.zeros(edges.STATUS_WORDS, dtype=torch.int64, pin_memory=self.on_gpu)
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=heap.device)
        self.clock = None if self.on_gpu else HostClock()
        layout = heap.layout
        words = [0] * (edges.LANE_WORDS + heap.world_size)
        words[edges.LANE_RANK.value] = heap.rank
        words[edges.LANE_STATE.value] = self.state.data_ptr()
        words[edges.LANE_STATUS.value] = self.status.data_ptr()
        words[edges.LANE_CLOCK.value] = self.clock.word.data_ptr() if self.clock else 0
        words[edges.LANE_TIMEOUT_NS.value] = int(timeout_s * 1e9)
        words[edges.LANE_LINES.value] = layout.lines_offset(lane_index)
        words[edges.LANE_SLOTS.value] = layout.slots_offset(lane_index)
        words[edges.LANE_SLOT_BYTES.value] = layout.slot_bytes
        words[edges.LANE_LOW_LATENCY.value] = layout.low_latency_offset(lane_index)
        words[edges.LANE_LOW_LATENCY_SLOT_BYTES.value] = layout.low_latency_slot_bytes
        words[edges.LANE_EXPORT.value] = layout.export_offset(lane_index)
        words[edges.LANE_MULTICAST.value] = layout.multicast_offset(lane_index, 0)
        words[edges.LANE_MULTICAST_BYTES.value] = layout.multicast_bytes
        words[edges.LANE_MULTICAST_BASE.value] = heap.multicast_pointer
        for rank in range(heap.world_size):
            words[edges.LANE_BASES.value + rank] = heap.base_pointer(rank)
        self.constants = torch.tensor(words, dtype=torch.int64).to(heap.device)
        if self.on_gpu:
            # A lane is made on one stream and used on another.
            torch.cuda.current_stream(heap.device).synchronize()

    def edge(self, peer: int) -> torch.Tensor:
        """The counters of the edges shared with ``peer``."""
        begin = edges.STATE_WORDS + peer * edges.EDGE_WORDS
        return self.state[begin : begin + edges.EDGE_WORDS]


def site_of(heap: KernelHeap) -> Site:
    """What a selector has to know of a heap and its device."""
    has_multicast = heap.multicast_pointer != 0
    if heap.device.type != "cuda":
        return Site(heap.layout, "the Triton interpreter", 0, has_multicast)
    major, minor = torch.cuda.get_device_capability(heap.device)
    return Site(heap.layout, torch.cuda.get_device_name(heap.device), 10 * major + minor, has_multicast)


class HostClock:
    """A word of host memory that follows the monotonic clock: what plain Triton kernels take the time from."""

    def __init__(self) -> None:
        self.word = torch.zeros(1, dtype=torch.int64)
        # Not through torch: a thread that is in its C++ code when the process ends takes the process down.
        self.now_ns = ctypes.c_int64.from_address(self.word.data_ptr())
        self.now_ns.value = time.monotonic_ns()
        threading.Thread(target=_tick, args=(weakref.ref(self),), daemon=True, name="gfdit-clock").start()


def _tick(clock: weakref.ref[HostClock]) -> None:
    while (alive := clock()) is not None:
        alive.now_ns.value = time.monotonic_ns()
        del alive
        time.sleep(_CLOCK_TICK_S)
