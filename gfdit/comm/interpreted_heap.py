"""The CPU heap with kernels in place of the host: Triton's interpreter runs them, one process per rank.

For tests of the kernels; a collective takes milliseconds. The interpreter is not made for threads: one lane at a
time.
"""

from __future__ import annotations

import os
import sys

from gfdit.comm.heap import Transport
from gfdit.comm.shared_memory_heap import SharedMemoryHeap


class InterpretedHeap(SharedMemoryHeap):
    """Only for rank processes of their own: interpreted or compiled is decided when triton is imported."""

    def open_lane(self, lane: str, *, timeout_s: float) -> Transport:  # type: ignore[override]
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("triton was imported without TRITON_INTERPRET=1: kernels cannot be interpreted")
        os.environ["TRITON_INTERPRET"] = "1"
        self._lanes.open(lane)
        from gfdit.comm.kernel_transport import KernelTransport

        return KernelTransport(self, lane, timeout_s)
