"""Ulysses' all-to-all between heads and tokens, folded with its permutes: strided in, strided out.

Scatter: from (B, L, H, D), all heads of the own tokens, to (B, S, h, D), the own heads of all tokens. Gather:
back. Both are exchanges of rows, one per token: what goes to or comes from a peer is a run of ``units`` head
units of each row. Several tensors travel in one launch (query, key, value), their rows side by side; a tensor
with fewer heads (grouped attention) has smaller units. Heads and tokens may be uneven.

Rows are pushed straight from the source's strides into the peer's data slot and copied straight from there to the
target's strides: no permute, no contiguous copy, no stacking. Agreement, rounds and overlap are those of
``gfdit.kernels.push_exchange``; a chunk is a range of rows.

Reference: ``gfdit.comm.heads.exchange_by_copies``. Never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from gfdit.kernels.edges import (
    EDGE_GENERATION,
    EDGE_OBSERVED,
    EDGE_PUBLISHED,
    LANE_RANK,
    LANE_SLOT_BYTES,
    await_credit,
    await_words,
    data_slot,
    edge_state,
    finish,
    line,
    make_token,
    signal,
    usable,
)
from gfdit.kernels.launch import block_bytes, common_width, launch
from gfdit.kernels.members import MEMBERS, ROW_DIGEST, Members, ranks_at, row
from gfdit.kernels.memory import store_release, word_pointer

# Fields of a table's row, in place of byte ranges.
ROW_UNIT_OFFSET = tl.constexpr(1)
ROW_UNITS = tl.constexpr(2)
ROW_TOKEN_OFFSET = tl.constexpr(3)
ROW_TOKENS = tl.constexpr(4)


class StridedRows(NamedTuple):
    """One tensor of the exchange: addresses, strides of batch and token in bytes, bytes of a head unit."""

    source: int
    source_batch: int
    source_token: int
    target: int
    target_batch: int
    target_token: int
    unit_bytes: int


def run(
    members: Members,
    tensors: Sequence[StridedRows],
    *,
    batch: int,
    units: int,
    tokens: int,
    token_stride: int,
    gather: bool,
    num_chunks: int,
    num_programs: int,
) -> None:
    """One launch.

    Packed: every member has ``units`` head units and ``tokens`` tokens; those of position ``i`` begin at
    ``i * units`` and ``i * token_stride`` (0: all members have the same tokens). Otherwise the table says so.
    ``num_chunks`` (at most ``MAX_CHUNKS``) and ``num_programs`` are equal in all members. A row of all tensors
    must fit into a data slot.
    """
    rows = tuple(tuple(tensor) for tensor in tensors)
    launch(
        ulysses_exchange,
        num_programs,
        (*members.arguments(), rows, batch, units, tokens, token_stride, num_chunks),
        GROUP=members.vector_size,
        PACKED=members.packed,
        GATHER=gather,
        WIDTH=common_width(*(number for tensor in rows for number in tensor)),
        BLOCK=block_bytes(members.ptx),
        NUM_PROGRAMS=num_programs,
        PTX=members.ptx,
    )


@triton.jit(do_not_specialize=(*MEMBERS, "tensors", "batch", "units", "tokens", "token_stride", "num_chunks"))
def ulysses_exchange(
    lane,
    ranks_low,
    ranks_high,
    table,
    size,
    index,
    digest,
    operation,
    tensors,
    batch,
    units,
    tokens,
    token_stride,
    num_chunks,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    GATHER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    PTX: tl.constexpr,
):
    """See ``run``."""
    program = tl.program_id(0)
    rank = tl.load(lane + LANE_RANK)
    slot_bytes = tl.load(lane + LANE_SLOT_BYTES)
    row_unit_bytes = tl.zeros((), tl.int64)
    for tensor in tl.static_range(len(tensors)):
        row_unit_bytes += tensors[tensor][6]
    positions = tl.arange(0, GROUP)
    inside = positions < size
    valid = tl.where(inside, positions, index)
    peers = ranks_at(ranks_low, ranks_high, table, valid, PACKED)
    others = inside & (positions != index)
    if PACKED:
        digests = tl.zeros((GROUP,), tl.int64) + digest
    else:
        digests = row(table, valid, ROW_DIGEST)
    send_rows, send_bytes = _rows(table, valid, index, batch, units, tokens, row_unit_bytes, GATHER, PACKED)
    recv_rows, recv_bytes = _rows(table, index, valid, batch, units, tokens, row_unit_bytes, GATHER, PACKED)
    rounds = tl.maximum(
        _ceil_div(send_rows, slot_bytes // send_bytes), _ceil_div(recv_rows, slot_bytes // recv_bytes)
    )
    rounds = tl.where(others, tl.maximum(rounds, 1), 0)
    turns = _ceil_div(num_chunks, NUM_PROGRAMS)
    counters = word_pointer(edge_state(lane, peers))
    observed = tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True)
    published = tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True)
    generations = tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True)
    lines = line(lane, rank, peers)
    if usable(lane, peers, others):
        _keep_own(
            tensors,
            table,
            index,
            batch,
            units,
            tokens,
            token_stride,
            program,
            GATHER,
            PACKED,
            WIDTH,
            BLOCK,
            NUM_PROGRAMS,
        )
        going = await_credit(lane, rank, peers, others, published, operation, PTX).to(tl.int32)
        for turn in range(0, tl.max(rounds) * (turns + 1)):
            step = turn // (turns + 1)
            part = turn % (turns + 1)
            chunk = part * NUM_PROGRAMS + program
            if (chunk < num_chunks) & (going == 1):
                for distance in range(1, size):
                    position = (index + distance) % size
                    chosen = positions == position
                    if step < tl.sum(tl.where(chosen, rounds, 0)):
                        peer = ranks_at(ranks_low, ranks_high, table, position, PACKED)
                        instance = tl.sum(tl.where(chosen, published, 0)) + step
                        num_rows, row_bytes = _rows(
                            table, position, index, batch, units, tokens, row_unit_bytes, GATHER, PACKED
                        )
                        first, last, before = _chunk(num_rows, slot_bytes // row_bytes, step, chunk, num_chunks)
                        slot = data_slot(lane, peer, rank, instance % 2) - before * row_bytes
                        for tensor in tl.static_range(len(tensors)):
                            source, source_batch, source_token, _, _, _, unit_bytes = tensors[tensor]
                            if GATHER:
                                row_tokens, num_units = _share(table, position, index, units, tokens, PACKED)
                                source += _token_begin(table, position, token_stride, PACKED) * source_token
                            else:
                                row_tokens, num_units = _share(table, index, position, units, tokens, PACKED)
                                source += _unit_begin(table, position, units, PACKED) * unit_bytes
                            _copy_rows(
                                slot, 0, row_bytes, source, source_batch, source_token,
                                row_tokens, first, last, num_units * unit_bytes, True, False, WIDTH, BLOCK,
                            )  # fmt: skip
                            slot += num_units * unit_bytes
                        tl.debug_barrier()
                        digest_here = tl.sum(tl.where(chosen, digests, 0))
                        token = make_token(digest_here, tl.sum(tl.where(chosen, generations, 0)), instance + 1)
                        store_release(signal(line(lane, peer, rank), instance % 2, chunk), token, PTX)
            chunk -= NUM_PROGRAMS
            if (part > 0) & (chunk < num_chunks) & (going == 1):
                wanted = others & (step < rounds)
                instances = observed + step
                expected = make_token(digests, generations, instances + 1)
                words = signal(lines, instances % 2, chunk)
                arrived = await_words(lane, words, expected, wanted, rank, peers, others, operation, PTX)
                going = arrived.to(tl.int32)
                if going == 1:
                    for distance in range(1, size):
                        position = (index + size - distance) % size
                        chosen = positions == position
                        if step < tl.sum(tl.where(chosen, rounds, 0)):
                            peer = ranks_at(ranks_low, ranks_high, table, position, PACKED)
                            instance = tl.sum(tl.where(chosen, observed, 0)) + step
                            num_rows, row_bytes = _rows(
                                table, index, position, batch, units, tokens, row_unit_bytes, GATHER, PACKED
                            )
                            first, last, before = _chunk(
                                num_rows, slot_bytes // row_bytes, step, chunk, num_chunks
                            )
                            slot = data_slot(lane, rank, peer, instance % 2) - before * row_bytes
                            for tensor in tl.static_range(len(tensors)):
                                _, _, _, target, target_batch, target_token, unit_bytes = tensors[tensor]
                                if GATHER:
                                    row_tokens, num_units = _share(table, index, position, units, tokens, PACKED)
                                    target += _unit_begin(table, position, units, PACKED) * unit_bytes
                                else:
                                    row_tokens, num_units = _share(table, position, index, units, tokens, PACKED)
                                    target += _token_begin(table, position, token_stride, PACKED) * target_token
                                _copy_rows(
                                    target, target_batch, target_token, slot, 0, row_bytes,
                                    row_tokens, first, last, num_units * unit_bytes, False, True, WIDTH, BLOCK,
                                )  # fmt: skip
                                slot += num_units * unit_bytes
                    tl.debug_barrier()
        # A two-way instance proves that the peer has consumed all of mine before it.
        finish(lane, peers, others, rounds, rounds, published + rounds - 1, NUM_PROGRAMS)


@triton.jit
def _ceil_div(number, divisor):
    return (number + divisor - 1) // divisor


@triton.jit
def _share(table, token_position, unit_position, units, tokens, PACKED: tl.constexpr):
    """How many tokens and head units the members at these positions have."""
    if PACKED:
        num_tokens, num_units = tokens + token_position * 0, units + unit_position * 0
    else:
        num_tokens, num_units = row(table, token_position, ROW_TOKENS), row(table, unit_position, ROW_UNITS)
    return num_tokens.to(tl.int64), num_units.to(tl.int64)


@triton.jit
def _token_begin(table, position, token_stride, PACKED: tl.constexpr):
    if PACKED:
        begin = position * token_stride
    else:
        begin = row(table, position, ROW_TOKEN_OFFSET)
    return begin.to(tl.int64)


@triton.jit
def _unit_begin(table, position, units, PACKED: tl.constexpr):
    if PACKED:
        begin = position * units
    else:
        begin = row(table, position, ROW_UNIT_OFFSET)
    return begin.to(tl.int64)


@triton.jit
def _rows(table, to, sender, batch, units, tokens, row_unit_bytes, GATHER: tl.constexpr, PACKED: tl.constexpr):
    """Rows on the edge from position ``sender`` to position ``to``, and bytes of each.

    Scattering, a rank sends its own tokens with the heads of the other; gathering, the tokens of the other with
    its own heads.
    """
    if GATHER:
        num_tokens, num_units = _share(table, to, sender, units, tokens, PACKED)
    else:
        num_tokens, num_units = _share(table, sender, to, units, tokens, PACKED)
    # Never zero bytes: a slot holds a number of rows of this size.
    return batch * num_tokens, tl.maximum(num_units * row_unit_bytes, 1)


@triton.jit
def _chunk(num_rows, round_rows, step, chunk, num_chunks):
    """Rows [first, last) of a chunk, and the rows in the rounds before it."""
    share = _ceil_div(tl.minimum(round_rows, num_rows), num_chunks)
    before = step * round_rows
    first = before + chunk * share
    last = tl.minimum(tl.minimum(first + share, before + round_rows), num_rows)
    return first, last, before


@triton.jit
def _keep_own(
    tensors, table, index, batch, units, tokens, token_stride, program,
    GATHER: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """This program's share of the rows that stay on the rank, from strides to strides."""
    row_tokens, num_units = _share(table, index, index, units, tokens, PACKED)
    num_rows = batch * row_tokens
    share = _ceil_div(num_rows, NUM_PROGRAMS)
    first = program * share
    last = tl.minimum(first + share, num_rows)
    for tensor in tl.static_range(len(tensors)):
        source, source_batch, source_token, target, target_batch, target_token, unit_bytes = tensors[tensor]
        unit_offset = _unit_begin(table, index, units, PACKED) * unit_bytes
        token_begin = _token_begin(table, index, token_stride, PACKED)
        if GATHER:
            source += token_begin * source_token
            target += unit_offset
        else:
            source += unit_offset
            target += token_begin * target_token
        _copy_rows(
            target, target_batch, target_token, source, source_batch, source_token,
            row_tokens, first, last, num_units * unit_bytes, False, False, WIDTH, BLOCK,
        )  # fmt: skip


@triton.jit
def _copy_rows(
    target, target_batch, target_token, source, source_batch, source_token, row_tokens, first, last, row_bytes,
    PACK: tl.constexpr, UNPACK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows [first, last). Row ``i`` is token ``i % row_tokens`` of batch element ``i // row_tokens``.

    Where the rows are packed (the target with ``PACK``, the source with ``UNPACK``) row ``i`` is at ``i`` times
    the token stride. ``row_bytes`` and all addresses are multiples of ``WIDTH``; consecutive threads copy
    consecutive pieces of that size.
    """
    DTYPE: tl.constexpr = tl.int64 if WIDTH == 16 else (tl.int32 if WIDTH == 4 else tl.int8)
    LANES: tl.constexpr = 2 if WIDTH == 16 else 1
    # Of bytes as many as of words: each costs a thread the registers of two addresses.
    TURN: tl.constexpr = BLOCK // WIDTH if WIDTH > 1 else BLOCK // 4
    # Rows and pieces of a chunk fit into 32 bits, which divide much faster than 64.
    pieces = tl.maximum(row_bytes // WIDTH, 1).to(tl.int32)
    num_pieces = (tl.maximum(last - first, 0) * (row_bytes // WIDTH)).to(tl.int32)
    first_row, row_tokens = first.to(tl.int32), row_tokens.to(tl.int32)
    lanes = tl.arange(0, LANES)[None, :]
    for begin in range(0, num_pieces, TURN):
        piece = begin + tl.arange(0, TURN)
        index = first_row + piece // pieces
        column = piece % pieces * WIDTH
        batches, token = index // row_tokens, index % row_tokens
        if UNPACK:
            source_row = source + index * source_token + column
        else:
            source_row = source + batches * source_batch + token * source_token + column
        if PACK:
            target_row = target + index * target_token + column
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
