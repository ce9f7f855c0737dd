"""Every path for large messages, interpreted in rank processes, against references built independently."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from gfdit.comm import GroupFreeComm
from gfdit.comm.choice import Choice, Path
from gfdit.comm.group import Group
from tests.comm.test_collectives import ALL_GROUPS, DTYPES
from tests.comm.worlds import open_world, random_bytes, random_tensor, same_bits, stale
from tests.kernels.worlds import InterpretedHeap

EXCHANGES = (Path.PUSH, Path.TMA, Path.DIRECT_PULL, Path.DIRECT_PUSH, Path.COPY_ENGINE)
PATHS = (*EXCHANGES, Path.MULTICAST)
# Paths that need not know what other members exchange.
UNEVEN = (Path.PUSH, Path.TMA, Path.DIRECT_PULL, Path.DIRECT_PUSH)
SIZES = {"slot_bytes": 4096, "export_bytes": 8192, "multicast_bytes": 2048, "scratch_bytes": 1 << 20}


def force(comm: GroupFreeComm, path: Path, num_programs: int = 1, chunk_bytes: int = 2048) -> None:
    transport: Any = comm._transport
    transport.selector.force(lambda situation: Choice(path, chunk_bytes, num_programs))


class Operations:
    """Collectives of one rank by one path after the other, each compared with what it must give."""

    def __init__(self, comm: GroupFreeComm) -> None:
        self.comm = comm
        self.count = 0

    def place(self, x: torch.Tensor, in_heap: bool) -> torch.Tensor:
        """``x``, in the heap if wanted; there it overwrites what an earlier operation left."""
        return self.comm.empty(x.shape, x.dtype).copy_(x) if in_heap else x

    def all_gather(self, path: Path, group: Group, shape: tuple[int, ...], dtype: torch.dtype, key: int) -> None:
        inputs = [random_tensor(shape, dtype, key, rank) for rank in group.ranks]
        x = self.place(inputs[group.index], path is Path.DIRECT_PULL)
        out = self.place(stale((len(group) * shape[0], *shape[1:]), dtype), path is Path.DIRECT_PUSH)
        self.comm.all_gather_into_tensor(out, x, group)
        assert same_bits(out, torch.cat(inputs)), (path, group, shape, dtype)
        self.count += 1

    def all_to_all(self, path: Path, group: Group, rows: list[list[int]], width: int, key: int) -> None:
        """``rows[i][j]`` rows of ``width`` bytes go from position ``i`` to position ``j``."""
        size, me = len(group), group.index
        inputs = [random_tensor((sum(rows[i]), width), torch.uint8, key, i) for i in range(size)]
        received = [rows[i][me] for i in range(size)]
        x = self.place(inputs[me], path is Path.DIRECT_PULL)
        out = self.place(stale((sum(received), width), torch.uint8), path is Path.DIRECT_PUSH)
        even = all(count == rows[0][0] for count in itertools.chain(*rows))
        splits = () if even else (received, rows[me])
        self.comm.all_to_all_single(out, x, group, *splits)
        expected = torch.cat([torch.split(inputs[i], rows[i])[me] for i in range(size)])
        assert same_bits(out, expected), (path, group, rows, width)
        self.count += 1

    def broadcast(self, group: Group, num_bytes: int, key: int) -> None:
        src = group.ranks[key % len(group)]
        payload = random_bytes(num_bytes, key, src)
        x = payload.clone() if src == self.comm.rank else stale((num_bytes,), torch.uint8)
        self.comm.broadcast(x, src, group)
        assert same_bits(x, payload), (group, src, num_bytes)
        self.count += 1


def even_rows(size: int, rows: int) -> list[list[int]]:
    return [[rows] * size for _ in range(size)]


def uneven_rows(size: int, choices: list[int], key: int) -> list[list[int]]:
    picks = random_bytes(size**2, key, 99).tolist()
    return [[choices[picks[i * size + j] % len(choices)] for j in range(size)] for i in range(size)]


def every_ordered_subset(comm: GroupFreeComm, num_programs: int, packed: bool) -> int:
    """By every path, one right after the other on the same edges; several rounds of each area now and then."""
    if not packed:
        import gfdit.comm.kernel_transport

        gfdit.comm.kernel_transport.MAX_PACKED = 0  # every group comes with a table
    operations = Operations(comm)
    for key, ranks in enumerate(ALL_GROUPS):
        if comm.rank not in ranks or (not packed and key % 5):
            continue
        group = comm.group(ranks)
        for number, path in enumerate(PATHS):
            force(comm, path, num_programs)
            num_bytes = (1, 37, 1024, 4096 + 257, 300, 2500, 16)[(key + number) % 7]
            if path is Path.TMA and key % 4 < 3:
                num_bytes = -(-num_bytes // 16) * 16  # else it is done by words
            if path is Path.MULTICAST:
                operations.broadcast(group, num_bytes, key)
            elif key % 2:
                rows = even_rows(len(group), num_bytes)
                if path in UNEVEN and key % 3:
                    rows = uneven_rows(len(group), [0, 1, num_bytes, 0, 2 * num_bytes], key)
                operations.all_to_all(path, group, rows, 1, key)
            if path is Path.MULTICAST or key % 2 == 0:
                operations.all_gather(path, group, (num_bytes,), torch.uint8, key)
    return operations.count


@pytest.mark.parametrize(("num_programs", "packed"), [(1, True), (3, False)])
def test_every_ordered_subset_of_four_ranks(num_programs: int, packed: bool) -> None:
    with open_world(4, **SIZES) as world:
        arguments = (num_programs, packed)
        world.start_all(every_ordered_subset, *arguments, heap_class=InterpretedHeap)
        results = [world.result(rank, timeout_s=600) for rank in range(4)]
    # Every rank is in 49 of the 64 ordered subsets. One operation by each path, two by multicast.
    assert not packed or results == [49 * (len(PATHS) + 1)] * 4, results
    assert all(isinstance(count, int) and count > 0 for count in results), results


def random_groups(comm: GroupFreeComm, num_groups: int) -> int:
    """Random members in random order, so that groups chain, interleave and overlap in all ways; on two lanes.

    One thread does both lanes in turn: the interpreter is for one thread.
    """
    choices = random.Random(3)
    lanes = [Operations(comm.lane(name)) for name in ("compute", "migration")]
    for key in range(num_groups):
        size = choices.randint(2, comm.world_size)
        ranks = tuple(choices.sample(range(comm.world_size), size))
        path, num_programs = choices.choice(PATHS), choices.choice((1, 2))
        num_bytes, dtype = choices.randrange(1, 6000), choices.choice(DTYPES)
        if path is Path.TMA:
            num_bytes = 48 * (num_bytes // 48 + 1)
        gathers, lane = choices.random() < 0.5, choices.choice(lanes)
        if comm.rank not in ranks:
            continue
        group = comm.group(ranks)
        force(lane.comm, path, num_programs)
        if path is Path.MULTICAST or gathers:
            lane.all_gather(path, group, (-(-num_bytes // dtype.itemsize),), dtype, key)
        elif path in UNEVEN:
            lane.all_to_all(path, group, uneven_rows(size, [0, 1, num_bytes // 7, 11], key), 7, key)
        else:
            lane.all_to_all(path, group, even_rows(size, num_bytes // 3), 3, key)
    return sum(lane.count for lane in lanes)


def test_random_subsets_of_eight_ranks_on_two_lanes() -> None:
    with open_world(8, **SIZES) as world:
        world.start_all(random_groups, 40, heap_class=InterpretedHeap)
        results = [world.result(rank, timeout_s=600) for rank in range(8)]
    assert all(isinstance(count, int) and count > 0 for count in results), results


def large_messages(comm: GroupFreeComm) -> int:
    """From a byte to 8 MB per peer, addresses of any alignment, more bytes than any area holds."""
    operations, group = Operations(comm), comm.group((1, 0))
    for number, path in enumerate(PATHS):
        for num_bytes in (1, 65537 - number, (1 << 20) + 3 * 16, 8 << 20):
            force(comm, path, 2, chunk_bytes=1 << 16)
            operations.all_gather(path, group, (num_bytes,), torch.uint8, number)
        if path is Path.MULTICAST:
            operations.broadcast(group, (1 << 20) + 5, number)
            continue
        force(comm, path, 4, chunk_bytes=1 << 14)
        offset, num_bytes = 1 + number, 100_003
        whole = operations.place(random_bytes(offset + 2 * num_bytes, comm.rank), path is Path.DIRECT_PULL)
        target = operations.place(stale((3 + 2 * num_bytes,), torch.uint8), path is Path.DIRECT_PUSH)
        comm.all_to_all_single(target[3:], whole[offset:], group)
        parts = [random_bytes(offset + 2 * num_bytes, rank)[offset:].chunk(2)[group.index] for rank in (1, 0)]
        assert same_bits(target[3:], torch.cat(parts)) and (target[:3] == 0xAB).all(), path
        operations.count += 1
    return operations.count


def test_sizes_from_a_byte_to_eight_megabytes() -> None:
    sizes = {"slot_bytes": 1 << 18, "export_bytes": 1 << 20, "multicast_bytes": 1 << 19, "scratch_bytes": 48 << 20}
    with open_world(2, **sizes) as world:
        world.start_all(large_messages, heap_class=InterpretedHeap)
        assert [world.result(rank, timeout_s=600) for rank in range(2)] == [5 * len(PATHS)] * 2


def chosen_paths(comm: GroupFreeComm) -> list[str]:
    """What is taken by rule for tensors in the heap and outside it; in place, too."""
    from gfdit.comm import exchange_paths

    taken: list[str] = []
    for path, kind in exchange_paths.PATHS.items():

        def noted(exchange: Any, plan: Any = kind.plan, path: Path = path) -> Any:
            run = plan(exchange)

            def noting(*arguments: Any) -> None:
                taken.append(path)
                run(*arguments)

            return noting

        exchange_paths.PATHS[path] = exchange_paths.ExchangePath(noted, kind.obstacle)  # type: ignore[index]
    group = comm.group((0, 1))
    outside = torch.full((1000,), comm.rank, dtype=torch.int32)
    inside = comm.empty((1000,), torch.int32).copy_(outside)
    gathered_outside, gathered_inside = torch.empty(2000, dtype=torch.int32), comm.empty((2000,), torch.int32)
    for x, out in (
        (outside, gathered_outside),
        (inside, gathered_outside),
        (outside, gathered_inside),
        (inside, gathered_inside),
    ):
        out.fill_(-1)
        comm.all_gather_into_tensor(out, x, group)
        assert out.tolist() == [0] * 1000 + [1] * 1000
    own = gathered_inside[1000 * comm.rank :][:1000].fill_(7 + comm.rank)
    comm.all_gather_into_tensor(gathered_inside, own, group)
    assert gathered_inside.tolist() == [7] * 1000 + [8] * 1000
    total = comm.empty((5000,), torch.int32).fill_(1 + comm.rank)
    comm.all_reduce(total, group)
    assert total.tolist() == [3] * 5000
    return taken


def test_heap_tensors_are_not_staged() -> None:
    with open_world(2, slot_bytes=4096, scratch_bytes=1 << 20) as world:
        world.start_all(chosen_paths, heap_class=InterpretedHeap)
        first, second = world.results()
    assert first == second and first[:5] == ["push", "direct_pull", "direct_push", "direct_pull", "direct_pull"]


def misaligned_on_one_rank(comm: GroupFreeComm) -> tuple[bool, bool]:
    """Rank 1 cannot use tiles, rank 0 can. Whether the bytes are right, and whether tiles were used."""
    from gfdit.kernels import push_exchange

    copy_tiles, num_calls = push_exchange.copy_tiles, 0

    def counted(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        copy_tiles(*args)

    push_exchange.copy_tiles = counted
    force(comm, Path.TMA, 2)
    group, num_bytes = comm.group((0, 1)), 6000
    x, out = stale((num_bytes + 1,), torch.uint8)[comm.rank :][:num_bytes], stale((2 * num_bytes,), torch.uint8)
    x.copy_(random_bytes(num_bytes, comm.rank))
    comm.all_gather_into_tensor(out, x, group)
    return same_bits(out, torch.cat([random_bytes(num_bytes, rank) for rank in (0, 1)])), num_calls > 0


def different_paths(comm: GroupFreeComm) -> str:
    force(comm, Path.COPY_ENGINE if comm.rank else Path.PUSH)
    try:
        comm.barrier(comm.group((0, 1)))
    except Exception as error:
        return type(error).__name__
    return "agreed"


def test_copying_may_differ_between_members_but_not_the_protocol() -> None:
    with open_world(2, **SIZES) as world:
        world.start_all(misaligned_on_one_rank, heap_class=InterpretedHeap)
        assert world.results() == [(True, True), (True, False)]
    with open_world(2, **SIZES) as world:
        world.start_all(different_paths, heap_class=InterpretedHeap)
        assert world.results() == ["CommMismatch", "CommMismatch"]
