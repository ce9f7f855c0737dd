"""How a launch learns its group and who exchanges what: by value, or through a table in device memory.

Packed: up to 16 ranks of 8 bits in two integers; every edge moves the same number of bytes, at offsets that are
multiples of the position. Table: one row of ``ROW_WORDS`` words per position, for larger groups and uneven
parts; written once per distinct content, when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

ROW_RANK = tl.constexpr(0)
ROW_SEND_OFFSET = tl.constexpr(1)
ROW_SEND_BYTES = tl.constexpr(2)
ROW_RECV_OFFSET = tl.constexpr(3)
ROW_RECV_BYTES = tl.constexpr(4)
ROW_DIGEST = tl.constexpr(5)
ROW_WORDS = 8
MAX_PACKED = 16

_ROW_WORDS = tl.constexpr(ROW_WORDS)


class Told(NamedTuple):
    """What every kernel is told first, in one parameter; or the types of that.

    ``lane``: see ``gfdit.kernels.edges``. ``ranks_low``, ``ranks_high``: the packed ranks. ``size``, ``index``: of
    the group, and this rank's position in it. ``operation``: the label of the launch.
    """

    lane: Any
    ranks_low: Any
    ranks_high: Any
    table: Any
    size: Any
    index: Any
    digest: Any
    operation: Any


@dataclass(frozen=True, slots=True)
class Members:
    """The group of a launch, as every kernel takes it.

    ``lane``: the lane's constants on the device. ``table``: rows as above, or anything if ``packed``. ``digest``:
    what tokens say (rows have their own, for what moves their bytes). ``ptx``: compiled, else interpreted.
    """

    lane: torch.Tensor
    ranks: tuple[int, ...]
    index: int
    digest: int
    table: torch.Tensor
    packed: bool
    ptx: bool

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def block_size(self) -> int:
        """A power of two not below ``size``; a group of one is taken for one of two, which saves a variant."""
        return block_size(self.size)

    def vector_size(self, num_warps: int) -> int:
        """Elements of a block by position, one for every thread of a program: waits need that (see ``edges``)."""
        return vector_size(self.size, num_warps, self.ptx)

    def told(self) -> Callable[[int], Told]:
        """What launches are told, given their labels."""
        low, high = pack_ranks(self.ranks) if self.packed else (0, 0)
        return partial(Told, self.lane, low, high, self.table, self.size, self.index, self.digest)


def block_size(group_size: int) -> int:
    """See ``Members.block_size``."""
    return 1 << max(group_size - 1, 1).bit_length()


def vector_size(group_size: int, num_warps: int, ptx: bool) -> int:
    """The same for all small groups, so that there are few variants. A power of two."""
    return max(block_size(group_size), 32 * num_warps if ptx else 32)


def pack_ranks(ranks: tuple[int, ...]) -> tuple[int, int]:
    """Two signed 64-bit integers that hold up to 16 ranks below 256."""
    if len(ranks) > MAX_PACKED or max(ranks) > 255:
        raise ValueError(f"at most {MAX_PACKED} ranks below 256 can be packed, got {ranks}")
    packed = bytes(ranks).ljust(MAX_PACKED, b"\0")
    return int.from_bytes(packed[:8], "little", signed=True), int.from_bytes(packed[8:], "little", signed=True)


@triton.jit
def ranks_at(ranks_low, ranks_high, table, position, PACKED: tl.constexpr):
    """Global rank (int64) at ``position``, scalar or block; junk for positions outside the group if packed."""
    if PACKED:
        word = tl.where(position < 8, ranks_low, ranks_high)
        rank = (word >> ((position % 8) * 8).to(tl.int64)) & 0xFF
    else:
        rank = tl.load(table + position * _ROW_WORDS + ROW_RANK)
    return rank


@triton.jit
def row(table, position, FIELD: tl.constexpr):
    """A field of the table at ``position``, which must be in the table."""
    return tl.load(table + position * _ROW_WORDS + FIELD)


@triton.jit
def part_at(table, position, stride, num_bytes, OFFSET: tl.constexpr, PACKED: tl.constexpr):
    """Offset and size in bytes of what goes to (or comes from) ``position``, scalar or block.

    ``OFFSET`` is ROW_SEND_OFFSET or ROW_RECV_OFFSET; ``stride`` and ``num_bytes`` are those of packed parts.
    """
    if PACKED:
        offset, size = position * stride, num_bytes + position * 0
    else:
        # The size follows the offset in a row.
        offset, size = row(table, position, OFFSET), row(table, position, OFFSET + 1)
    return offset.to(tl.int64), size.to(tl.int64)


@triton.jit
def edge_bytes_at(table, positions, num_bytes, PACKED: tl.constexpr):
    """The larger of the two directions of each edge in bytes, scalar or block."""
    if PACKED:
        edge_bytes = positions * 0 + num_bytes
    else:
        edge_bytes = tl.maximum(row(table, positions, ROW_SEND_BYTES), row(table, positions, ROW_RECV_BYTES))
    return edge_bytes.to(tl.int64)
