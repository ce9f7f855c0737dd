"""Ulysses' all-to-all between heads and tokens, folded with its permutes: strided in, strided out.

Scatter: from (B, L, H, D), all heads of the own tokens, to (B, S, h, D), the own heads of all tokens. Gather:
back. Both are exchanges of rows, one per token: what goes to or comes from a peer is a run of ``units`` head
units of each row. Several tensors travel in one launch (query, key, value), their rows side by side; a tensor
with fewer heads (grouped attention) has smaller units. Heads and tokens may be uneven.

Rows are pushed straight from the source's strides, and copied straight to the target's: no permute, no contiguous
copy, no stacking. On the way they are in a data slot of the peer, or nowhere, if its targets are in its segment.
How it goes in time is said in ``gfdit.kernels.slot_rounds``, where a unit is a row, and in
``gfdit.kernels.direct_rounds``.

Reference: ``gfdit.comm.heads.plan_by_copies``. Never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from gfdit.kernels.compiled import launched
from gfdit.kernels.direct_rounds import direct_rounds, place_words
from gfdit.kernels.edges import EDGE_OBSERVED, edge_state, line, open_edges, rank_at, segment
from gfdit.kernels.launch import FEW_WIDTHS, ROWS, Launch, combined, plan_launch
from gfdit.kernels.members import Members, row
from gfdit.kernels.memory import word_pointer
from gfdit.kernels.slot_rounds import slot_rounds

# Fields of a table's row, in place of byte ranges.
ROW_UNIT_OFFSET = tl.constexpr(1)
ROW_UNITS = tl.constexpr(2)
ROW_TOKEN_OFFSET = tl.constexpr(3)
ROW_TOKENS = tl.constexpr(4)


class Strides(NamedTuple):
    """One tensor of the exchange, in bytes: strides of batch and token of both ends, and a head unit."""

    source_batch: int
    source_token: int
    target_batch: int
    target_token: int
    unit_bytes: int


def plan(
    members: Members,
    strides: Sequence[Strides],
    *,
    batch: int,
    units: int,
    tokens: int,
    token_stride: int,
    gather: bool,
    chunk_bytes: int,
    num_programs: int,
    direct: bool = False,
) -> Launch:
    """One launch, given its label and pairs: of each tensor the addresses of source and target.

    Packed: every member has ``units`` head units and ``tokens`` tokens; those of position ``i`` begin at
    ``i * units`` and ``i * token_stride`` (0: all members have the same tokens). Otherwise the table says so.
    ``chunk_bytes``, a multiple of 16, and ``num_programs`` are equal in all members. A row of all tensors must fit
    into a data slot. ``direct``: targets are in the rank's segment, and peers put rows there; all addresses and
    strides of all members are multiples of 16 then.
    """
    return plan_launch(
        ulysses_exchange,
        members,
        num_programs,
        ROWS,
        alignment=combined(number for tensor in strides for number in tensor),
        widths=(16,) if direct else FEW_WIDTHS,
        tuples=((2,) * len(strides), (len(Strides._fields),) * len(strides)),
        after=(tuple(map(tuple, strides)), batch, units, tokens, token_stride, chunk_bytes),
        GATHER=gather,
        DIRECT=direct,
    )


@launched
def ulysses_exchange(
    members, addresses, strides, batch, units, tokens, token_stride, chunk_bytes,
    GROUP: tl.constexpr, PACKED: tl.constexpr, GATHER: tl.constexpr, DIRECT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """See ``plan``. ``GROUP``: ``Members.vector_size``."""
    if DIRECT:
        direct_rounds(
            open_edges(members, PACKED, PTX, GROUP, ROWS=True),
            HeadParts(addresses, strides, batch, units, tokens, token_stride, GATHER, WIDTH, BLOCK),
            announce_targets, place_rows, keep_rows,
        )  # fmt: skip
    else:
        slot_rounds(
            open_edges(members, PACKED, PTX, GROUP, ROWS=True),
            HeadParts(addresses, strides, batch, units, tokens, token_stride, GATHER, WIDTH, BLOCK),
            chunk_bytes, row_units, put_rows, take_rows, keep_rows,
        )  # fmt: skip


class HeadParts(NamedTuple):
    """As ``plan`` says it."""

    addresses: tl.tuple
    strides: tl.tuple
    batch: tl.tensor
    units: tl.tensor
    tokens: tl.tensor
    token_stride: tl.tensor
    gather: tl.constexpr
    width: tl.constexpr
    block: tl.constexpr


@triton.jit
def _units_at(group, parts, position):
    """Where the head units of a member begin, and how many it has; of a scalar or block of positions."""
    if group.packed:
        begin, units = position * parts.units, parts.units + position * 0
    else:
        begin, units = row(group.table, position, ROW_UNIT_OFFSET), row(group.table, position, ROW_UNITS)
    return begin.to(tl.int64), units.to(tl.int64)


@triton.jit
def _tokens_at(group, parts, position):
    """The same of its tokens."""
    if group.packed:
        begin, tokens = position * parts.token_stride, parts.tokens + position * 0
    else:
        begin, tokens = row(group.table, position, ROW_TOKEN_OFFSET), row(group.table, position, ROW_TOKENS)
    return begin.to(tl.int64), tokens.to(tl.int64)


@triton.jit
def row_units(group, parts, positions, FORTH: tl.constexpr):
    """A rank sends its own tokens with the heads of the other; gathering, the tokens of the other with its own."""
    if FORTH == parts.gather:
        with_tokens, with_units = positions, group.index + positions * 0
    else:
        with_tokens, with_units = group.index + positions * 0, positions
    row_bytes = tl.zeros((), tl.int64)
    for number in tl.static_range(len(parts.strides)):
        row_bytes += parts.strides[number][4]
    num_rows = parts.batch * _tokens_at(group, parts, with_tokens)[1]
    # Never zero bytes: a slot holds a number of rows of this size.
    return num_rows, tl.maximum(_units_at(group, parts, with_units)[1] * row_bytes, 1)


@triton.jit
def put_rows(group, parts, position, place, first, last):
    row_bytes = row_units(group, parts, position, True)[1]
    if parts.gather:
        token_begin, row_tokens = _tokens_at(group, parts, position)
        unit_begin, num_units = 0, _units_at(group, parts, group.index)[1]
    else:
        token_begin, row_tokens = 0, _tokens_at(group, parts, group.index)[1]
        unit_begin, num_units = _units_at(group, parts, position)
    for number in tl.static_range(len(parts.strides)):
        source_batch, source_token, _, _, unit_bytes = parts.strides[number]
        source = parts.addresses[number][0] + token_begin * source_token + unit_begin * unit_bytes
        _copy_rows(
            place, 0, row_bytes, source, source_batch, source_token,
            row_tokens, first, last, num_units * unit_bytes, True, False, parts.width, parts.block,
        )  # fmt: skip
        place += num_units * unit_bytes


@triton.jit
def take_rows(group, parts, position, place, first, last):
    row_bytes = row_units(group, parts, position, False)[1]
    if parts.gather:
        token_begin, row_tokens = 0, _tokens_at(group, parts, group.index)[1]
        unit_begin, num_units = _units_at(group, parts, position)
    else:
        token_begin, row_tokens = _tokens_at(group, parts, position)
        unit_begin, num_units = 0, _units_at(group, parts, group.index)[1]
    for number in tl.static_range(len(parts.strides)):
        _, _, target_batch, target_token, unit_bytes = parts.strides[number]
        target = parts.addresses[number][1] + token_begin * target_token + unit_begin * unit_bytes
        _copy_rows(
            target, target_batch, target_token, place, 0, row_bytes,
            row_tokens, first, last, num_units * unit_bytes, False, True, parts.width, parts.block,
        )  # fmt: skip
        place += num_units * unit_bytes


@triton.jit
def announce_targets(edges, parts):
    """Where each target begins in this segment, and its strides."""
    own = segment(edges.group.lane, edges.rank)
    lines = line(edges.group.lane, edges.peers, edges.rank)
    for number in tl.static_range(len(parts.strides)):
        words = place_words(lines, edges.published % 2, number)
        _, _, target_batch, target_token, _ = parts.strides[number]
        tl.store(words, edges.peers * 0 + (parts.addresses[number][1] - own), mask=edges.others)
        tl.store(words + 1, edges.peers * 0 + target_batch, mask=edges.others)
        tl.store(words + 2, edges.peers * 0 + target_token, mask=edges.others)


@triton.jit
def place_rows(edges, parts, position):
    group = edges.group
    peer = rank_at(group, position)
    slot = tl.load(word_pointer(edge_state(group.lane, peer)) + EDGE_OBSERVED) % 2
    words = line(group.lane, edges.rank, peer)
    for number in tl.static_range(len(parts.strides)):
        place = place_words(words, slot, number)
        target = segment(group.lane, peer) + tl.load(place, volatile=True)
        target_batch, target_token = tl.load(place + 1, volatile=True), tl.load(place + 2, volatile=True)
        _move_rows(group, parts, position, number, target, target_batch, target_token)


@triton.jit
def keep_rows(group, parts):
    for number in tl.static_range(len(parts.strides)):
        _, _, target_batch, target_token, _ = parts.strides[number]
        _move_rows(group, parts, group.index, number, parts.addresses[number][1], target_batch, target_token)


@triton.jit
def _move_rows(group, parts, position, number: tl.constexpr, target, target_batch, target_token):
    """This program's share of what goes to a member, to where its ``target`` of those strides wants it."""
    source_batch, source_token, _, _, unit_bytes = parts.strides[number]
    source = parts.addresses[number][0]
    if parts.gather:
        token_begin, row_tokens = _tokens_at(group, parts, position)
        unit_begin, num_units = _units_at(group, parts, group.index)
        source += token_begin * source_token
        target += unit_begin * unit_bytes
    else:
        unit_begin, num_units = _units_at(group, parts, position)
        token_begin, row_tokens = _tokens_at(group, parts, group.index)
        source += unit_begin * unit_bytes
        target += token_begin * target_token
    num_rows = parts.batch * row_tokens
    share = (num_rows + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = tl.program_id(0) * share
    _copy_rows(
        target, target_batch, target_token, source, source_batch, source_token,
        row_tokens, first, tl.minimum(first + share, num_rows), num_units * unit_bytes,
        False, False, parts.width, parts.block,
    )  # fmt: skip


@triton.jit
def _copy_rows(
    target, target_batch, target_token, source, source_batch, source_token, row_tokens, first, last, row_bytes,
    PACK: tl.constexpr, UNPACK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows [first, last). Row ``i`` is token ``i % row_tokens`` of batch element ``i // row_tokens``.

    Where the rows are packed (the target with ``PACK``, the source with ``UNPACK``) the first one is at the
    address itself, and each of the others the token stride behind the one before. ``row_bytes`` and all addresses
    are multiples of ``WIDTH``; consecutive threads copy consecutive pieces of that size.
    """
    DTYPE: tl.constexpr = tl.int64 if WIDTH == 16 else (tl.int32 if WIDTH == 4 else tl.int8)
    LANES: tl.constexpr = 2 if WIDTH == 16 else 1
    # As many accesses a turn whatever the width: each costs a thread the registers of two addresses.
    TURN: tl.constexpr = BLOCK // 16
    # Rows and pieces of a chunk fit into 32 bits, which divide much faster than 64.
    pieces = tl.maximum(row_bytes // WIDTH, 1).to(tl.int32)
    num_pieces = (tl.maximum(last - first, 0) * (row_bytes // WIDTH)).to(tl.int32)
    first_row, row_tokens = first.to(tl.int32), row_tokens.to(tl.int32)
    lanes = tl.arange(0, LANES)[None, :]
    for begin in range(0, num_pieces, TURN):
        piece = begin + tl.arange(0, TURN)
        ordinal = piece // pieces
        column = piece % pieces * WIDTH
        index = first_row + ordinal
        batches, token = index // row_tokens, index % row_tokens
        if UNPACK:
            source_row = source + ordinal * source_token + column
        else:
            source_row = source + batches * source_batch + token * source_token + column
        if PACK:
            target_row = target + ordinal * target_token + column
        else:
            target_row = target + batches * target_batch + token * target_token + column
        mask = (piece < num_pieces)[:, None]
        source_elements = source_row.to(tl.pointer_type(DTYPE))[:, None] + lanes
        target_elements = target_row.to(tl.pointer_type(DTYPE))[:, None] + lanes
        if LANES > 1:
            # What the caller promised: a piece is aligned, so a thread moves it in one instruction.
            source_elements = tl.max_contiguous(tl.multiple_of(source_elements, (16, 16)), (1, LANES))
            target_elements = tl.max_contiguous(tl.multiple_of(target_elements, (16, 16)), (1, LANES))
        tl.store(target_elements, tl.load(source_elements, mask=mask), mask=mask)
