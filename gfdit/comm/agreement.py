"""Edge agreement: the specification of how two ranks agree on a collective (paper §4.4, Algorithm 1).

Each *ordered* rank pair ``(r, p)`` is an edge. An edge owns a sequence counter and two signal slots that
live in the memory of ``p``, the rank that waits on them. Only ``r`` writes them. Instance ``n`` of an edge
uses slot ``n % 2``, so the two ends pick the same slot without exchanging anything, whatever groups the
instances came from. A slot holds one 64-bit token::

    bit 63..40  digest       what is issued: session, ordered ranks, operation, bytes on this edge; never zero
    bit 39..24  generation   how often the edge was reset
    bit 23..0   instance     the edge's counter, from 1, modulo 2**24

The instance is the edge's own counter, not an epoch of the group: groups stay stateless, so a rank may make
the same group twice, or forget it, without telling anyone.

Publish (``r``): write the payload, then store the token with *release* order. Observe (``p``): load the token
with *acquire* order until it is the expected one, then read the payload. The token is the only evidence of
arrival and there is no acknowledgement.

What an observer concludes from the token it sees, comparing generation then instance as serial numbers:

- behind the expected one: not arrived; keep waiting (bounded);
- the same generation and instance, the same digest: arrived;
- anything else (other digest, or ahead): the pair did not issue the same collectives in the same order.

The low 32 bits differ between any two tokens that follow each other in a slot, so they can serve as a futex.

Why two slots are enough for a two-way collective (both ends publish, then both observe)
    Slot ``n % 2`` is overwritten by instance ``n + 2``. To publish it, ``r`` must have returned from
    ``n + 1``, so it observed ``p``'s token of ``n + 1``; ``p`` published that only after it had consumed
    ``n``, because every rank runs its instances of a lane in order. This is the pairwise-consistent order
    the runtime guarantees. With one slot, ``n + 1`` overwrites ``n`` while ``p`` may still be reading it.

Why one-way operations (send, recv, broadcast) need credit, and how much
    They give ``r`` no observation of ``p``, so the argument above has no premise. The receiver therefore
    writes, after it consumed a one-way instance, how many instances of the edge it has consumed: the
    *credit* word of the edge, in the sender's memory, one writer, never decreasing, so it needs no slots.
    The credit is deferred: a sender looks at it only when it needs it. The rule that covers every mixture:

        before ``r`` publishes its instance ``i`` (from 0), it knows that ``p`` consumed ``i - 1`` of them.

    There are three sources of that knowledge: completing a two-way instance proves all but that instance;
    receiving a one-way instance from ``p`` proves all of them; otherwise the credit word says it.
    Consequence: after anything observed from ``p``, one message of one slot is accepted without waiting for
    ``p``; never rely on more.

Memory order contract
    ``publish``: every store to payload before it in program order is visible to whoever observes the token.
    ``observe``: no load of payload after it is satisfied before the token was seen.
    ``consumed`` (writing credit) is a release after the last payload load; seeing enough credit is an acquire
    before the next payload store. For two-way instances the next ``publish`` plays the part of the credit: a
    release orders earlier *loads* too. Tokens are aligned 8-byte words written by one store.
    On total-store-order machines (x86_64) ordinary loads and stores give all of this; elsewhere
    ``gfdit.comm.memory_order`` supplies the fences. Device kernels use ``st.release.sys``/``ld.acquire.sys``.

Reset: both ends move to a new generation and start again from instance 1. Nothing is erased: whatever an
earlier generation left in the slots is *behind* every token of the new one. See ``GroupFreeComm.reset`` for
who may call it when.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

NUM_SLOTS = 2
INSTANCE_BITS, GENERATION_BITS, DIGEST_BITS = 24, 16, 24
_INSTANCE_MASK = (1 << INSTANCE_BITS) - 1
_GENERATION_MASK = (1 << GENERATION_BITS) - 1
_DIGEST_MASK = (1 << DIGEST_BITS) - 1
_DIGEST_SHIFT = INSTANCE_BITS + GENERATION_BITS
CREDIT_DIGEST = 1  # of credit; no operation has it
_pack_call = struct.Struct("<BQ").pack


def group_seed(session: int, ranks: Sequence[int]) -> int:
    """32-bit identity of an ordered group within one session (``session``: 64-bit)."""
    payload = struct.pack(f"<Q{len(ranks)}I", session, *ranks)
    return int.from_bytes(hashlib.blake2b(payload, digest_size=4).digest(), "little")


def edge_digest(seed: int, operation: int, num_bytes: int) -> int:
    """24-bit digest of one operation of a group, moving ``num_bytes`` over this edge: above CREDIT_DIGEST."""
    return max(zlib.crc32(_pack_call(operation, num_bytes), seed) & _DIGEST_MASK, CREDIT_DIGEST + 1)


def make_token(digest: int, generation: int, instance: int) -> int:
    """Pack the three fields; generation and instance are taken modulo their widths."""
    return digest << _DIGEST_SHIFT | (generation & _GENERATION_MASK) << INSTANCE_BITS | (instance & _INSTANCE_MASK)


def digest_of(token: int) -> int:
    """What ``make_token`` was given."""
    return token >> _DIGEST_SHIFT


def instance_of(token: int) -> int:
    """What ``make_token`` was given, modulo its width."""
    return token & _INSTANCE_MASK


def is_behind(observed: int, expected: int) -> bool:
    """True when ``observed`` is older than ``expected`` (or the slot was never written)."""
    if not observed:
        return True
    generations = ((expected >> INSTANCE_BITS) - (observed >> INSTANCE_BITS)) & _GENERATION_MASK
    if generations:
        return generations <= _GENERATION_MASK >> 1
    instances = (expected - observed) & _INSTANCE_MASK
    return 0 < instances <= _INSTANCE_MASK >> 1


def describe_token(token: int) -> str:
    """A token in words, for error messages."""
    if not token:
        return "nothing (never written)"
    instance, generation = token & _INSTANCE_MASK, token >> INSTANCE_BITS & _GENERATION_MASK
    return f"token {token:#018x} (instance {instance}, generation {generation})"


@dataclass(slots=True)
class EdgeAgreement:
    """One rank's side of the two edges it shares with a peer ``p``, on one lane. Host integers only.

    ``published`` counts instances on ``(me, p)``, ``observed`` those on ``(p, me)``; ``consumed`` is how
    many of the published ones ``p`` is *known* to have consumed. ``num_slots`` is 2; tests set it to 1 to
    show that the tests can see the race that two slots remove.
    """

    num_slots: int = NUM_SLOTS
    generation: int = 0
    published: int = 0
    observed: int = 0
    consumed: int = 0

    def credit_needed(self) -> int | None:
        """The credit token that must be reached before the next ``publish``; None when nothing is missing."""
        needed = self.published + 1 - NUM_SLOTS
        if needed <= self.consumed:
            return None
        return make_token(CREDIT_DIGEST, self.generation, needed)

    def credit_reached(self) -> None:
        """The credit that ``credit_needed`` asked for was observed."""
        self.consumed = self.published + 1 - NUM_SLOTS

    def publish(self, digest: int) -> tuple[int, int]:
        """Claim the next instance of ``(me, p)``: (slot, token) to write with release order."""
        slot = self.published % self.num_slots
        self.published += 1
        return slot, make_token(digest, self.generation, self.published)

    def expect(self, digest: int) -> tuple[int, int]:
        """(slot, token) to wait for on ``(p, me)`` with acquire order; ``consume`` completes the instance."""
        return self.observed % self.num_slots, make_token(digest, self.generation, self.observed + 1)

    def consume_two_way(self) -> None:
        """The payload of a two-way instance was read: ``p`` had consumed all of mine before this one."""
        self.observed += 1
        self.consumed = max(self.consumed, self.published - 1)

    def consume_one_way(self) -> int:
        """The payload of a one-way instance was read; returns the credit token to publish to ``p``."""
        self.observed += 1
        self.consumed = self.published
        return make_token(CREDIT_DIGEST, self.generation, self.observed)

    def next_generation(self, wanted: int | None = None) -> int:
        """``wanted``, or the generation after the current one.

        Raises ValueError when ``wanted`` is not ahead of the current one. A process that has not used the edge yet
        knows of none: it may join a server whose edges have been reset any number of times.
        """
        new = self.generation + 1 if wanted is None else wanted
        is_unused = not (self.generation or self.published or self.observed)
        if new > 0 and is_unused:
            return new & _GENERATION_MASK
        if not 0 < (new - self.generation) & _GENERATION_MASK <= _GENERATION_MASK >> 1:
            raise ValueError(f"generation {new} is not ahead of the edge's generation {self.generation}")
        return new & _GENERATION_MASK

    def reset(self, generation: int) -> None:
        """Start again from instance 1 in ``generation``, one from ``next_generation``."""
        self.generation = generation
        self.published = self.observed = self.consumed = 0
