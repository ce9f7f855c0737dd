"""Low-latency kernels, interpreted in rank processes: every word that arrives is one that was sent this time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gfdit.comm import GroupFreeComm
from gfdit.comm.reduction import sum_in_order
from tests.comm.soak import perform
from tests.comm.test_collectives import (
    ALL_GROUPS,
    DTYPES,
    check_all_gather,
    check_all_to_all,
    check_broadcast,
)
from tests.comm.worlds import open_world, random_bytes, same_bits, stale
from tests.kernels.worlds import InterpretedHeap

LOW_LATENCY_BYTES = 64 * 1024
SLOT_BYTES = 64 * 1024
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 5, 8, 63, 4096 + 257, 12345, LOW_LATENCY_BYTES - 1, LOW_LATENCY_BYTES)


def check_sum(comm: GroupFreeComm, ranks: tuple[int, ...], num_elements: int, dtype, key: int) -> None:
    """The bits of ``OrderedSum`` in every member; large and small numbers, infinity, zeros of both signs."""

    def values(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * key + rank)
        x = torch.randn(num_elements, generator=generator)
        x = (x * torch.exp2(torch.randint(-20, 12, x.shape, generator=generator))).to(dtype)
        special = torch.tensor([0.0, -0.0, float("inf"), 1.0]).to(dtype)
        return torch.where(torch.rand(x.shape, generator=generator) < 0.1, special[key % 4], x)

    x = values(comm.rank)
    comm.all_reduce(x, comm.group(ranks))
    assert same_bits(x, sum_in_order(torch.stack([values(rank) for rank in ranks]))), (ranks, num_elements, dtype)


def ordered_subsets(comm: GroupFreeComm, stride: int) -> int:
    """Every one, or every seventh. Gather and all-to-all are one kernel, which groups take in turn."""
    taken = 0
    for key, ranks in list(enumerate(ALL_GROUPS))[::stride]:
        if comm.rank in ranks:
            group, num_bytes = comm.group(ranks), (1, 3, 37, 264, 1000)[key % 5]
            if key % 2:
                check_all_gather(comm, group, (num_bytes,), torch.uint8, key)
            else:
                check_all_to_all(comm, group, num_bytes, 1, torch.uint8, key)
            src = ranks[key % len(ranks)]
            x = random_bytes(num_bytes, key, src) if src == comm.rank else stale((num_bytes,), torch.uint8)
            comm.broadcast(x, src, group)
            assert same_bits(x, random_bytes(num_bytes, key, src)), (ranks, src)
            check_sum(comm, ranks, num_bytes, FLOATS[key % 3], key)
            comm.barrier(group)
            taken += 1
    return taken


def sizes_and_alignments(comm: GroupFreeComm) -> int:
    """Odd sizes, and tensors that begin anywhere."""
    for key, num_bytes in enumerate(SIZES):
        for ranks in ((2, 0, 3, 1), (1, 3)):
            if comm.rank not in ranks:
                continue
            group = comm.group(ranks)
            shift = (key + comm.rank) % 4
            check_all_to_all(comm, group, num_bytes, 1, torch.uint8, key)
            mine = stale((num_bytes + shift,), torch.uint8)[shift:]
            mine.copy_(random_bytes(num_bytes, key, comm.rank))
            out = stale((len(ranks) * num_bytes + 8,), torch.uint8)
            comm.all_gather_into_tensor(out[shift : shift - 8], mine, group)
            assert same_bits(out[shift : shift - 8], torch.cat([random_bytes(num_bytes, key, r) for r in ranks]))
            assert (out[:shift] == 0xAB).all() and (out[shift - 8 :] == 0xAB).all()
            check_broadcast(comm, group, num_bytes, key)
            check_sum(comm, ranks, num_bytes // 4, FLOATS[key % 3], key)
    return len(SIZES)


def dtypes(comm: GroupFreeComm) -> int:
    group = comm.group((3, 1, 0, 2))
    for key, dtype in enumerate(DTYPES):
        check_all_gather(comm, group, (7, 3), dtype, key)
        check_all_to_all(comm, group, 3, 101, dtype, key)
    return len(DTYPES)


def buffers_are_reused(comm: GroupFreeComm) -> int:
    """Shrinking messages leave longer, older ones behind them in the slots; an old word would show."""
    group, pair = comm.group((1, 0, 2, 3)), comm.group((0, 1) if comm.rank < 2 else (3, 2))
    x, out = torch.empty(4, 301, dtype=torch.int32), torch.empty(4, 301, dtype=torch.int32)
    for step, width in enumerate((301, 300, 150, 7, 301, 1)):
        for each in (group, pair):
            source, target = x[: len(each), :width].clone(), out.view(-1)[: len(each) * width]
            source.copy_(torch.arange(len(each)).view(-1, 1) + 100 * comm.rank + 10_000 * step)
            comm.all_to_all_single(target, source.view(-1), each)
            source.fill_(-1)  # the operation returned, so the input is ours again
            wanted = torch.tensor([each.index + 100 * rank + 10_000 * step for rank in each.ranks])
            assert torch.equal(target.view(-1, width), wanted.to(torch.int32).view(-1, 1).expand(-1, width)), step
    return step


def mixed_paths(comm: GroupFreeComm) -> int:
    """Messages below and above the limit and one-way ones, over overlapping groups that share counters."""
    plan = random.Random(7)
    for step in range(28):
        ranks = tuple(plan.sample(range(comm.world_size), plan.randint(2, comm.world_size)))
        kind = plan.choice(("barrier", "gather", "all_to_all", "reduce", "broadcast", "send", "send"))
        if kind == "send":
            ranks = ranks[:2]
        sizes = [1, 500, 4104, LOW_LATENCY_BYTES + 264]
        if kind == "all_to_all":
            sizes[-1] *= len(ranks)
        num_bytes = plan.choice(sizes)
        if comm.rank in ranks:
            perform(comm, kind, ranks, num_bytes, step)
    return step


def chosen_by_hand(comm: GroupFreeComm) -> int:
    """Several programs, more than one turn each."""
    from gfdit.comm.choice import Choice, Path

    selector: Any = comm._transport.selector
    group = comm.group((3, 0, 2, 1))
    for num_programs in (1, 3):
        selector.force(lambda situation, number=num_programs: Choice(Path.LOW_LATENCY, 0, number))
        for key, num_bytes in enumerate((0, 60_000)):
            check_all_gather(comm, group, (num_bytes,), torch.uint8, key)
            check_sum(comm, group.ranks, num_bytes // 4, FLOATS[key], key)
            x = random_bytes(num_bytes, key, 2) if comm.rank == 2 else stale((num_bytes,), torch.uint8)
            comm.broadcast(x, 2, group)
            assert same_bits(x, random_bytes(num_bytes, key, 2))
    selector.force(None)
    return num_programs


PROGRAMS: tuple[Callable[..., int], ...] = (
    ordered_subsets,
    sizes_and_alignments,
    dtypes,
    buffers_are_reused,
    mixed_paths,
    chosen_by_hand,
)


def run_all(comm: GroupFreeComm, stride: int) -> dict[str, tuple[int, Counter]]:
    """What each program returns, and how often it took which path."""
    from gfdit.kernels.launch import launcher
    from gfdit.kernels.variants import all_variants

    launcher.warm_up(all_variants(comm.world_size, ptx=False))
    selector: Any = comm._transport.selector
    choose, results = selector.choose, {}
    for program in PROGRAMS:
        paths: Counter = Counter()

        def counted(situation, paths=paths):
            choice = choose(situation)
            paths[choice.path.value] += 1
            return choice

        selector.choose = counted
        selector.version += 1
        results[program.__name__] = (program(comm, stride) if program is ordered_subsets else program(comm), paths)
    assert not launcher.late, launcher.late
    return results


@pytest.fixture(scope="module", params=[7, pytest.param(1, marks=pytest.mark.thorough)])
def results(request: pytest.FixtureRequest) -> list[dict[str, tuple[int, Counter]]]:
    """By rank; all programs one after another in one world, so that each starts with what the last one left."""
    with open_world(4, slot_bytes=SLOT_BYTES, low_latency_bytes=LOW_LATENCY_BYTES) as world:
        world.start_all(run_all, request.param, heap_class=InterpretedHeap)
        results = [world.result(rank, timeout_s=280) for rank in range(4)]
    for rank, result in enumerate(results):
        assert isinstance(result, dict), f"rank {rank}: {result!r}"
    return results


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_those_of_the_reference(results, program) -> None:
    for result in results:
        value, paths = result[program.__name__]
        assert value > 3 or program is not ordered_subsets
        assert paths["low_latency"] > 0 or program is chosen_by_hand
    if program is mixed_paths:
        assert all(result["mixed_paths"][1]["push"] > 5 for result in results)
    elif program is not chosen_by_hand:
        assert all(result[program.__name__][1]["push"] == 0 for result in results)


def random_subsets(comm: GroupFreeComm) -> int:
    plan = random.Random(11)
    taken = 0
    for step in range(24):
        ranks = tuple(plan.sample(range(comm.world_size), plan.randint(2, comm.world_size)))
        kind = plan.choice(("barrier", "gather", "all_to_all", "reduce", "broadcast"))
        num_bytes = plan.choice((1, 777, 4096))
        if comm.rank in ranks:
            perform(comm, kind, ranks, num_bytes, step)
            check_sum(comm, ranks, 200, torch.bfloat16, step)
            taken += 1
    return taken


@pytest.mark.thorough
def test_random_subsets_of_eight_ranks() -> None:
    with open_world(8, slot_bytes=SLOT_BYTES, low_latency_bytes=LOW_LATENCY_BYTES // 8) as world:
        world.start_all(random_subsets, heap_class=InterpretedHeap)
        results = [world.result(rank, timeout_s=280) for rank in range(8)]
    assert all(isinstance(taken, int) and taken > 5 for taken in results), results
