"""Copies by the Tensor Memory Accelerator of Hopper and later: whole tiles, several in flight, few instructions.

A stretch of bytes is a matrix of rows of 1 KiB; tiles of it go through shared memory. What is left over at the end
is copied by words. The accelerator is another proxy of memory, so agreement takes two steps more:
``tiles_written`` before tokens are published, ``before_tiles`` after tokens were observed. Tokens are as ever, so
a rank may copy with tiles while its peers copy with words.

The descriptors are made on the device, in memory that Triton's allocator gives: see ``launch_with_workspace``.
Reference: ``gfdit.kernels.copy.copy_bytes``. Compiled for compute capability 9.0 and later. Never run on a GPU.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from gfdit.comm.layout import MAX_PROGRAMS
from gfdit.kernels.copy import copy_bytes

# Of addresses and offsets, in bytes.
TILE_ALIGNMENT = 16
_TILE_WORDS = tl.constexpr(256)  # 32-bit words; the largest box
_ROW_BYTES = tl.constexpr(1024)
# Global memory of a launch: 128 bytes for each descriptor that the code makes, in each of MAX_PROGRAMS programs.
WORKSPACE_BYTES = MAX_PROGRAMS * 8 * 128


@triton.jit
def copy_tiles(target, source, num_bytes, BLOCK: tl.constexpr):
    """Copy ``num_bytes``, any number, between addresses that are multiples of 16; ``BLOCK`` bytes a turn."""
    rows = (tl.maximum(num_bytes, 0) // _ROW_BYTES).to(tl.int32)
    if rows > 0:
        incoming = _matrix(source, rows, BLOCK)
        outgoing = _matrix(target, rows, BLOCK)
        for first in tl.range(0, rows, BLOCK // _ROW_BYTES, num_stages=3):
            outgoing.store([first, 0], incoming.load([first, 0]))
    whole = rows.to(tl.int64) * _ROW_BYTES
    copy_bytes(target + whole, source + whole, num_bytes - whole, 16, _ROW_BYTES)


@triton.jit
def _matrix(address, rows, BLOCK: tl.constexpr):
    words = address.to(tl.pointer_type(tl.int32))
    return tl.make_tensor_descriptor(
        words, [rows, _TILE_WORDS], [_TILE_WORDS, 1], [BLOCK // _ROW_BYTES, _TILE_WORDS]
    )


@triton.jit
def tiles_written(PTX: tl.constexpr):
    """Wait until the tiles that this thread stored are in memory, visible to what it does next."""
    if PTX:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def before_tiles(PTX: tl.constexpr):
    """Tiles loaded and stored from here on come after all that this thread has seen."""
    if PTX:
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


def launch_with_workspace(workspace: torch.Tensor, launch: Callable[[], None]) -> None:
    """Call ``launch``, whose kernel makes descriptors in ``workspace``; what others told Triton stays as it is."""
    context = contextvars.copy_context()
    context.run(triton.set_allocator, lambda size, alignment, stream: _checked(workspace, size))
    context.run(launch)


def _checked(workspace: torch.Tensor, num_bytes: int) -> torch.Tensor:
    assert num_bytes <= workspace.nbytes, f"a kernel wants a workspace of {num_bytes} bytes"
    return workspace
