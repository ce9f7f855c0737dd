"""Rank processes whose collectives are Triton kernels, run by the interpreter over shared memory."""

from __future__ import annotations

from gfdit.comm import SharedMemoryHeap
from gfdit.comm.heap import Transport


class InterpretedHeap(SharedMemoryHeap):
    """The CPU heap with kernels in place of the host transport. Only for rank processes of their own."""

    def open_lane(self, lane: str, *, timeout_s: float) -> Transport:
        import tests.kernels.interpreter  # noqa: F401
        from gfdit.comm.kernel_transport import KernelTransport

        return KernelTransport(self, lane, timeout_s)
