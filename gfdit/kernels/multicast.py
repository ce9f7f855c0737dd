"""One store that reaches the segments of all ranks: what the switch between GPUs can do since Hopper.

The heap maps all segments a second time, at an address where a store goes to all of them, members of the group or
not. So each rank has an area of its own in every segment, which nobody else writes, and an operation ends with
word that all members have taken what was there. A rank whose data are not aligned, or whose heap has no such
address, stores to each member instead; its peers cannot tell.

The two addresses of an area are different proxies of memory, so a fence goes between stores to all and the token
that publishes them, and between a token that was observed and loads from the area (``fence_alias``).

Never run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.kernels.copy import copy_bytes, round_share
from gfdit.kernels.edges import LANE_MULTICAST, LANE_MULTICAST_BASE, LANE_MULTICAST_BYTES, rank_at, segment


@triton.jit
def area_offset(lane, source_rank, share):
    """Where in every segment the area of ``source_rank`` has this program's ``share``, in bytes."""
    area = tl.load(lane + LANE_MULTICAST) + source_rank * tl.load(lane + LANE_MULTICAST_BYTES)
    return area + tl.program_id(0) * share


@triton.jit
def cut(lane, num_bytes):
    """Bytes that a program moves in a round, and how many rounds there are."""
    share = round_share(num_bytes, tl.load(lane + LANE_MULTICAST_BYTES), tl.num_programs(0))
    round_bytes = share * tl.num_programs(0)
    return share, tl.maximum((num_bytes + round_bytes - 1) // round_bytes, 1)


@triton.jit
def take_share(edges, source_rank, target, share, num_bytes, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this program's share of a round of ``num_bytes`` out of the own area of ``source_rank``."""
    begin = (step * tl.num_programs(0) + tl.program_id(0)) * share
    area = segment(edges.group.lane, edges.rank) + area_offset(edges.group.lane, source_rank, share)
    copy_bytes(target + begin, area, tl.minimum(share, num_bytes - begin), WIDTH, BLOCK)


@triton.jit
def store_share(edges, source, share, num_bytes, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Its counterpart: into the area of this rank in the segments of all other members, at least."""
    begin = (step * tl.num_programs(0) + tl.program_id(0)) * share
    place = area_offset(edges.group.lane, edges.rank, share)
    store_to_members(edges.group, place, source + begin, tl.minimum(share, num_bytes - begin), WIDTH, BLOCK)


@triton.jit
def store_to_members(group, offset, source, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy ``num_bytes`` from address ``source`` to ``offset`` of the segment of every other member, at least."""
    whole = tl.zeros((), tl.int64)
    if group.ptx:
        if WIDTH == 16:
            whole = tl.maximum(num_bytes, 0) // 16 * 16
            _store_to_all(tl.load(group.lane + LANE_MULTICAST_BASE) + offset, source, whole, BLOCK)
            fence_alias(group.ptx)
    for distance in range(1, group.size):
        position = (group.index + distance) % group.size
        peer = rank_at(group, position)
        place = segment(group.lane, peer) + offset + whole
        if group.ptx and WIDTH == 16:
            copy_bytes(place, source + whole, num_bytes - whole, 1, 256)
        else:
            copy_bytes(place, source, num_bytes, WIDTH, BLOCK)


@triton.jit
def _store_to_all(address, source, num_bytes, BLOCK: tl.constexpr):
    words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    for first in range(0, num_bytes, BLOCK):
        offsets = first + tl.arange(0, BLOCK // 16) * 16
        mask = offsets < num_bytes
        pairs = words + (offsets // 8)[:, None] + tl.arange(0, 2)[None, :]
        low, high = tl.split(tl.load(pairs, mask=mask[:, None]))
        # The type says how wide it is; bits are stored as they are.
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            .reg .b32 word<4>;
            setp.ne.s32 wanted, $4, 0;
            mov.b64 {word0, word1}, $2;
            mov.b64 {word2, word3}, $3;
            @wanted multimem.st.relaxed.sys.global.v4.f32 [$1], {word0, word1, word2, word3};
            mov.b64 $0, $2;
            }""",
            "=l,l,l,l,r",
            [address + offsets, low, high, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fence_alias(PTX: tl.constexpr):
    """Order what this thread does through one address of an area with what it does through the other."""
    if PTX:
        tl.inline_asm_elementwise(
            "fence.proxy.alias; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
