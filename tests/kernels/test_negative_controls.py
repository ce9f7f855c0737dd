"""Kernels with one safeguard removed: the checks must see them fail, every time; see ``tests.kernels.trials``.

Memory order itself cannot be taken away here: this machine orders stores more strictly than a GPU does, so the
release is dropped by storing the token first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gfdit.comm import GroupFreeComm
from gfdit.comm.choice import Choice, Path
from tests.comm.test_negative_controls import one_way_rounds, two_way_rounds
from tests.comm.worlds import random_bytes, same_bits, stale
from tests.kernels.trials import Edits, Trial, check_trials

ROUNDS, SEND, RECV = (f"gfdit.kernels.{name}" for name in ("slot_rounds", "send", "recv"))
EDGES, PUSH = "gfdit.kernels.edges", "gfdit.kernels.push_exchange"
# The interpreter runs the programs of a launch in turn: a second one would keep the peers in step.
BY_SLOTS = Choice(Path.PUSH, 2048, num_programs=1)


def long_messages(comm: GroupFreeComm) -> str:
    """Of five rounds."""
    for step in range(3):
        payload = random_bytes(4 * 4096 + 17, step)
        out = payload if comm.rank == 0 else stale((len(payload),), torch.uint8)
        comm.broadcast(out, 0, comm.group((0, 1)))
        if not same_bits(out, payload):
            return "wrong bytes"
    return "ok"


def before_looking(edits: Edits) -> None:
    """Rank 1 is late to look for a token: rank 0 publishes as many as it may."""
    edits.hold_up(1, "observe", ROUNDS, RECV)


def before_reading(edits: Edits) -> None:
    """Rank 1 is held up between seeing a token and reading the payload: rank 0 gets as far ahead as it may."""
    edits.hold_up(1, "observe", ROUNDS, RECV, after=True)


def before_the_token(edits: Edits) -> None:
    """Rank 0 is held up between a payload and its token: rank 1 reads ahead as far as it is let."""
    edits.hold_up(0, "publish", ROUNDS, SEND)


def one_slot(edits: Edits) -> None:
    """Every payload of an edge in the same place: rank 0 may be one instance ahead, which is what rank 1 reads."""

    def first_slot(data_slot: Any) -> Callable[..., Any]:
        return lambda lane, owner, peer, slot: data_slot(lane, owner, peer, slot * 0)

    edits.replace("data_slot", first_slot, ROUNDS, SEND, RECV)


def one_slot_for_tokens(edits: Edits) -> None:
    """When rank 1 looks for a token, that of the next instance is in its place."""
    edits.replace("signal", lambda real: lambda line, slot, chunk: real(line, slot * 0, chunk), EDGES)


def reused_token(edits: Edits) -> None:
    """The token does not say which instance it belongs to: rank 1 takes the last but one for the next."""
    edits.replace(
        "make_token",
        lambda real: lambda digest, generation, instance: real(digest, generation, instance * 0 + 1),
        EDGES,
    )


def missing_wait(edits: Edits) -> None:
    """Rank 1 reads all that rank 0 is to publish while rank 0 is held up with the first of it."""
    import triton.language as tl

    edits.replace("observe", lambda real: lambda *args: tl.full((), 1, tl.int32), ROUNDS, RECV)


def missing_credit(edits: Edits) -> None:
    """Rank 0 publishes everything there is before rank 1 reads the first payload."""
    never_wait(edits, "await_credit", "await_words")


def missing_channel_credit(edits: Edits) -> None:
    """The edge's credit is awaited, that of a round inside a message is not: a message overwrites itself."""
    never_wait(edits, "await_words")


def never_wait(edits: Edits, *names: str) -> None:
    import triton.language as tl

    for name in names:
        edits.replace(name, lambda real: lambda *args, **flags: tl.full((), 1, tl.int1), SEND)


def early_channel_credit(edits: Edits) -> None:
    """One instance less than needed has to be consumed: round 2 overwrites round 0 before rank 1 reads it."""
    edits.replace(
        "make_token",
        lambda real: lambda digest, generation, instance: real(digest, generation, instance - 1),
        SEND,
    )


def token_before_payload(edits: Edits) -> None:
    """What goes into a peer's slot is put there after the token, and rank 0 is held up in between."""
    heap: Any = edits.comm._heap
    size = heap.layout.segment_bytes * heap.world_size
    late: list[tuple[Any, ...]] = []

    def deferred(copy: Any) -> Callable[..., Any]:
        def copy_later(target: Any, *args: Any) -> None:
            is_slot = 0 <= int(target.handle.data.item()) - heap._address < size
            late.append((copy, target, *args)) if is_slot else copy(target, *args)

        return copy_later

    def too_early(publish: Any) -> Callable[..., Any]:
        def publish_first(*args: Any) -> None:
            publish(*args)
            if edits.comm.rank == 0:
                edits.handover.let_the_other_go_on()
            while late:
                copy, *copied = late.pop(0)
                copy(*copied)

        return publish_first

    edits.replace("copy_bytes", deferred, PUSH, SEND)
    edits.replace("publish", too_early, ROUNDS, SEND)


REAL = tuple(
    Trial(program, slow, choice=BY_SLOTS)
    for program in (two_way_rounds, one_way_rounds, long_messages)
    for slow in (before_looking, before_reading, before_the_token)
)
MUTANTS = tuple(
    Trial(program, slow, mutant, BY_SLOTS)
    for program, slow, mutant in (
        (two_way_rounds, before_reading, one_slot),
        (one_way_rounds, before_reading, one_slot),
        (two_way_rounds, before_looking, one_slot_for_tokens),
        (two_way_rounds, before_the_token, reused_token),
        (one_way_rounds, before_the_token, reused_token),
        (two_way_rounds, before_the_token, missing_wait),
        (one_way_rounds, before_the_token, missing_wait),
        (one_way_rounds, before_reading, missing_credit),
        (long_messages, before_reading, missing_credit),
        (long_messages, before_reading, missing_channel_credit),
        (long_messages, before_reading, early_channel_credit),
        (two_way_rounds, before_the_token, token_before_payload),
        (one_way_rounds, before_the_token, token_before_payload),
    )
)


def test_every_mutant_is_seen_to_fail_and_the_real_kernels_are_not() -> None:
    check_trials((*REAL, *MUTANTS, *REAL[::3]), scratch_bytes=4096)
