"""Starting kernels: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

from typing import Any

import triton

# Bytes a program copies in a turn. On a GPU: four 16-byte accesses of each of 128 threads.
GPU_BLOCK_BYTES = 8192
# The interpreter pays by the operation, not by the byte.
HOST_BLOCK_BYTES = 1 << 18


def block_bytes(ptx: bool) -> int:
    return GPU_BLOCK_BYTES if ptx else HOST_BLOCK_BYTES


def launch(
    kernel: Any, num_programs: int, arguments: tuple[object, ...], *, num_warps: int = 4, **constants: Any
) -> None:
    """Enqueue ``kernel`` on the current stream; ``constants`` are its ``constexpr`` parameters.

    Raises RuntimeError for a kernel that is neither compiled for a GPU nor interpreted.
    """
    if not constants["PTX"] and isinstance(kernel, triton.JITFunction):
        raise RuntimeError(
            "kernels are not interpreted: without a GPU, set TRITON_INTERPRET=1 before triton is imported"
        )
    kernel[(num_programs,)](*arguments, **constants, num_warps=num_warps)


def common_width(*values: int) -> int:
    """The widest access (16, 4 or 1 bytes) that all these addresses and strides allow."""
    combined = 0
    for value in values:
        combined |= value
    return 16 if combined % 16 == 0 else 4 if combined % 4 == 0 else 1
