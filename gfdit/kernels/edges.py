"""Agreement on the device: the protocol of ``gfdit.comm.agreement``, with the counters in device memory.

A launch gets ``lane``, a block of words in device memory that never changes after start (``LANE_*``): where
this rank's counters are, where things are in a segment, and the base address of every rank's segment. It also
gets the group by value (``gfdit.kernels.members``) and the digest of the call, a 24-bit host integer. Tokens
are made here, from digest, generation and the edge's counter, so a captured graph replays with new tokens.

Programs of one launch are independent channels: program ``c`` of one rank only waits for program ``c`` of its
peers. They all read the counters when they start; the last one to finish advances them (``finish``).

Counters of an edge (``EDGE_*``) and the words in front of them (``STATE_*``) belong to one lane of one rank;
nobody else touches them, except that the host resets an edge while no kernel runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfdit.comm.layout import (
    ABORT_WORD,
    ARMED_WORD,
    CREDIT_WORD,
    LINE_BYTES,
    MAX_CHUNKS,
    OFFSET_WORD,
    SIGNAL_WORD,
)
from gfdit.kernels.memory import (
    load_acquire_block,
    now_ns,
    store_release,
    store_release_block,
    word_pointer,
)

# Words of ``lane``.
LANE_RANK = tl.constexpr(0)
LANE_STATE = tl.constexpr(1)  # address of this rank's counters
LANE_STATUS = tl.constexpr(2)  # address of the status cell, which the host can read at any time
LANE_CLOCK = tl.constexpr(3)  # address of the host's clock word (plain Triton only)
LANE_TIMEOUT_NS = tl.constexpr(4)
LANE_LINES = tl.constexpr(5)  # offsets in every segment, see gfdit.comm.layout
LANE_SLOTS = tl.constexpr(6)
LANE_SLOT_BYTES = tl.constexpr(7)
LANE_LOW_LATENCY = tl.constexpr(8)
LANE_LOW_LATENCY_SLOT_BYTES = tl.constexpr(9)
LANE_EXPORT = tl.constexpr(10)
LANE_MULTICAST = tl.constexpr(11)
LANE_MULTICAST_BYTES = tl.constexpr(12)
LANE_MULTICAST_BASE = tl.constexpr(13)  # 0 where the hardware has no multicast
LANE_BASES = tl.constexpr(16)  # base address of each rank's segment, as this rank sees it
LANE_WORDS = 16

# Words of the state: some for the lane, then EDGE_WORDS for each peer rank.
STATE_TICKET = tl.constexpr(0)
STATE_FAILED = tl.constexpr(1)
STATE_WORDS = 8
EDGE_PUBLISHED = tl.constexpr(0)
EDGE_OBSERVED = tl.constexpr(1)
EDGE_CONSUMED = tl.constexpr(2)  # how many of the published ones the peer is known to have consumed
EDGE_GENERATION = tl.constexpr(3)
EDGE_BROKEN = tl.constexpr(4)
EDGE_WORDS = 8

# The status cell: what failed first. The host clears it.
STATUS_KIND = tl.constexpr(0)
STATUS_PEER = tl.constexpr(1)
STATUS_EXPECTED = tl.constexpr(2)
STATUS_OBSERVED = tl.constexpr(3)
STATUS_OPERATION = tl.constexpr(4)
STATUS_WORDS = 8
TIMED_OUT = tl.constexpr(1)
MISMATCHED = tl.constexpr(2)
ABORTED = tl.constexpr(3)

_LINE_BYTES = tl.constexpr(LINE_BYTES)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
_SIGNAL_WORD = tl.constexpr(SIGNAL_WORD)
_OFFSET_WORD = tl.constexpr(OFFSET_WORD)
_CREDIT_WORD = tl.constexpr(CREDIT_WORD)
_ABORT_WORD = tl.constexpr(ABORT_WORD)
_ARMED_WORD = tl.constexpr(ARMED_WORD)
_STATE_WORDS = tl.constexpr(STATE_WORDS)
_EDGE_WORDS = tl.constexpr(EDGE_WORDS)
# How often a waiting program looks at abort words and clock, in polls.
LOOK_AROUND = tl.constexpr(64)
_CREDIT_DIGEST = tl.constexpr(1)


@triton.jit
def segment(lane, rank):
    """Base address of ``rank``'s segment."""
    return tl.load(lane + LANE_BASES + rank)


@triton.jit
def line(lane, owner, peer):
    """Address of the line in ``owner``'s segment that ``peer`` writes."""
    index = peer - (peer > owner).to(tl.int64)
    return segment(lane, owner) + tl.load(lane + LANE_LINES) + index * _LINE_BYTES


@triton.jit
def data_slot(lane, owner, peer, slot):
    """Address of data slot ``slot`` in ``owner``'s segment that ``peer`` writes."""
    index = (peer - (peer > owner).to(tl.int64)) * 2 + slot
    return segment(lane, owner) + tl.load(lane + LANE_SLOTS) + index * tl.load(lane + LANE_SLOT_BYTES)


@triton.jit
def low_latency_slot(lane, owner, peer, slot):
    """Address of low-latency slot ``slot`` in ``owner``'s segment that ``peer`` writes."""
    index = (peer - (peer > owner).to(tl.int64)) * 2 + slot
    size = tl.load(lane + LANE_LOW_LATENCY_SLOT_BYTES)
    return segment(lane, owner) + tl.load(lane + LANE_LOW_LATENCY) + index * size


@triton.jit
def signal(line_address, slot, chunk):
    """Address of the token of one chunk of an instance."""
    return line_address + (_SIGNAL_WORD + slot * _MAX_CHUNKS + chunk) * 8


@triton.jit
def edge_state(lane, peer):
    """Address of the counters of the edges shared with ``peer``."""
    return tl.load(lane + LANE_STATE) + (_STATE_WORDS + peer * _EDGE_WORDS) * 8


@triton.jit
def read_edge(state, FIELD: tl.constexpr):
    """A counter, at an address from ``edge_state`` (scalar or block)."""
    return tl.load(word_pointer(state) + FIELD, volatile=True)


@triton.jit
def make_token(digest, generation, instance):
    """See ``gfdit.comm.agreement.make_token``; digest and generation are within their widths."""
    return (digest.to(tl.int64) << 40) | (generation << 24) | (instance & 0xFFFFFF)


@triton.jit
def is_behind(observed, expected):
    """See ``gfdit.comm.agreement.is_behind``; scalars or blocks."""
    generations = ((expected >> 24) - (observed >> 24)) & 0xFFFF
    instances = (expected - observed) & 0xFFFFFF
    older_instance = (generations == 0) & (instances > 0) & (instances <= 0x7FFFFF)
    older = ((generations > 0) & (generations <= 0x7FFF)) | older_instance
    return (observed == 0) | older


@triton.jit
def has_failed(lane):
    """Whether a program of this launch has failed."""
    return tl.load(word_pointer(tl.load(lane + LANE_STATE)) + STATE_FAILED, volatile=True) != 0


@triton.jit
def fail(lane, kind, peer, expected, observed, operation, PTX: tl.constexpr):
    """Report a failure; of several programs the first is heard. The launch then ends without more waiting."""
    state = word_pointer(tl.load(lane + LANE_STATE))
    first = tl.atomic_cas(state + STATE_FAILED, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), sem="acq_rel")
    status = tl.load(lane + LANE_STATUS)
    if (first == 0) & (tl.load(word_pointer(status), volatile=True) == 0):
        cell = word_pointer(status)
        tl.store(cell + STATUS_PEER, peer.to(tl.int64))
        tl.store(cell + STATUS_EXPECTED, expected)
        tl.store(cell + STATUS_OBSERVED, observed)
        tl.store(cell + STATUS_OPERATION, operation.to(tl.int64))
        tl.debug_barrier()
        store_release(status, kind.to(tl.int64), PTX)


@triton.jit
def abort_marks(lane, rank, peers, mask):
    """Which edges shared with ``peers`` somebody aborted in their current generation."""
    generations = tl.load(word_pointer(edge_state(lane, peers)) + EDGE_GENERATION, mask=mask, other=0)
    seen = tl.load(word_pointer(line(lane, rank, peers)) + _ABORT_WORD, mask=mask, other=0, volatile=True)
    return mask & (seen == generations * 2 + 1)


@triton.jit
def await_words(
    lane,
    addresses,
    expected,
    wanted,
    rank,
    peers,
    members,
    operation,
    PTX: tl.constexpr,
    EXACT: tl.constexpr = True,
    BEGIN: tl.constexpr = False,
):
    """Wait until each word at ``addresses`` (block) is no longer behind ``expected``; False after a failure.

    ``wanted`` says which elements count, ``peers`` whom each waits for. Ends early if any edge shared with a
    ``peers`` element that is in ``members`` is aborted, if another program has failed, or after the timeout.
    With ``EXACT``, a word that is neither behind nor equal is a mismatch, and nothing else is waited for then.
    With ``BEGIN``, an aborted edge is a failure even if there is nothing to wait for.
    """
    observed = load_acquire_block(addresses, wanted, PTX)
    waiting = wanted & is_behind(observed, expected)
    clock = tl.load(lane + LANE_CLOCK)
    deadline = now_ns(clock, PTX) + tl.load(lane + LANE_TIMEOUT_NS)
    polls = 0
    stop = 0
    if BEGIN:
        stop = tl.where(tl.sum(abort_marks(lane, rank, peers, members).to(tl.int32)) > 0, 3, 0)
    while (tl.sum(waiting.to(tl.int32)) > 0) & (stop == 0):
        fresh = load_acquire_block(addresses, waiting, PTX)
        observed = tl.where(waiting, fresh, observed)
        waiting = wanted & is_behind(observed, expected)
        polls += 1
        if polls % LOOK_AROUND == 0:
            stop = look_around(lane, clock, deadline, rank, peers, members, PTX)
            if EXACT:
                if tl.sum((wanted & (observed != expected) & (waiting == 0)).to(tl.int32)) > 0:
                    stop = 2
    wrong = wanted & (observed != expected) & (is_behind(observed, expected) == 0) & EXACT
    return conclude(lane, stop, waiting, wrong, observed, expected, rank, peers, members, operation, PTX)


@triton.jit
def look_around(lane, clock, deadline, rank, peers, members, PTX: tl.constexpr):
    """Whether a waiting program must stop: an edge is aborted, time is up, or another program failed; 0 if not."""
    stop = 0
    if tl.sum(abort_marks(lane, rank, peers, members).to(tl.int32)) > 0:
        stop = 3
    elif now_ns(clock, PTX) > deadline:
        stop = 1
    elif has_failed(lane):
        stop = 4
    return stop


@triton.jit
def conclude(lane, stop, waiting, wrong, observed, expected, rank, peers, members, operation, PTX: tl.constexpr):
    """Report how a wait ended, of all programs, unless it ended well; returns whether it did.

    ``stop`` is from ``look_around``; ``waiting`` and ``wrong`` say which of ``peers`` were not heard from and
    which sent another token than ``expected``.
    """
    if tl.sum(wrong.to(tl.int32)) > 0:
        stop = 2
    tl.debug_barrier()
    if (stop > 0) & (stop < 4):
        culprit = waiting
        if stop == 2:
            culprit = wrong
        elif stop == 3:
            culprit = abort_marks(lane, rank, peers, members)
        index = tl.arange(0, peers.shape[0])
        chosen = index == tl.min(tl.where(culprit, index, peers.shape[0]))
        peer = tl.sum(tl.where(chosen, peers, 0))
        wished = tl.sum(tl.where(chosen, expected, 0))
        seen = tl.sum(tl.where(chosen, observed, 0))
        fail(lane, tl.full((), 0, tl.int32) + stop, peer, wished, seen, operation, PTX)
    return stop == 0


@triton.jit
def may_begin(lane, rank, peers, mask, operation, PTX: tl.constexpr):
    """Whether no edge shared with ``peers`` (block) is aborted; if one is, the launch has failed."""
    words = line(lane, rank, peers)
    return await_words(lane, words, peers * 0, mask & False, rank, peers, mask, operation, PTX, BEGIN=True)


@triton.jit
def await_credit(lane, rank, peers, mask, published, operation, PTX: tl.constexpr):
    """Before a launch publishes: wait until ``peers`` (block) have consumed all but one of ``published``.

    After a two-way instance that is known without a wait. See ``gfdit.comm.agreement``. False after a failure, or
    if an edge is aborted.
    """
    edges = word_pointer(edge_state(lane, peers))
    consumed = tl.load(edges + EDGE_CONSUMED, mask=mask, other=0, volatile=True)
    generations = tl.load(edges + EDGE_GENERATION, mask=mask, other=0, volatile=True)
    needed = published - 1
    expected = make_token(tl.full(peers.shape, _CREDIT_DIGEST, tl.int64), generations, needed)
    words = line(lane, rank, peers) + _CREDIT_WORD * 8
    short = mask & (needed > consumed)
    return await_words(lane, words, expected, short, rank, peers, mask, operation, PTX, EXACT=False, BEGIN=True)


@triton.jit
def usable(lane, peers, mask):
    """False if an edge needs a reset: then a launch must not touch any of its edges."""
    broken = tl.load(word_pointer(edge_state(lane, peers)) + EDGE_BROKEN, mask=mask, other=0, volatile=True)
    return tl.sum((broken != 0).to(tl.int32)) == 0


@triton.jit
def finish(
    lane,
    peers,
    mask,
    published,
    observed,
    consumed,
    num_programs,
    CREDIT: tl.constexpr = False,
    PTX: tl.constexpr = False,
):
    """Called once by every program, at its end: the last one advances the counters of ``peers`` (block).

    ``published`` and ``observed`` are how many instances the launch used; ``consumed`` is the new count of
    instances known to be consumed by each peer. After a failure the edges are marked as broken instead.
    ``CREDIT``, with ``PTX``: tell the peers what was observed, as the receiver of a one-way instance must.
    """
    state = word_pointer(tl.load(lane + LANE_STATE))
    last = 1
    tl.debug_barrier()
    if num_programs > 1:
        ticket = tl.atomic_add(state + STATE_TICKET, tl.full((), 1, tl.int64), sem="acq_rel")
        last = (ticket == num_programs - 1).to(tl.int32)
    if last == 1:
        edges = word_pointer(edge_state(lane, peers))
        failed = tl.load(state + STATE_FAILED, volatile=True)
        if failed != 0:
            tl.store(edges + EDGE_BROKEN, tl.full(peers.shape, 1, tl.int64), mask=mask)
        else:
            before = tl.load(edges + EDGE_PUBLISHED, mask=mask)
            tl.store(edges + EDGE_PUBLISHED, before + published, mask=mask)
            before = tl.load(edges + EDGE_OBSERVED, mask=mask)
            tl.store(edges + EDGE_OBSERVED, before + observed, mask=mask)
            tl.store(edges + EDGE_CONSUMED, consumed, mask=mask)
            if CREDIT:
                generations = tl.load(edges + EDGE_GENERATION, mask=mask, other=0)
                digests = tl.full(peers.shape, _CREDIT_DIGEST, tl.int64)
                credits = make_token(digests, generations, before + observed)
                words = line(lane, peers, tl.load(lane + LANE_RANK)) + _CREDIT_WORD * 8
                store_release_block(words, credits, mask, PTX)
        tl.debug_barrier()
        tl.store(state + STATE_FAILED, tl.full((), 0, tl.int64))
        tl.store(state + STATE_TICKET, tl.full((), 0, tl.int64))
