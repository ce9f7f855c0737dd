"""The agreement, checked by exploring every interleaving of two ranks, with mutants that must fail."""

from __future__ import annotations

from pathlib import Path

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
from tests.comm.explorer import (
    BOTH,
    DIGEST,
    LONG_PROGRAMS,
    MAX_LENGTH,
    NEGATIVE_CONTROLS,
    Explorer,
    OneSlot,
    Protocol,
    explore,
    programs,
)


@pytest.mark.parametrize("length", range(1, MAX_LENGTH + 1))
def test_every_interleaving_of_every_mixture_is_correct(length: int) -> None:
    assert_documented(explore(programs(length)))


def test_long_mixtures_are_correct() -> None:
    assert_documented(explore(LONG_PROGRAMS))


def assert_documented(num_states: int) -> None:
    page = Path(__file__).parents[2] / "docs" / "collectives.md"
    assert f"{num_states:,}" in page.read_text()


@pytest.mark.parametrize(
    ("mutant", "program", "failure"),
    NEGATIVE_CONTROLS,
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


@pytest.mark.parametrize("generation", [1, 32_768, 65_535, 65_536, 1_000_000])
def test_a_process_that_joins_takes_whichever_generation_an_edge_is_in(generation: int) -> None:
    """By then a server that has run for months may have reset it that often; and it goes on from there."""
    edge = EdgeAgreement()
    edge.reset(edge.next_generation(generation))
    edge.publish(DIGEST)
    assert edge.next_generation(generation + 1) == (generation + 1) % 65_536
    with pytest.raises(ValueError, match="not ahead"):
        edge.next_generation(generation)


def test_tokens_are_described_in_words() -> None:
    assert "instance 5, generation 3" in describe_token(make_token(9, 3, 5))
    assert "never written" in describe_token(0)
