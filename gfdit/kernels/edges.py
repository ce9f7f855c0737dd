"""Agreement on the device: the protocol of ``gfdit.comm.agreement``, with the counters in device memory.

A launch gets ``lane``, a block of words in device memory that never changes after start (``LANE_*``): where
this rank's counters are, where things are in a segment, and the base address of every rank's segment. It also
gets the group by value (``gfdit.kernels.members``) and the digest of the call, a 24-bit host integer. Tokens
are made here, from digest, generation and the edge's counter, so a captured graph replays with new tokens.

Programs of one launch are independent channels: program ``c`` of one rank only waits for program ``c`` of its
peers. They all read the counters when they start (``open_edges``); the last one to finish advances them
(``finish``).

How a program waits (``await_words``)::

    each thread loads its word -> state -> verdict: one reduction over all threads -> the same branch in all

Threads that load a word one after the other may see different values. A thread that branched on its own would
meet the barriers behind the branch without the others. So there is an element for every thread
(``Members.vector_size``) and nothing is branched on but a verdict; a test checks it in the compiled code.

Counters of an edge (``EDGE_*``) and the words in front of them (``STATE_*``) belong to one lane of one rank;
nobody else touches them, except that the host resets an edge while no kernel runs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gfdit.comm.layout import ABORT_WORD, ARMED_WORD, CREDIT_WORD, LINE_BYTES, MAX_CHUNKS, SIGNAL_WORD
from gfdit.kernels.members import ROW_DIGEST, ranks_at, row
from gfdit.kernels.memory import load_acquire_block, now_ns, spin_acquire_block, store_release_block, word_pointer

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

# How a wait stands, the worst last.
WAITING = tl.constexpr(1)
ENDED = tl.constexpr(2)  # another program of the launch has failed, and reports it
LATE = tl.constexpr(3)
EDGE_ABORTED = tl.constexpr(4)
WRONG = tl.constexpr(5)  # a word is neither behind nor what is expected

_LINE_BYTES = tl.constexpr(LINE_BYTES)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
_SIGNAL_WORD = tl.constexpr(SIGNAL_WORD)
_CREDIT_WORD = tl.constexpr(CREDIT_WORD)
_ABORT_WORD = tl.constexpr(ABORT_WORD)
_ARMED_WORD = tl.constexpr(ARMED_WORD)
_STATE_WORDS = tl.constexpr(STATE_WORDS)
_EDGE_WORDS = tl.constexpr(EDGE_WORDS)
# How often a waiting program looks at abort words and clock, in polls, each of them of many looks on a GPU.
LOOK_AROUND = tl.constexpr(16)
_CREDIT_DIGEST = tl.constexpr(1)


class Group(NamedTuple):
    """``Told``, how the group is told, and whether the code is compiled.

    Here and in other tuples what is ``constexpr`` stays so from function to function, not through an assignment.
    So a kernel makes its tuples where it calls what does the work.
    """

    lane: tl.tensor
    ranks_low: tl.tensor
    ranks_high: tl.tensor
    table: tl.tensor
    size: tl.tensor
    index: tl.tensor
    digest: tl.tensor
    operation: tl.tensor
    packed: tl.constexpr
    ptx: tl.constexpr


class Edges(NamedTuple):
    """The edges of a launch, as blocks by group position, with their counters when it began.

    ``others``: which elements count; the others are this rank's own.
    """

    group: tl.tuple
    rank: tl.tensor
    positions: tl.tensor
    peers: tl.tensor
    others: tl.tensor
    digests: tl.tensor
    generations: tl.tensor
    published: tl.tensor
    observed: tl.tensor
    consumed: tl.tensor


@triton.jit
def rank_at(group, position):
    """Global rank (int64) at ``position``, scalar or block."""
    return ranks_at(group.ranks_low, group.ranks_high, group.table, position, group.packed)


@triton.jit
def open_edges(
   
    members, PACKED: tl.constexpr, PTX: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr = False, FIRST: tl.constexpr = False,
):  # fmt: skip
    """Those to all other members, or only that to the ``FIRST`` one. ``GROUP``: ``Members.vector_size``.

    ``members``: ``Told``. ``ROWS``: a table, if there is one, says the digest of each edge, too.
    """
    return _opened(
        Group(
            members.lane, members.ranks_low.to(tl.int64), members.ranks_high.to(tl.int64), members.table,
            members.size, members.index, members.digest, members.operation, PACKED, PTX,
        ),
        GROUP, ROWS, FIRST,
    )  # fmt: skip


@triton.jit
def _opened(group, GROUP: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr):
    positions = tl.arange(0, GROUP)
    if FIRST:
        others = positions == 0
        positions = positions * 0
    else:
        others = (positions < group.size) & (positions != group.index)
        positions = tl.where(positions < group.size, positions, group.index)
    peers = rank_at(group, positions)
    digests = tl.zeros((GROUP,), tl.int64) + group.digest
    if ROWS and not group.packed:
        digests = row(group.table, positions, ROW_DIGEST)
    counters = word_pointer(edge_state(group.lane, peers))
    return Edges(
        group,
        tl.load(group.lane + LANE_RANK),
        positions,
        peers,
        others,
        digests,
        tl.load(counters + EDGE_GENERATION, mask=others, other=0, volatile=True),
        tl.load(counters + EDGE_PUBLISHED, mask=others, other=0, volatile=True),
        tl.load(counters + EDGE_OBSERVED, mask=others, other=0, volatile=True),
        tl.load(counters + EDGE_CONSUMED, mask=others, other=0, volatile=True),
    )


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
    return _slot(lane, owner, peer, slot, LANE_SLOTS, LANE_SLOT_BYTES)


@triton.jit
def low_latency_slot(lane, owner, peer, slot):
    """Address of low-latency slot ``slot`` in ``owner``'s segment that ``peer`` writes."""
    return _slot(lane, owner, peer, slot, LANE_LOW_LATENCY, LANE_LOW_LATENCY_SLOT_BYTES)


@triton.jit
def _slot(lane, owner, peer, slot, FIRST: tl.constexpr, BYTES: tl.constexpr):
    index = (peer - (peer > owner).to(tl.int64)) * 2 + slot
    return segment(lane, owner) + tl.load(lane + FIRST) + index * tl.load(lane + BYTES)


@triton.jit
def signal(line_address, slot, chunk):
    """Address of the token of one chunk of an instance."""
    return line_address + (_SIGNAL_WORD + slot * _MAX_CHUNKS + chunk) * 8


@triton.jit
def edge_state(lane, peer):
    """Address of the counters of the edges shared with ``peer``."""
    return tl.load(lane + LANE_STATE) + (_STATE_WORDS + peer * _EDGE_WORDS) * 8


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
def verdict(states):
    """The worst of ``states``, the same in every thread: see above. A block of an element for each of them."""
    return tl.max(states, axis=0)


@triton.jit
def is_set(edges, address):
    """Whether the word at ``address`` (scalar), which may change meanwhile, is not zero."""
    words = tl.load(word_pointer(address + edges.peers * 0), volatile=True)
    return verdict((words != 0).to(tl.int32)) != 0


@triton.jit
def fail(edges, kind, peer, expected, observed):
    """Report a failure; of several programs the first is heard. The launch then ends without more waiting."""
    state = word_pointer(tl.load(edges.group.lane + LANE_STATE))
    first = tl.atomic_cas(state + STATE_FAILED, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), sem="acq_rel")
    status = tl.load(edges.group.lane + LANE_STATUS)
    if first == 0:
        if not is_set(edges, status):
            cell = word_pointer(status)
            tl.store(cell + STATUS_PEER, peer.to(tl.int64))
            tl.store(cell + STATUS_EXPECTED, expected)
            tl.store(cell + STATUS_OBSERVED, observed)
            tl.store(cell + STATUS_OPERATION, edges.group.operation.to(tl.int64))
            tl.debug_barrier()
            first_only = tl.arange(0, edges.peers.shape[0]) == 0
            same = edges.peers * 0
            store_release_block(status + same, kind + same, first_only, edges.group.ptx)


@triton.jit
def usable(edges):
    """False if an edge needs a reset: then a launch must not touch any of its edges."""
    counters = word_pointer(edge_state(edges.group.lane, edges.peers))
    broken = tl.load(counters + EDGE_BROKEN, mask=edges.others, other=0, volatile=True)
    return verdict((broken != 0).to(tl.int32)) == 0


@triton.jit
def abort_marks(edges):
    """Which edges somebody aborted in their current generation."""
    words = word_pointer(line(edges.group.lane, edges.rank, edges.peers)) + _ABORT_WORD
    seen = tl.load(words, mask=edges.others, other=0, volatile=True)
    return edges.others & (seen == edges.generations * 2 + 1)


@triton.jit
def deadline_of(edges):
    """When a wait that begins now is over."""
    return now_ns(tl.load(edges.group.lane + LANE_CLOCK), edges.group.ptx) + tl.load(
        edges.group.lane + LANE_TIMEOUT_NS
    )


@triton.jit
def look_around(edges, deadline):
    """What ends a wait whatever comes: an edge is aborted, time is up, another program has failed; else 0."""
    group = edges.group
    failed = tl.load(word_pointer(tl.load(group.lane + LANE_STATE)) + STATE_FAILED, volatile=True)
    late = now_ns(tl.load(group.lane + LANE_CLOCK), edges.group.ptx) > deadline
    states = tl.where(late, LATE, tl.where(failed != 0, ENDED, 0))
    return tl.where(abort_marks(edges), EDGE_ABORTED, states)


@triton.jit
def states_of(observed, expected, wanted, EXACT: tl.constexpr):
    """How it stands with the words that are ``wanted``; without ``EXACT``, one that is ahead will do."""
    behind = is_behind(observed, expected)
    states = tl.where(wanted & behind, WAITING, 0)
    if EXACT:
        states = tl.where(wanted & (observed != expected) & (behind == 0), WRONG, states)
    return states


@triton.jit
def await_words(edges, addresses, expected, wanted, EXACT: tl.constexpr = True, BEGIN: tl.constexpr = False):
    """Wait until each word at ``addresses`` (block by position) is not behind ``expected``; 0 after a failure.

    ``wanted`` says which elements count. Ends early if one of ``edges`` is aborted, if another program has
    failed, or after the timeout. With ``EXACT``, a word that is neither behind nor equal is a mismatch, which ends
    it, too. With ``BEGIN``, an aborted edge is a failure even if there is nothing to wait for.
    """
    deadline = deadline_of(edges)
    observed = _look(edges, addresses, expected, wanted, EXACT)
    states = states_of(observed, expected, wanted, EXACT)
    if BEGIN:
        states = tl.where(abort_marks(edges), EDGE_ABORTED, states)
    seen = verdict(states)
    polls = 0
    while seen == WAITING:
        behind = wanted & is_behind(observed, expected)
        observed = tl.where(behind, _look(edges, addresses, expected, behind, EXACT), observed)
        states = states_of(observed, expected, wanted, EXACT)
        polls += 1
        if polls % LOOK_AROUND == 0:
            states = tl.maximum(states, look_around(edges, deadline))
        seen = verdict(states)
    waiting = wanted & is_behind(observed, expected)
    return conclude(edges, seen, states, waiting, observed, expected)


@triton.jit
def _look(edges, addresses, expected, wanted, EXACT: tl.constexpr):
    if EXACT:
        observed = spin_acquire_block(addresses, expected, wanted, edges.group.ptx)
    else:
        observed = load_acquire_block(addresses, wanted, edges.group.ptx)
    return observed


@triton.jit
def conclude(edges, seen, states, waiting, observed, expected):
    """Report how a wait ended, of all programs, unless it ended well; returns whether it did, 1 or 0.

    ``seen`` is the last verdict, of ``states`` by position; ``waiting`` says who was not heard from.
    """
    tl.debug_barrier()
    if seen > ENDED:
        culprits, kind = states == seen, MISMATCHED
        if seen == LATE:
            culprits, kind = waiting, TIMED_OUT
        elif seen == EDGE_ABORTED:
            kind = ABORTED
        places = tl.arange(0, states.shape[0])
        chosen = places == tl.min(tl.where(culprits, places, states.shape[0]))
        peer = tl.sum(tl.where(chosen, edges.peers, 0))
        wished = tl.sum(tl.where(chosen, expected, 0))
        was = tl.sum(tl.where(chosen, observed, 0))
        fail(edges, tl.full((), 0, tl.int32) + kind, peer, wished, was)
    return (seen == 0).to(tl.int32)


@triton.jit
def may_begin(edges):
    """Whether no edge is aborted, 1 or 0; if one is, the launch has failed."""
    words = line(edges.group.lane, edges.rank, edges.peers)
    return await_words(edges, words, edges.published * 0, edges.others & False, BEGIN=True)


@triton.jit
def await_credit(edges):
    """Before a launch publishes: wait until peers have consumed all but one of what was published to them.

    After a two-way instance that is known without a wait. See ``gfdit.comm.agreement``. 0 after a failure, or if
    an edge is aborted.
    """
    needed = edges.published - 1
    expected = make_token(edges.digests * 0 + _CREDIT_DIGEST, edges.generations, needed)
    words = line(edges.group.lane, edges.rank, edges.peers) + _CREDIT_WORD * 8
    short = edges.others & (needed > edges.consumed)
    return await_words(edges, words, expected, short, EXACT=False, BEGIN=True)


@triton.jit
def publish(edges, mask, count, channel):
    """Publish instance ``count + 1`` (block) of the edges where ``mask`` is true.

    ``count`` is how many were published before, ``channel`` the chunk or program that the token is of. What any
    thread of the program did before is visible to whoever observes it.
    """
    tl.debug_barrier()
    tokens = make_token(edges.digests, edges.generations, count + 1)
    words = signal(line(edges.group.lane, edges.peers, edges.rank), count % 2, channel)
    store_release_block(words, tokens, mask, edges.group.ptx)


@triton.jit
def observe(edges, mask, count, channel):
    """Wait for instance ``count + 1`` of the edges where ``mask`` is true; 0 after a failure."""
    tokens = make_token(edges.digests, edges.generations, count + 1)
    words = signal(line(edges.group.lane, edges.rank, edges.peers), count % 2, channel)
    return await_words(edges, words, tokens, mask)


@triton.jit
def finish(edges, published, observed, consumed, CREDIT: tl.constexpr = False):
    """Called once by every program, at its end: the last one advances the counters.

    ``published`` and ``observed`` are how many instances the launch used; ``consumed`` is the new count of
    instances known to be consumed by each peer. After a failure the edges are marked as broken instead.
    ``CREDIT``: tell the peers what was observed, as the receiver of a one-way instance must.
    """
    state = word_pointer(tl.load(edges.group.lane + LANE_STATE))
    tl.debug_barrier()
    last = tl.full((), 1, tl.int32)
    if tl.num_programs(0) > 1:
        ticket = tl.atomic_add(state + STATE_TICKET, tl.full((), 1, tl.int64), sem="acq_rel")
        last = (ticket == tl.num_programs(0) - 1).to(tl.int32)
    if last == 1:
        counters = word_pointer(edge_state(edges.group.lane, edges.peers))
        if is_set(edges, tl.load(edges.group.lane + LANE_STATE) + STATE_FAILED * 8):
            tl.store(counters + EDGE_BROKEN, tl.full(edges.peers.shape, 1, tl.int64), mask=edges.others)
        else:
            tl.store(counters + EDGE_PUBLISHED, edges.published + published, mask=edges.others)
            tl.store(counters + EDGE_OBSERVED, edges.observed + observed, mask=edges.others)
            tl.store(counters + EDGE_CONSUMED, consumed, mask=edges.others)
            if CREDIT:
                credits = make_token(
                    edges.digests * 0 + _CREDIT_DIGEST, edges.generations, edges.observed + observed
                )
                words = line(edges.group.lane, edges.peers, edges.rank) + _CREDIT_WORD * 8
                store_release_block(words, credits, edges.others, edges.group.ptx)
        tl.debug_barrier()
        tl.store(state + STATE_FAILED, tl.full((), 0, tl.int64))
        tl.store(state + STATE_TICKET, tl.full((), 0, tl.int64))
