"""Random collectives over random ordered subsets of ranks by interpreted kernels, each by a random path.

The normal tests run a slice, ``make soak-kernels`` some thousands. What is checked is what
``tests.comm.soak`` checks: every byte, memory and open files.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from gfdit.comm import GroupFreeComm
from tests.comm.soak import Piece, report, soak_in_pieces
from tests.comm.worlds import open_world
from tests.kernels.worlds import InterpretedHeap

SIZES = {"slot_bytes": 4096, "low_latency_bytes": 4096, "export_bytes": 16384}
CHUNK_BYTES = (1024, 2048, 4096)


def take_a_random_path(comm: GroupFreeComm, number: int) -> None:
    """The next operation of the lane goes by one of the paths that can carry it out, the same in all members."""
    from gfdit.comm.choice import Choice
    from gfdit.comm.exchange_paths import PATHS
    from gfdit.comm.heap import Operation
    from gfdit.comm.one_way_paths import ONE_WAY_PATHS

    selector: Any = comm.selector

    def choose(situation: Any) -> Choice:
        plan = random.Random(f"{number} {situation}")
        paths = ONE_WAY_PATHS if situation.operation in (Operation.BROADCAST, Operation.SEND) else PATHS
        possible = [path for path in paths if selector._is_possible(path, situation)]
        return Choice(plan.choice(possible), plan.choice(CHUNK_BYTES), plan.randint(1, 3))

    selector.force(choose)


def kernels_in_pieces(comm: GroupFreeComm, seed: int, num_collectives: int, piece_size: int) -> list[Piece]:
    return soak_in_pieces(comm, seed, num_collectives, piece_size, prepare=take_a_random_path)


def run(num_ranks: int, *args: int, timeout_s: float, comm_timeout_s: float = 120.0) -> list[list[Piece]]:
    """``kernels_in_pieces(comm, *args)`` by rank."""
    with open_world(num_ranks, **SIZES) as world:
        world.start_all(kernels_in_pieces, *args, heap_class=InterpretedHeap, comm_timeout_s=comm_timeout_s)
        results = [world.result(rank, timeout_s=timeout_s) for rank in range(num_ranks)]
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", type=int, default=3000)
    parser.add_argument("--piece", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=7200.0, help="of the whole run")
    args = parser.parse_args()
    report(run(args.ranks, args.seed, args.collectives, args.piece, timeout_s=args.timeout_s), args.collectives)


if __name__ == "__main__":
    main()
