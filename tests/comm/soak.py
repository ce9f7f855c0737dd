"""Random collectives over random ordered subsets of ranks: the order is shared, the timing is not.

The normal tests run a slice. ``make soak-comm`` runs 100,000 in one world, in pieces that each report; every
result is compared byte by byte, and neither memory nor file descriptors may grow.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gfdit.comm import GroupFreeComm
from tests.comm.worlds import heap_files, random_bytes, run_ranks, same_bits, stale

KINDS = ("barrier", "gather", "all_to_all", "broadcast", "reduce", "send", "send", "send")
SLOT_BYTES = 4096
# What an allocator may still take after the first piece. A leak of 100 bytes in each of 100,000 is more.
GROWTH_BYTES = 4 * 2**20
Prepare = Callable[[GroupFreeComm, int], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank after one piece: what it took part in so far, and what it holds."""

    num_performed: int
    resident_bytes: int
    num_open_files: int


def soak(comm: GroupFreeComm, seed: int, num_operations: int, stalls: bool, prepare: Prepare | None = None) -> int:
    """The same random program in every rank; each runs the operations it is part of and checks the bytes.

    ``prepare`` is called before each of them, with a number that is the same in all members.
    """
    plan, pace = random.Random(seed), random.Random(seed * 100 + comm.rank)
    performed = 0
    for step in range(num_operations):
        ranks = tuple(plan.sample(range(comm.world_size), plan.randint(2, comm.world_size)))
        kind = plan.choice(KINDS)
        num_bytes = plan.choice([0, 1, 17, 1000, 4096, 4097, 4096 + 257 * plan.randint(0, 40)])
        if kind == "send":
            ranks = ranks[:2]
        if comm.rank in ranks:
            if stalls and pace.random() < 0.05:
                time.sleep(pace.random() * 2e-3)
            if prepare is not None:
                prepare(comm, seed * 100_000 + step)
            perform(comm, kind, ranks, num_bytes, seed * 100_000 + step)
            performed += 1
    return performed


def perform(comm: GroupFreeComm, kind: str, ranks: tuple[int, ...], num_bytes: int, key: int) -> None:
    context = (kind, ranks, num_bytes, key)
    group = comm.group(ranks)
    inputs = {rank: random_bytes(num_bytes, key, rank) for rank in ranks}
    mine, index = inputs[comm.rank], group.index
    if kind == "barrier":
        comm.barrier(group)
    elif kind == "gather":
        out = stale((len(ranks) * num_bytes,), torch.uint8)
        comm.all_gather_into_tensor(out, mine, group)
        assert same_bits(out, torch.cat([inputs[rank] for rank in ranks])), context
    elif kind == "all_to_all":
        usable = num_bytes // len(ranks) * len(ranks)
        out = stale((usable,), torch.uint8)
        comm.all_to_all_single(out, mine[:usable], group)
        parts = [inputs[rank][:usable].chunk(len(ranks))[index] for rank in ranks] if usable else [out]
        assert same_bits(out, torch.cat(parts)), context
    elif kind == "broadcast":
        x = mine.clone()
        comm.broadcast(x, ranks[-1], group)
        assert same_bits(x, inputs[ranks[-1]]), context
    elif kind == "reduce":
        x = mine.long()
        comm.all_reduce(x, group)
        assert torch.equal(x, torch.stack([inputs[rank].long() for rank in ranks]).sum(0)), context
    elif comm.rank == ranks[0]:
        comm.send(mine, ranks[1])
    else:
        out = stale((num_bytes,), torch.uint8)
        comm.recv(out, ranks[0])
        assert same_bits(out, inputs[ranks[0]]), context


def soak_in_pieces(
    comm: GroupFreeComm,
    seed: int,
    num_collectives: int,
    piece_size: int,
    stalls: bool = False,
    prepare: Prepare | None = None,
) -> list[Piece]:
    """One ``Piece`` after each ``piece_size`` collectives of the world, the last one possibly shorter."""
    pieces: list[Piece] = []
    performed, begin_s = 0, time.monotonic()
    for done in range(0, num_collectives, piece_size):
        size = min(piece_size, num_collectives - done)
        performed += soak(comm, seed * 1000 + len(pieces), size, stalls, prepare)
        pieces.append(Piece(performed, _resident_bytes(), _num_open_files()))
        if comm.rank == 0:
            elapsed_s = time.monotonic() - begin_s
            print(f"{done + size:,} of {num_collectives:,} collectives, {elapsed_s:.0f} s", flush=True)
    return pieces


def check_growth(rank: int, pieces: Sequence[Piece]) -> None:
    """The first piece warms up: workspaces, lazily loaded code, the allocator's arenas."""
    first, last = pieces[0], pieces[-1]
    assert last.num_open_files <= first.num_open_files, (rank, first, last)
    assert last.resident_bytes <= first.resident_bytes + GROWTH_BYTES, (rank, first, last)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def report(by_rank: Sequence[Sequence[Piece]], num_collectives: int) -> None:
    """Prints what each rank did and holds. Raises AssertionError if anything grew or was left behind."""
    for rank, pieces in enumerate(by_rank):
        first, last = pieces[0], pieces[-1]
        growth_kib = (last.resident_bytes - first.resident_bytes) / 1024
        print(
            f"rank {rank}: took part in {last.num_performed:,}; memory {growth_kib:+.0f} KiB and open files "
            f"{last.num_open_files - first.num_open_files:+d} since the first piece"
        )
        check_growth(rank, pieces)
    assert not heap_files()
    print(f"{num_collectives:,} collectives on {len(by_rank)} ranks: 0 mismatches, nothing left behind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--piece", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=7200.0, help="of the whole run")
    args = parser.parse_args()
    by_rank = run_ranks(
        soak_in_pieces,
        args.ranks,
        args.seed,
        args.collectives,
        args.piece,
        slot_bytes=SLOT_BYTES,
        timeout_s=args.timeout_s,
    )
    report(by_rank, args.collectives)


if __name__ == "__main__":
    main()
