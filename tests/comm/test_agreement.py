"""The agreement, checked by exploring every interleaving of two ranks, with mutants that must fail."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gfdit.comm.agreement import (
    CREDIT_DIGEST,
    EdgeAgreement,
    describe_token,
    edge_digest,
    group_seed,
    is_behind,
    make_token,
)

# One shared instance as both ranks see it: two-way, or one-way from rank 0 or from rank 1.
BOTH, FROM_0, FROM_1 = "both", "0->1", "1->0"
KINDS = (BOTH, FROM_0, FROM_1)
DIGEST = 77


class Protocol:
    """The real agreement; mutants override one thing each."""

    num_slots = 2
    uses_credit = True
    release = ("write", "publish")

    def token(self, token: int) -> int:
        return token


class OneSlot(Protocol):
    num_slots = 1


class NoCredit(Protocol):
    uses_credit = False


class TokenBeforePayload(Protocol):
    release = ("publish", "write")


class SameTokenEveryTime(Protocol):
    def token(self, token: int) -> int:
        return make_token(DIGEST, 0, 1)


def steps_of(program: tuple[str, ...], rank: int, protocol: Protocol) -> list[tuple[str, bool, int]]:
    """Atomic steps (name, two_way, instance of the program) of one rank, in its program order."""
    steps = []
    for index, kind in enumerate(program):
        two_way = kind == BOTH
        if two_way or kind == f"{rank}->{1 - rank}":
            steps += [(name, two_way, index) for name in ("credit", *protocol.release)]
        if two_way or kind == f"{1 - rank}->{rank}":
            steps += [(name, two_way, index) for name in ("observe", "read")]
    return steps


class Explorer:
    """Depth-first search over all interleavings. The state is hashable, so each one is visited once."""

    def __init__(self, program: tuple[str, ...], protocol: Protocol) -> None:
        self.protocol = protocol
        self.steps = [steps_of(program, rank, protocol) for rank in (0, 1)]
        self.outcomes: set[str] = set()

    def run(self) -> set[str]:
        fresh = astuple(EdgeAgreement(num_slots=self.protocol.num_slots))
        # Per rank: step, agreement, claimed (slot, token); per reader: two tokens, two payloads, credit word.
        rank = (0, fresh, (0, 0))
        memory = ((0, 0), (-1, -1), 0)
        pending, seen = [((rank, rank), (memory, memory))], set()
        while pending:
            state = pending.pop()
            if state in seen:
                continue
            seen.add(state)
            successors = [after for rank in (0, 1) if (after := self.advance(state, rank)) is not None]
            if not successors:
                done = all(state[0][rank][0] == len(self.steps[rank]) for rank in (0, 1))
                self.outcomes.add("ok" if done else "deadlock")
            pending += [after for after in successors if not isinstance(after, str)]
            self.outcomes |= {after for after in successors if isinstance(after, str)}
        return self.outcomes

    def advance(self, state, rank):
        """The state after one step of ``rank``, a failure by name, or None when it is blocked or done."""
        ranks, memories = state
        position, fields, claim = ranks[rank]
        if position == len(self.steps[rank]):
            return None
        name, two_way, index = self.steps[rank][position]
        edge = EdgeAgreement(*fields)
        mine, theirs = memories[rank], memories[1 - rank]
        if name == "credit":
            needed = edge.credit_needed() if self.protocol.uses_credit else None
            if needed is not None:
                if is_behind(mine[2], needed):
                    return None
                edge.credit_reached()
            slot, token = edge.publish(DIGEST)
            claim = (slot, self.protocol.token(token))
        elif name == "write":
            theirs = (theirs[0], put(theirs[1], claim[0], index), theirs[2])
        elif name == "publish":
            theirs = (put(theirs[0], *claim), theirs[1], theirs[2])
        elif name == "observe":
            slot, expected = edge.expect(DIGEST)
            expected = self.protocol.token(expected)
            if mine[0][slot] != expected:
                return None if is_behind(mine[0][slot], expected) else "mismatch"
            claim = (slot, expected)
        else:
            if mine[1][claim[0]] != index:
                return "wrong payload"
            if two_way:
                edge.consume_two_way()
            else:
                theirs = (theirs[0], theirs[1], edge.consume_one_way())
        new_rank = (position + 1, astuple(edge), claim)
        new_ranks = (new_rank, ranks[1]) if rank == 0 else (ranks[0], new_rank)
        return new_ranks, ((mine, theirs) if rank == 0 else (theirs, mine))


def put(values: tuple[int, int], index: int, value: int) -> tuple[int, int]:
    return (value, values[1]) if index == 0 else (values[0], value)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_every_interleaving_of_every_mixture_is_correct(length: int) -> None:
    for program in itertools.product(KINDS, repeat=length):
        assert Explorer(program, Protocol()).run() == {"ok"}, program


def test_long_mixtures_are_correct() -> None:
    for program in [(BOTH,) * 9, (FROM_0,) * 9, (BOTH, FROM_0, FROM_0, FROM_1, BOTH, FROM_1, FROM_1, FROM_0) * 2]:
        assert Explorer(program, Protocol()).run() == {"ok"}, program


@pytest.mark.parametrize(
    ("mutant", "program", "failure"),
    [
        (OneSlot(), (BOTH, BOTH), "wrong payload"),
        (OneSlot(), (BOTH, BOTH), "mismatch"),
        (NoCredit(), (FROM_0, FROM_0, FROM_0), "wrong payload"),
        (NoCredit(), (BOTH, FROM_0, FROM_0), "wrong payload"),
        (TokenBeforePayload(), (BOTH,), "wrong payload"),
        (SameTokenEveryTime(), (BOTH, BOTH, BOTH), "wrong payload"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Protocol) else None,
)
def test_negative_control(mutant: Protocol, program: tuple[str, ...], failure: str) -> None:
    """Each safeguard removed is seen to fail, so the tests above say something."""
    assert failure in Explorer(program, mutant).run()


def test_one_slot_can_deadlock_waiting_for_a_token_that_was_overwritten() -> None:
    """What an observer that waits for equality only (no mismatch verdict) would see as a hang."""
    outcomes = Explorer((BOTH, BOTH), OneSlot()).run()
    assert outcomes - {"ok"}


def test_one_message_is_accepted_without_the_receiver() -> None:
    """The documented consequence of the credit rule, after a fresh start and after a two-way instance."""
    edge = EdgeAgreement()
    assert edge.credit_needed() is None
    edge.publish(DIGEST)
    assert edge.credit_needed() is None
    edge.publish(DIGEST)
    assert edge.credit_needed() == make_token(CREDIT_DIGEST, 0, 1)
    edge = EdgeAgreement()
    edge.publish(DIGEST)
    edge.consume_two_way()
    assert edge.credit_needed() is None


@given(
    generation=st.integers(0, 2**16 - 1),
    instance=st.integers(0, 2**24 - 1),
    steps=st.integers(1, 1000),
    digests=st.tuples(st.integers(1, 2**24 - 1), st.integers(1, 2**24 - 1)),
)
def test_order_of_tokens_survives_wrapping(
    generation: int, instance: int, steps: int, digests: tuple[int, int]
) -> None:
    older = make_token(digests[0], generation, instance)
    newer = make_token(digests[1], generation, instance + steps)
    next_generation = make_token(digests[1], generation + steps, 1)
    assert is_behind(older, newer) and not is_behind(newer, older)
    assert is_behind(older, next_generation) and not is_behind(next_generation, older)
    assert is_behind(0, newer)
    assert not is_behind(older, older)
    assert older & 0xFFFFFFFF != make_token(digests[1], generation, instance + 2) & 0xFFFFFFFF


def test_digest_tells_operations_sizes_groups_and_sessions_apart() -> None:
    seeds = {group_seed(session, ranks) for session in (1, 2) for ranks in [(0, 1), (1, 0), (0, 1, 2)]}
    assert len(seeds) == 6
    digests = {edge_digest(seed, op, size) for seed in seeds for op in range(1, 7) for size in (0, 1, 2, 4096)}
    assert len(digests) == 6 * 6 * 4
    assert all(0 < digest < 2**24 for digest in digests)


def test_generations_only_go_forward() -> None:
    edge = EdgeAgreement()
    edge.publish(DIGEST)
    edge.reset(edge.next_generation())
    assert (edge.generation, edge.published) == (1, 0)
    assert edge.next_generation(7) == 7
    for wanted in (1, 0, -5):
        with pytest.raises(ValueError, match="not ahead"):
            edge.next_generation(wanted)


def test_tokens_are_described_in_words() -> None:
    assert "instance 5, generation 3" in describe_token(make_token(9, 3, 5))
    assert "never written" in describe_token(0)
