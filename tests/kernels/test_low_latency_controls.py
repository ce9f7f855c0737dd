"""Low-latency kernels with one safeguard removed: the checks must see them fail, every time.

See ``tests.kernels.trials``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gfdit.comm import CommError, GroupFreeComm
from tests.comm.worlds import PATIENCE_S, open_world, random_bytes, same_bits, set_timeout, stale
from tests.kernels.trials import Edits, HandoverHeap, Trial, check_trials

ROUNDS = 8
SIZES = {"low_latency_bytes": 4096, "scratch_bytes": 4096}
FORMAT = "gfdit.kernels.low_latency"
EXCHANGE, BROADCAST = "gfdit.kernels.low_latency_exchange", "gfdit.kernels.low_latency_broadcast"


def gathers(comm: GroupFreeComm) -> str:
    """Repeated all-gathers, through groups that overlap on the same edge."""
    for step in range(1, ROUNDS + 1):
        group = comm.group((0, 1) if step % 2 else (1, 0))
        out = torch.full((2, 100), -1)
        comm.all_gather_into_tensor(out, torch.full((1, 100), 100 * step + comm.rank), group)
        if out.tolist() != [[100 * step + rank] * 100 for rank in group.ranks]:
            return "wrong bytes"
    return "ok"


def broadcasts(comm: GroupFreeComm) -> str:
    group = comm.group((0, 1))
    for step in range(ROUNDS):
        x = random_bytes(800, step) if comm.rank == 0 else stale((800,), torch.uint8)
        comm.broadcast(x, 0, group)
        if not same_bits(x, random_bytes(800, step)):
            return "wrong bytes"
    return "ok"


def over_a_reset(comm: GroupFreeComm) -> str:
    """After a reset instances count from 1 again, and their old words are still in the slots unless cleared.

    Rank 0 goes on at once; rank 1 clears its slots as late as it can.
    """
    group, handover = comm.group((0, 1)), comm._heap.handover
    for generation in range(1, 3):
        for step in range(2):
            out = torch.full((2, 100), -1)
            value = 100 * step + 1000 * generation + comm.rank
            comm.all_gather_into_tensor(out, torch.full((1, 100), value), group)
            if out[:, 99].tolist() != [value - comm.rank, value - comm.rank + 1]:
                return "wrong bytes"
        handover.meet()
        if comm.rank == 1:
            handover.let_the_other_go_on()
        comm.reset([1 - comm.rank])
    return "ok"


def before_looking(edits: Edits) -> None:
    """Rank 1 is late to look for token and pairs: rank 0 stores as many as it may."""
    edits.hold_up(1, "await_pairs", EXCHANGE, BROADCAST)


def before_the_pairs(edits: Edits) -> None:
    """Rank 0 is held up between its token and the pairs: rank 1 goes on if the token is enough for it."""
    edits.hold_up(0, "announce", EXCHANGE, FORMAT, after=True)


def one_slot(edits: Edits) -> None:
    """Rank 0 may be one instance ahead: rank 1 waits for ever for the pairs which those of the next overwrote."""
    edits.replace(
        "low_latency_slot",
        lambda real: lambda lane, owner, peer, number: real(lane, owner, peer, number * 0),
        FORMAT,
    )


def same_flag_every_time(edits: Edits) -> None:
    """The token is that of this instance, the pairs are those of the last but one."""
    edits.replace("_flags", lambda flags: lambda instances: flags(instances * 0 + 1), FORMAT)


def no_wait_for_pairs(edits: Edits) -> None:
    """The token alone is taken for the arrival."""
    edits.replace("_flags", lambda flags: lambda instances: instances * 0, FORMAT)
    edits.replace("spin_pairs", lambda load: lambda *args: [words & (2**32 - 1) for words in load(*args)], FORMAT)


def no_credit(edits: Edits) -> None:
    """Rank 0 stores all there is before rank 1 looks for the first, and no wait for a peer's clearing either."""
    edits.replace("await_free", lambda real: lambda *args: 1, EXCHANGE, BROADCAST)


def slots_not_cleared(edits: Edits) -> None:
    """Rank 1 sees the token of the new generation and takes the pairs of the old one, whose flags are the same."""
    transport: Any = edits.comm._transport
    edits.undo.callback(setattr, transport, "_low_latency_slots", transport._low_latency_slots)
    transport._low_latency_slots = lambda peer: torch.empty(0)


REAL = (
    Trial(gathers, before_looking),
    Trial(gathers, before_the_pairs),
    Trial(broadcasts, before_looking),
    Trial(broadcasts, before_the_pairs),
    Trial(over_a_reset, before_looking),
    Trial(over_a_reset, before_the_pairs),
)
MUTANTS = (
    Trial(gathers, before_looking, one_slot),
    Trial(broadcasts, before_looking, one_slot),
    Trial(gathers, before_the_pairs, same_flag_every_time),
    Trial(gathers, before_the_pairs, no_wait_for_pairs),
    Trial(broadcasts, before_looking, no_credit),
    Trial(over_a_reset, before_the_pairs, slots_not_cleared),
    # Rank 1 clears its slots when the pairs of the new generation are in them, and waits for ever.
    Trial(over_a_reset, before_looking, no_credit),
)


def test_the_real_kernels_pass_and_mutants_are_seen_to_fail() -> None:
    check_trials((*REAL, *MUTANTS, *REAL), **SIZES)


def failures(comm: GroupFreeComm) -> list[str]:
    """A peer that sends another size, another operation, or nothing; each ends in the error that says so."""
    group, texts = comm.group((0, 1)), []
    handover = comm._heap.handover
    x, out = torch.zeros(8), torch.empty(16)

    def late() -> None:
        if comm.rank == 0:
            set_timeout(comm, 0.3)  # rank 1 does not come, however long it is
            comm.all_gather_into_tensor(out, x, group)

    cases: list[Callable[[], None]] = [
        lambda: comm.all_gather_into_tensor(out[: 8 - 4 * comm.rank], x[: 4 - 2 * comm.rank], group),
        lambda: comm.barrier(group) if comm.rank else comm.all_reduce(x, group),
        lambda: comm.broadcast(x, comm.rank, group),
        late,
    ]
    for case in cases:
        try:
            case()
            texts.append("ok")
        except CommError as error:
            texts.append(f"{type(error).__name__}: {error}")
        set_timeout(comm, PATIENCE_S)
        handover.meet()
        comm.reset([1 - comm.rank])
        comm.all_gather_into_tensor(out, torch.full((8,), float(comm.rank)), group)
        assert out.tolist() == [0.0] * 8 + [1.0] * 8
    return texts


def test_what_does_not_agree_ends_in_an_error_and_a_reset_mends_it() -> None:
    with open_world(2, **SIZES) as world:
        world.start_all(failures, heap_class=HandoverHeap)
        by_rank = world.results()
    for rank, texts in enumerate(by_rank):
        assert texts[0].startswith("CommMismatch") and "all_gather" in texts[0], texts
        assert texts[1].startswith("CommMismatch") and ("barrier" if rank else "all_reduce") in texts[1], texts
        # Both sent one message that was accepted without the receiver.
        assert texts[2] == "ok", texts
        assert texts[3] == "ok" if rank else texts[3].startswith("CommTimeout"), texts
