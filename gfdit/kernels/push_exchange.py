"""All-gather and all-to-all of any size: each rank pushes into its peers' data slots, by words or by tiles.

How it goes in time is said in ``gfdit.kernels.slot_rounds``; a unit is a byte.

Reference: ``HostTransport.exchange``. Range: large messages; see ``gfdit.comm.selector``. Never run on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.copy import copy_bytes, copy_share
from gfdit.kernels.edges import open_edges
from gfdit.kernels.launch import BULK, FEW_WIDTHS, TILED, WIDTHS, Launch, plan_launch
from gfdit.kernels.members import ROW_RECV_OFFSET, ROW_SEND_OFFSET, Members, part_at
from gfdit.kernels.slot_rounds import slot_rounds
from gfdit.kernels.tma_copy import TILE_ALIGNMENT, before_tiles, copy_tiles, tiles_written


def plan(
    members: Members,
    even: tuple[int, int, int],
    *,
    alignment: int,
    chunk_bytes: int,
    num_programs: int,
    tma: bool = False,
) -> Launch:
    """One launch, given its label and the addresses of source and target.

    Packed: ``even`` is (send_stride, recv_stride, num_bytes): position ``i`` gets ``num_bytes`` from
    ``source + i * send_stride``, and ``target + i * recv_stride`` gets what it sends. Otherwise the table says
    all that. ``alignment``: all offsets combined with "or". ``chunk_bytes``, a multiple of 16, and
    ``num_programs`` are equal in all members. ``tma``: copy tiles where addresses and offsets are multiples of 16;
    on Hopper or later.
    """
    by_words, by_tiles = (
        plan_launch(
            push_exchange,
            members,
            num_programs,
            shape,
            alignment=alignment,
            widths=WIDTHS if members.packed else FEW_WIDTHS,
            after=(*even, chunk_bytes),
            TMA=shape is TILED,
        )
        for shape in (BULK, TILED)
    )
    if not tma:
        return by_words

    def launch(label: int, source: int, target: int) -> None:  # peers cannot tell
        how = by_words if (source | target | alignment) % TILE_ALIGNMENT else by_tiles
        how(label, source, target)

    return launch


@launched
def push_exchange(
    members, source: tl.int64, target: tl.int64, send_stride: tl.int64, recv_stride: tl.int64,
    num_bytes: tl.int64, chunk_bytes: tl.int64,
    GROUP: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    if TMA:
        slot_rounds(
            open_edges(members, PACKED, PTX, GROUP, ROWS=True),
            ByteParts(source, target, send_stride, recv_stride, num_bytes, WIDTH, BLOCK),
            chunk_bytes, byte_units, put_tiles, take_tiles, keep_bytes,
        )  # fmt: skip
    else:
        slot_rounds(
            open_edges(members, PACKED, PTX, GROUP, ROWS=True),
            ByteParts(source, target, send_stride, recv_stride, num_bytes, WIDTH, BLOCK),
            chunk_bytes, byte_units, put_bytes, take_bytes, keep_bytes,
        )  # fmt: skip


class ByteParts(NamedTuple):
    """Stretches of bytes of ``source`` and ``target``; see ``plan``."""

    source: tl.tensor
    target: tl.tensor
    send_stride: tl.tensor
    recv_stride: tl.tensor
    num_bytes: tl.tensor
    width: tl.constexpr
    block: tl.constexpr


@triton.jit
def sent_part(group, parts, position):
    """Address and bytes of what goes to a member."""
    offset, num_bytes = part_at(
        group.table, position, parts.send_stride, parts.num_bytes, ROW_SEND_OFFSET, group.packed
    )
    return parts.source + offset, num_bytes


@triton.jit
def received_part(group, parts, position):
    """Address and bytes of what comes from a member."""
    offset, num_bytes = part_at(
        group.table, position, parts.recv_stride, parts.num_bytes, ROW_RECV_OFFSET, group.packed
    )
    return parts.target + offset, num_bytes


@triton.jit
def byte_units(group, parts, positions, FORTH: tl.constexpr):
    if FORTH:
        num_bytes = sent_part(group, parts, positions)[1]
    else:
        num_bytes = received_part(group, parts, positions)[1]
    return num_bytes, num_bytes * 0 + 1


@triton.jit
def put_bytes(group, parts, position, place, first, last):
    source = sent_part(group, parts, position)[0]
    copy_bytes(place, source + first, last - first, parts.width, parts.block)


@triton.jit
def take_bytes(group, parts, position, place, first, last):
    target = received_part(group, parts, position)[0]
    copy_bytes(target + first, place, last - first, parts.width, parts.block)


@triton.jit
def put_tiles(group, parts, position, place, first, last):
    source = sent_part(group, parts, position)[0]
    copy_tiles(place, source + first, last - first, parts.block)
    tiles_written(group.ptx)


@triton.jit
def take_tiles(group, parts, position, place, first, last):
    target = received_part(group, parts, position)[0]
    before_tiles(group.ptx)
    copy_tiles(target + first, place, last - first, parts.block)


@triton.jit
def keep_bytes(group, parts):
    source = sent_part(group, parts, group.index)[0]
    target, num_bytes = received_part(group, parts, group.index)
    copy_share(target, source, num_bytes, parts.width, parts.block)
