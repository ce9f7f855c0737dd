"""Collectives over any ordered ranks at any moment, without creating a communicator: four CPU processes.

Each round draws other pairs, or all ranks in another order. Making a group communicates nothing and allocates
nothing; the time printed is that of the group and its first all-gather together. Needs torch.

    python examples/04_collectives_without_groups.py
"""

import random
import time

import torch

from gfdit.comm import GroupFreeComm, spawn

NUM_RANKS, ROUNDS, NUMBERS = 4, 200, 1024


def exchange(comm: GroupFreeComm) -> list[float]:
    """Run by every rank. Any two ranks must issue what they share in the same order, and do: one seed."""
    draw, took_us = random.Random(0), []
    mine = torch.full((NUMBERS,), float(comm.rank))
    for _ in range(ROUNDS):
        order = draw.sample(range(NUM_RANKS), NUM_RANKS)
        groups = [order] if draw.random() < 0.5 else [order[:2], order[2:]]
        for ranks in groups:
            if comm.rank in ranks:
                began = time.perf_counter()
                group = comm.group(tuple(ranks))
                found = torch.empty(len(ranks) * NUMBERS)
                comm.all_gather_into_tensor(found, mine, group)
                took_us.append(1e6 * (time.perf_counter() - began))
                assert found[::NUMBERS].tolist() == ranks  # in the group's own order
    return took_us


def main() -> None:
    took_us = sorted(value for rank in spawn(exchange, NUM_RANKS, start_method="forkserver") for value in rank)
    print(f"{ROUNDS} rounds on {NUM_RANKS} processes, {len(took_us)} all-gathers of 4 KiB, each in a new group")
    print(f"group and all-gather together: median {took_us[len(took_us) // 2]:.0f} us")


if __name__ == "__main__":
    main()
