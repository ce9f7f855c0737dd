"""Exhaustive exploration of the agreement between two ranks: the real ``EdgeAgreement``, every interleaving.

``python -m tests.comm.explorer`` prints how many states that covers, and what becomes of each mutant.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import astuple

from gfdit.comm.agreement import EdgeAgreement, is_behind, make_token

# One shared instance as both ranks see it: two-way, or one-way from rank 0 or from rank 1.
BOTH, FROM_0, FROM_1 = "both", "0->1", "1->0"
KINDS = (BOTH, FROM_0, FROM_1)
MAX_LENGTH = 5
LONG_PROGRAMS = (
    (BOTH,) * 9,
    (FROM_0,) * 9,
    (BOTH, FROM_0, FROM_0, FROM_1, BOTH, FROM_1, FROM_1, FROM_0) * 2,
)
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


# A mutant, a program that gives it away, and what goes wrong.
NEGATIVE_CONTROLS: tuple[tuple[Protocol, tuple[str, ...], str], ...] = (
    (OneSlot(), (BOTH, BOTH), "wrong payload"),
    (OneSlot(), (BOTH, BOTH), "mismatch"),
    (NoCredit(), (FROM_0, FROM_0, FROM_0), "wrong payload"),
    (NoCredit(), (BOTH, FROM_0, FROM_0), "wrong payload"),
    (TokenBeforePayload(), (BOTH,), "wrong payload"),
    (SameTokenEveryTime(), (BOTH, BOTH, BOTH), "wrong payload"),
)


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
    """Depth-first search over all interleavings. The state is hashable, so each one is visited once.

    ``run`` returns how executions can end: "ok", "deadlock", or a failure by name.
    """

    def __init__(self, program: tuple[str, ...], protocol: Protocol) -> None:
        self.protocol = protocol
        self.steps = [steps_of(program, rank, protocol) for rank in (0, 1)]
        self.outcomes: set[str] = set()
        self.num_states = 0

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
        self.num_states = len(seen)
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


def programs(length: int) -> Iterable[tuple[str, ...]]:
    """Every mixture of ``length`` instances."""
    return itertools.product(KINDS, repeat=length)


def explore(mixtures: Iterable[tuple[str, ...]]) -> int:
    """Number of states visited. Raises AssertionError if any interleaving of any mixture goes wrong."""
    num_states = 0
    for program in mixtures:
        explorer = Explorer(program, Protocol())
        assert explorer.run() == {"ok"}, program
        num_states += explorer.num_states
    return num_states


def main() -> None:
    for length in range(1, MAX_LENGTH + 1):
        print(f"mixtures of {length}: {len(KINDS) ** length:,} programs, {explore(programs(length)):,} states")
    print(f"long mixtures: {len(LONG_PROGRAMS)} programs, {explore(LONG_PROGRAMS):,} states")
    for mutant, program, _ in NEGATIVE_CONTROLS:
        outcomes = Explorer(program, mutant).run()
        print(f"{type(mutant).__name__}, {' '.join(program)}: {', '.join(sorted(outcomes))}")


if __name__ == "__main__":
    main()
