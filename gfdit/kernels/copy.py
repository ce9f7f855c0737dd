"""Copies of any number of bytes between any two addresses, as wide as their alignment allows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_bytes(target, source, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy ``num_bytes`` from address ``source`` to address ``target`` (int64), ``BLOCK`` bytes a turn.

    Both addresses must be multiples of ``WIDTH`` (16, 4 or 1); ``num_bytes`` may be anything, also negative: then
    nothing happens.
    """
    whole = tl.maximum(num_bytes, 0) // WIDTH * WIDTH
    if WIDTH == 16:
        _copy_pairs(target, source, whole, BLOCK)
    # As many accesses a turn as above: each costs a thread the registers of two addresses.
    elif WIDTH == 4:
        _copy_elements(target, source, whole // 4, tl.int32, BLOCK // 16)
    else:
        _copy_elements(target, source, whole, tl.int8, BLOCK // 16)
    if WIDTH > 1:
        if num_bytes > whole:
            _copy_elements(target + whole, source + whole, num_bytes - whole, tl.int8, WIDTH)


@triton.jit
def copy_share(target, source, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """This program's share of a copy within the rank; nothing if the bytes are in their place already."""
    pieces = tl.num_programs(0) * WIDTH
    share = (num_bytes + pieces - 1) // pieces * WIDTH
    begin = tl.program_id(0) * share
    if target != source:
        copy_bytes(target + begin, source + begin, tl.minimum(share, num_bytes - begin), WIDTH, BLOCK)


@triton.jit
def round_share(num_bytes, area_bytes, num_programs):
    """How many of ``num_bytes`` one program moves in a round through an area that all programs share, at most.

    A multiple of 16, and at least that: an area must have 16 bytes for each program. Both ends of an edge get the
    same.
    """
    even = (num_bytes + num_programs * 16 - 1) // (num_programs * 16) * 16
    return tl.maximum(tl.minimum(even, area_bytes // (num_programs * 16) * 16), 16)


@triton.jit
def _copy_pairs(target, source, num_bytes, BLOCK: tl.constexpr):
    # The hint says what the caller promised; with it a thread moves two words in one instruction.
    source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    target_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    num_words = num_bytes // 16 * 2
    for first in range(0, num_words, BLOCK // 8):
        index = first + tl.arange(0, BLOCK // 8)
        mask = index < num_words
        tl.store(target_words + index, tl.load(source_words + index, mask=mask), mask=mask)


@triton.jit
def _copy_elements(target, source, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    source_elements = source.to(tl.pointer_type(DTYPE))
    target_elements = target.to(tl.pointer_type(DTYPE))
    for first in range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < count
        tl.store(target_elements + index, tl.load(source_elements + index, mask=mask), mask=mask)
