"""Paths for large messages with one safeguard removed: the checks must see them fail, every time.

See ``tests.kernels.trials``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from gfdit.comm import CommError, GroupFreeComm
from gfdit.comm.choice import Choice, Path
from tests.comm.worlds import PATIENCE_S, open_world, set_timeout
from tests.kernels.test_large_paths import SIZES, force
from tests.kernels.trials import Change, Edits, HandoverHeap, Trial, check_trials, real

NUM_STEPS = 4
NUM_BYTES = 2512  # a multiple of 16, for tiles; not of 1024, so there is a rest
DIRECT, ROUNDS = "gfdit.kernels.direct_exchange", "gfdit.kernels.direct_rounds"
TMA_COPY, COPY_ENGINE = "gfdit.kernels.tma_copy", "gfdit.comm.copy_engine"
ALL_GATHER, BROADCAST = "gfdit.kernels.multicast_all_gather", "gfdit.kernels.multicast_broadcast"


def gathers(comm: GroupFreeComm, path: Path) -> str:
    """Repeated all-gathers of one tensor, which is overwritten as soon as an operation has returned."""
    x = comm.empty((NUM_BYTES,), torch.uint8) if path is Path.DIRECT_PULL else torch.empty(NUM_BYTES).byte()
    shape = (2, NUM_BYTES)
    out = comm.empty(shape, torch.uint8) if path is Path.DIRECT_PUSH else torch.empty(shape, dtype=torch.uint8)
    for step in range(NUM_STEPS):
        group = comm.group((0, 1) if step % 2 else (1, 0))
        comm.all_gather_into_tensor(out.fill_(255), x.fill_(10 * step + comm.rank), group)
        if out.tolist() != [[10 * step + rank] * NUM_BYTES for rank in group.ranks]:
            return "wrong bytes"
    return "ok"


def broadcasts(comm: GroupFreeComm, path: Path) -> str:
    for step in range(NUM_STEPS):
        x = torch.full((NUM_BYTES,), step if comm.rank == 0 else 255, dtype=torch.uint8)
        comm.broadcast(x, 0, comm.group((0, 1)))
        if x.tolist() != [step] * NUM_BYTES:
            return "wrong bytes"
    return "ok"


def before_copying(edits: Edits) -> None:
    """Rank 1 is held up before every copy: rank 0 ends operations, and begins others, as far as it is let."""
    edits.hold_up(1, "_copy", COPY_ENGINE)
    edits.hold_up(1, "_copy_remote", DIRECT)
    edits.hold_up(1, "take_share", ALL_GATHER, BROADCAST)


def before_the_token(edits: Edits) -> None:
    """Rank 0 is held up before every token."""
    edits.hold_up(0, "publish", ROUNDS)


def no_closing(edits: Edits) -> None:
    """A rank does not wait until its peers have taken what it let them read, or stored what it is to get.

    So rank 0 has overwritten the one before rank 1 copies it, and returned without the other.
    """
    edits.replace("observe", partial(every_other, instead=1), ROUNDS, ALL_GATHER)

    def skipping(real: Any) -> SimpleNamespace:
        return SimpleNamespace(plan=lambda members: every_other(real.plan(members), None))

    edits.replace("barrier", skipping, COPY_ENGINE)
    if edits.comm.rank == 0:  # the source
        edits.replace("observe", lambda real: lambda *args: 1, BROADCAST)


def every_other(real: Any, instead: Any) -> Callable[..., Any]:
    """Every second call does nothing."""
    num_calls = 0

    def call(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return real(*args) if num_calls % 2 else instead

    return call


def wrong_parity(edits: Edits) -> None:
    """The reader takes the offset of another instance, where there never was one. No race."""

    def other_slot(place_words: Any) -> Callable[..., Any]:
        return lambda line, slot, number: place_words(line, slot if len(line.shape) else 1 - slot, number)

    edits.replace("place_words", other_slot, DIRECT)


def token_before_payload(edits: Edits) -> None:
    """What goes straight into a peer's target is put there after the token; rank 0 is held up in between."""
    late: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def too_early(publish: Any) -> Callable[..., Any]:
        def publish_first(*args: Any) -> None:
            publish(*args)
            if late and edits.comm.rank == 0:
                edits.handover.let_the_other_go_on()
            while late:
                copy, copied = late.pop()
                copy(*copied)

        return publish_first

    edits.replace("_copy_remote", lambda copy: lambda *args: late.append((copy, args)), DIRECT)
    edits.replace("publish", too_early, ROUNDS)


def no_rest(edits: Edits) -> None:
    """Only whole tiles are copied. No race."""
    edits.replace("copy_bytes", lambda real: lambda *args: None, TMA_COPY)


def trial(program: Callable[..., str], path: Path, slow: Change, mutant: Change = real) -> Trial:
    return Trial(partial(program, path=path), slow, mutant, Choice(path, 2048, num_programs=1))


PROGRAMS = (
    (gathers, Path.DIRECT_PULL),
    (gathers, Path.DIRECT_PUSH),
    (gathers, Path.COPY_ENGINE),
    (gathers, Path.TMA),
    (gathers, Path.MULTICAST),
    (broadcasts, Path.MULTICAST),
)
REAL = (
    *(trial(*program, before_copying) for program in PROGRAMS),
    trial(gathers, Path.DIRECT_PUSH, before_the_token),
)
MUTANTS = (
    trial(gathers, Path.DIRECT_PULL, before_copying, no_closing),
    trial(gathers, Path.DIRECT_PUSH, before_copying, no_closing),
    trial(gathers, Path.COPY_ENGINE, before_copying, no_closing),
    trial(gathers, Path.MULTICAST, before_copying, no_closing),
    trial(broadcasts, Path.MULTICAST, before_copying, no_closing),
    trial(gathers, Path.DIRECT_PULL, before_copying, wrong_parity),
    trial(gathers, Path.DIRECT_PUSH, before_the_token, token_before_payload),
    trial(gathers, Path.TMA, before_copying, no_rest),
)


def test_every_mutant_is_seen_to_fail_and_the_real_paths_are_not() -> None:
    check_trials((*REAL, *MUTANTS, *REAL), **SIZES)


def alone_then_together(comm: GroupFreeComm) -> list[tuple[str, str]]:
    """Rank 0 begins without rank 1, fails, and both go on after a reset: by every path."""
    handover = comm._heap.handover
    outcomes = []
    for program, path in PROGRAMS:
        force(comm, path)
        first = "absent"
        if comm.rank == 0:
            set_timeout(comm, 0.2)  # rank 1 does not come, however long it is
            try:
                first = program(comm, path)
            except CommError as error:
                first = type(error).__name__
            set_timeout(comm, PATIENCE_S)
        handover.meet()
        comm.reset((0, 1))
        outcomes.append((first, program(comm, path)))
    return outcomes


def test_a_missing_peer_is_a_timeout_which_a_reset_mends() -> None:
    with open_world(2, **SIZES) as world:
        world.start_all(alone_then_together, heap_class=HandoverHeap)
        first, second = world.results()
    assert first == [("CommTimeout", "ok")] * len(PROGRAMS)
    assert second == [("absent", "ok")] * len(PROGRAMS)
