"""Messages whose every word says that it has arrived: four bytes of data and a flag, stored and loaded as one.

A receiver that sees the flag of an instance has the data that came with it: no fence, no barrier, no order among
the words (the "LL" protocol of NCCL). The unit is a pair of words, 16 bytes that carry 8. Pairs have slots of
their own, two per edge like the data slots, that never hold anything else: whatever is there is an older pair.
The flag is the edge's instance, 31 bits of it, with the highest bit set so that no flag looks like memory that was
never written. It would be ambiguous for a word that lay untouched for exactly 2**31 instances of its edge.

Each program also stores the token of the instance, and its peer waits for token and flags in one loop. The token
adds no order; it tells whether the peer issued the same operation.

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
    EDGE_CONSUMED,
    EDGE_GENERATION,
    EDGE_OBSERVED,
    LANE_CLOCK,
    LANE_TIMEOUT_NS,
    await_credit,
    await_words,
    conclude,
    edge_state,
    is_behind,
    line,
    look_around,
    low_latency_slot,
    make_token,
    signal,
)
from gfdit.kernels.memory import (
    load_acquire_block,
    load_relaxed_block,
    now_ns,
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
# Polls between two looks at abort words and clock: fewer than of single words, since each loads a tile.
_LOOK_AROUND = tl.constexpr(16)


def tile_pairs(group: int, ptx: bool) -> int:
    """Pairs per peer and turn, for a group padded to ``group`` (a power of two)."""
    return max((GPU_TILE_PAIRS if ptx else HOST_TILE_PAIRS) // group, 1)


def payload_width(*values: int) -> int:
    """The widest of ``PAYLOAD_WIDTHS`` that divides all these addresses, strides and sizes."""
    return next(width for width in PAYLOAD_WIDTHS if not any(value % width for value in values))


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
def load_pairs(addresses, mask, PTX: tl.constexpr):
    """The two words of each pair; 0 where ``mask`` is false."""
    if PTX:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s32 wanted, $3, 0;
            mov.b64 $0, 0;
            mov.b64 $1, 0;
            @wanted ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];
            }""",
            "=&l,=&l,l,r",
            [addresses, mask.to(tl.int32)],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )
    else:
        first = load_relaxed_block(addresses, mask, PTX)
        second = load_relaxed_block(addresses + 8, mask, PTX)
    return first, second


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
def await_free(lane, rank, peers, mask, published, operation, PTX: tl.constexpr):
    """Wait until instance ``published + 1`` may be stored into the slots at ``peers`` (block); 0 after a failure.

    The peer has consumed the instance that was there, and cleared its slots after a reset. It has cleared them if
    anything was heard from it in this generation, and in the first one.
    """
    edges = word_pointer(edge_state(lane, peers))
    generations = tl.load(edges + EDGE_GENERATION, mask=mask, other=0, volatile=True)
    heard = tl.load(edges + EDGE_OBSERVED, mask=mask, other=0, volatile=True)
    heard += tl.load(edges + EDGE_CONSUMED, mask=mask, other=0, volatile=True)
    words = line(lane, rank, peers) + _ARMED_WORD * 8
    unsure = mask & (heard == 0)
    armed = load_acquire_block(words, unsure, PTX)
    unsure = unsure & ((generations != 0) | (armed != 0))
    expected = make_token(tl.full(peers.shape, _CREDIT_DIGEST, tl.int64), generations, 0)
    going = await_credit(lane, rank, peers, mask, published, operation, PTX).to(tl.int32)
    if (tl.sum(unsure.to(tl.int32)) > 0) & (going == 1):
        going = await_words(lane, words, expected, unsure, rank, peers, mask, operation, PTX).to(tl.int32)
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
def announce(lane, rank, peers, mask, digests, generations, count, PTX: tl.constexpr):
    """Store this program's token of instance ``count + 1`` for ``peers``; returns where pairs go, and their flags.

    Arguments and results are blocks of shape (P,).
    """
    tokens = make_token(digests, generations, count + 1)
    signals = signal(line(lane, peers, rank), count % 2, tl.program_id(0))
    store_relaxed_block(signals, tokens, mask, PTX)
    return low_latency_slot(lane, peers, rank, count % 2), _flags(count + 1)


@triton.jit
def await_pairs(
    lane, rank, peers, mask, digests, generations, count, offsets, wanted, operation, PTX: tl.constexpr
):
    """Wait for this program's token of instance ``count + 1`` from ``peers``, and for its pairs where ``wanted``.

    ``offsets`` (N,) are those of the bytes in the message, ``wanted`` has shape (P, N), the rest (P,). Returns the
    eight bytes of each pair and whether they arrived; otherwise the failure was reported. Of a peer that issued
    something else no pairs are expected, and soon nobody is waited for.
    """
    tokens = make_token(digests, generations, count + 1)
    signals = signal(line(lane, rank, peers), count % 2, tl.program_id(0))
    pairs = low_latency_slot(lane, rank, peers, count % 2)[:, None] + offsets[None, :] * 2
    flags = _flags(count + 1)[:, None]
    clock = tl.load(lane + LANE_CLOCK)
    deadline = now_ns(clock, PTX) + tl.load(lane + LANE_TIMEOUT_NS)
    first, second = pairs * 0, pairs * 0
    observed = tokens * 0
    waiting = mask
    polls = 0
    stop = 0
    while (tl.sum(waiting.to(tl.int32)) > 0) & (stop == 0):
        observed = load_relaxed_block(signals, mask, PTX)
        first, second = load_pairs(pairs, wanted, PTX)
        differ = ((first ^ flags) | (second ^ flags)) & ~_LOW
        missing = tl.max((wanted & (differ != 0)).to(tl.int32), axis=1) > 0
        behind = is_behind(observed, tokens)
        waiting = mask & (behind | (missing & (observed == tokens)))
        polls += 1
        if polls % _LOOK_AROUND == 0:
            stop = look_around(lane, clock, deadline, rank, peers, mask, PTX)
            if tl.sum((mask & (observed != tokens) & (behind == 0)).to(tl.int32)) > 0:
                stop = 2
    wrong = mask & (observed != tokens) & (is_behind(observed, tokens) == 0)
    arrived = conclude(lane, stop, waiting, wrong, observed, tokens, rank, peers, mask, operation, PTX)
    return (first & _LOW) | (second << 32), arrived.to(tl.int32)
