"""Messages whose every word says that it has arrived: four bytes of data and a flag, stored and loaded as one.

A receiver that sees the flag of an instance has the data that came with it: no fence, no barrier, no order among
the words (the "LL" protocol of NCCL). The unit is a pair of words, 16 bytes that carry 8. Pairs have slots of
their own, two per edge like the data slots, that never hold anything else: whatever is there is an older pair.
The flag is the edge's instance, 31 bits of it, with the highest bit set so that no flag looks like memory that was
never written. It would be ambiguous for a word that lay untouched for exactly 2**31 instances of its edge.

Each program also stores the token of the instance, and its peer waits for token and flags in one loop. The token
adds no order; it tells whether the peer issued the same operation. How a wait ends is a verdict of all threads of
a program, as in ``gfdit.kernels.edges``.

Nothing else is needed between two launches: in one of them a rank publishes one instance per edge, and the launch
of the next begins when all loads of this one are done, so the proof of the two slots in ``gfdit.comm.agreement``
holds. After a reset a slot may hold flags that come again. The receiver clears its slots, then says so in the
ARMED word of the edge, for which a sender waits before its first instance of a generation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.comm.agreement import CREDIT_DIGEST
from gfdit.comm.layout import ARMED_WORD
from gfdit.kernels.edges import (
    LATE,
    LOOK_AROUND,
    WAITING,
    await_credit,
    await_words,
    conclude,
    deadline_of,
    is_behind,
    line,
    look_around,
    low_latency_slot,
    make_token,
    signal,
    states_of,
    verdict,
)
from gfdit.kernels.memory import (
    load_acquire_block,
    load_relaxed_block,
    spin_pairs,
    store_relaxed_block,
    word_pointer,
)

# Pairs that a program moves in a turn, over all peers. On a GPU: four per thread.
GPU_TILE_PAIRS = 512
HOST_TILE_PAIRS = 1 << 14
# Bytes of memory that are moved at once; a pair takes eight.
PAYLOAD_WIDTHS = (8, 1)

_ARMED_WORD = tl.constexpr(ARMED_WORD)
_CREDIT_DIGEST = tl.constexpr(CREDIT_DIGEST)
_LOW = tl.constexpr((1 << 32) - 1)
_HIGHEST = tl.constexpr(-(1 << 63))


def tile_pairs(group: int, ptx: bool) -> int:
    """Pairs per peer and turn, for a group padded to ``group`` (a power of two)."""
    return max((GPU_TILE_PAIRS if ptx else HOST_TILE_PAIRS) // group, 1)


@triton.jit
def _flags(instances):
    """The flags of instances (from 1), each in the upper half of a word."""
    return (instances << 32) | _HIGHEST


@triton.jit
def store_pairs(addresses, payload, flags, mask, PTX: tl.constexpr):
    """Store eight bytes each (int64) at ``addresses``, multiples of 16."""
    first = flags | (payload & _LOW)
    second = flags | ((payload >> 32) & _LOW)
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s32 wanted, $4, 0;
            @wanted st.relaxed.sys.global.v2.b64 [$1], {$2, $3};
            mov.b64 $0, $2;
            }""",
            "=l,l,l,l,r",
            [addresses, first, second, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(word_pointer(addresses), first, mask=mask, sem="relaxed", scope="sys")
        tl.atomic_xchg(word_pointer(addresses) + 1, second, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def load_payload(addresses, num_left, mask, WIDTH: tl.constexpr):
    """Eight bytes each (int64), or ``num_left`` if that is less. ``WIDTH`` (8 or 1) divides address and size."""
    if WIDTH == 8:
        payload = tl.load(word_pointer(addresses), mask=mask, other=0)
    else:
        payload = addresses * 0
        for byte in tl.static_range(8):
            pointers = (addresses + byte).to(tl.pointer_type(tl.uint8))
            value = tl.load(pointers, mask=mask & (byte < num_left), other=0)
            payload |= value.to(tl.int64) << (8 * byte)
    return payload


@triton.jit
def store_payload(addresses, payload, num_left, mask, WIDTH: tl.constexpr):
    """The counterpart of ``load_payload``."""
    if WIDTH == 8:
        tl.store(word_pointer(addresses), payload, mask=mask)
    else:
        for byte in tl.static_range(8):
            pointers = (addresses + byte).to(tl.pointer_type(tl.uint8))
            tl.store(pointers, (payload >> (8 * byte)).to(tl.uint8), mask=mask & (byte < num_left))


@triton.jit
def await_free(edges):
    """Wait until the next instance may be stored into the slots of all peers; 0 after a failure.

    The peer has consumed the instance that was there, and cleared its slots after a reset. It has cleared them if
    anything was heard from it in this generation, and in the first one.
    """
    words = line(edges.group.lane, edges.rank, edges.peers) + _ARMED_WORD * 8
    unsure = edges.others & (edges.observed + edges.consumed == 0)
    armed = load_acquire_block(words, unsure, edges.group.ptx)
    unsure = unsure & ((edges.generations != 0) | (armed != 0))
    expected = make_token(edges.digests * 0 + _CREDIT_DIGEST, edges.generations, 0)
    going = await_credit(edges)
    if verdict(unsure.to(tl.int32)) != 0:
        if going == 1:
            going = await_words(edges, words, expected, unsure)
    return going


@triton.jit
def num_turns(num_bytes, BLOCK: tl.constexpr):
    """How often the programs take ``BLOCK`` pairs each until ``num_bytes`` are done, at least once."""
    turn_bytes = BLOCK * tl.num_programs(0) * 8
    return tl.maximum((num_bytes + turn_bytes - 1) // turn_bytes, 1)


@triton.jit
def first_pair(turn, BLOCK: tl.constexpr):
    """Where this program's pairs of a turn begin."""
    return (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BLOCK


@triton.jit
def pair_offsets(turn, BLOCK: tl.constexpr):
    """Where in the message this program's pairs of a turn have their bytes (BLOCK,)."""
    return (first_pair(turn, BLOCK) + tl.arange(0, BLOCK)) * 8


@triton.jit
def announce(edges, tile):
    """Store this program's token of the next instance; returns where its pairs go, and their flags.

    ``tile``: the edges again, of as many elements as the results.
    """
    count = edges.published
    signals = signal(line(edges.group.lane, edges.peers, edges.rank), count % 2, tl.program_id(0))
    store_relaxed_block(
        signals, make_token(edges.digests, edges.generations, count + 1), edges.others, edges.group.ptx
    )
    return low_latency_slot(tile.group.lane, tile.peers, tile.rank, tile.published % 2), _flags(tile.published + 1)


@triton.jit
def store_to_all(edges, tile, source, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Announce, and store this program's pairs of one message for all peers."""
    slots, flags = announce(edges, tile)
    for turn in range(0, num_turns(num_bytes, BLOCK)):
        offsets = pair_offsets(turn, BLOCK)
        left = num_bytes - offsets
        payload = load_payload(source + offsets, left, left > 0, WIDTH)[None, :]
        pairs = slots[:, None] + offsets[None, :] * 2
        store_pairs(pairs, payload, flags[:, None], tile.others[:, None] & (left > 0)[None, :], edges.group.ptx)


@triton.jit
def await_pairs(edges, tile, offsets, wanted):
    """Wait for this program's token of the next instance of each edge, and for its pairs where ``wanted``.

    ``offsets`` (N,) are those of the bytes in the message, ``wanted`` has shape (P, N), the blocks of ``tile``
    (P,). Returns the eight bytes of each pair and whether they arrived; otherwise the failure was reported. Of a
    peer that issued something else nothing is waited for.
    """
    tokens = make_token(edges.digests, edges.generations, edges.observed + 1)
    signals = signal(line(edges.group.lane, edges.rank, edges.peers), edges.observed % 2, tl.program_id(0))
    slots = low_latency_slot(tile.group.lane, tile.rank, tile.peers, tile.observed % 2)
    pairs = slots[:, None] + offsets[None, :] * 2
    flags = _flags(tile.observed + 1)[:, None] + offsets[None, :] * 0
    deadline = deadline_of(edges)
    first, second, missing = pairs * 0, pairs * 0, wanted
    observed, states = tokens * 0, tl.zeros(tokens.shape, tl.int32)
    polls = 0
    seen = tl.full((), 0, tl.int32) + WAITING
    while seen == WAITING:
        first, second = spin_pairs(pairs, flags, wanted, edges.group.ptx)
        missing = wanted & ((((first ^ flags) | (second ^ flags)) & ~_LOW) != 0)
        observed = load_relaxed_block(signals, edges.others, edges.group.ptx)
        states = states_of(observed, tokens, edges.others, True)
        polls += 1
        if edges.group.ptx or polls % LOOK_AROUND == 0:
            states = tl.maximum(states, look_around(edges, deadline))
        # In any order: an element for each thread, and not some for several.
        flat = tl.reshape(missing.to(tl.int32), (missing.numel,), can_reorder=True)
        seen = tl.maximum(verdict(states), verdict(flat) * WAITING)
    waiting = edges.others & is_behind(observed, tokens)
    if seen == LATE:
        # Whose pairs are missing, by position.
        late = tl.max(missing.to(tl.int32), axis=1)[:, None]
        here = tl.arange(0, late.shape[0])[:, None] == tl.arange(0, tokens.shape[0])[None, :]
        waiting = waiting | (tl.max(tl.where(here, late, 0), axis=0) != 0)
    arrived = conclude(edges, seen, states, waiting, observed, tokens)
    return (first & _LOW) | (second << 32), arrived
