"""Collectives, each compared bit by bit with a reference that never communicates."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.ranks import random_bytes, same_bits, stale
from gfdit.comm import Group, GroupFreeComm
from gfdit.comm.choice import Path, Situation
from gfdit.comm.heap import Operation

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)


class Operations:
    """The operations of one rank; ``count`` of them were right. ``in_heap``: input and output are heap tensors."""

    def __init__(self, comm: GroupFreeComm) -> None:
        self.comm = comm
        self.count = 0

    def all_gather(
        self, group: Group, num_bytes: int, key: int, in_heap: tuple[bool, bool] = (False, False)
    ) -> None:
        inputs = [random_bytes(self.comm.device, num_bytes, key, rank) for rank in group.ranks]
        wanted = torch.cat(inputs)
        x, out = self._place(inputs[group.index], in_heap[0]), self._place(stale(wanted), in_heap[1])
        self.comm.all_gather_into_tensor(out, x, group)
        self._check(out, wanted, f"all-gather of {num_bytes} bytes in {group.ranks}")

    def all_to_all(
        self, group: Group, rows: Sequence[Sequence[int]], key: int, in_heap: tuple[bool, bool] = (False, False)
    ) -> None:
        """``rows[i][j]`` bytes go from position ``i`` to position ``j``."""
        me = group.index
        inputs = [random_bytes(self.comm.device, sum(row), key, i) for i, row in enumerate(rows)]
        received = [row[me] for row in rows]
        wanted = torch.cat([x.split(list(row))[me] for x, row in zip(inputs, rows, strict=True)])
        x, out = self._place(inputs[me], in_heap[0]), self._place(stale(wanted), in_heap[1])
        uneven = len(set(itertools.chain(*rows))) > 1
        self.comm.all_to_all_single(out, x, group, *((received, rows[me]) if uneven else ()))
        self._check(out, wanted, f"all-to-all of {rows} bytes in {group.ranks}")

    def broadcast(self, group: Group, num_bytes: int, key: int) -> None:
        source = group.ranks[key % len(group)]
        wanted = random_bytes(self.comm.device, num_bytes, key, source)
        x = wanted.clone() if source == self.comm.rank else stale(wanted)
        self.comm.broadcast(x, source, group)
        self._check(x, wanted, f"broadcast of {num_bytes} bytes from {source} in {group.ranks}")

    def send(self, source: int, target: int, num_bytes: int, key: int) -> None:
        wanted = random_bytes(self.comm.device, num_bytes, key, source)
        if self.comm.rank == source:
            self.comm.send(wanted, target)
        elif self.comm.rank == target:
            out = stale(wanted)
            self.comm.recv(out, source)
            self._check(out, wanted, f"{num_bytes} bytes sent from {source} to {target}")

    def all_reduce(self, group: Group, num_elements: int, dtype: torch.dtype, key: int) -> None:
        """Small integers, whose sums are exact in every dtype."""
        parts = [random_bytes(self.comm.device, num_elements, key, rank) % 8 for rank in group.ranks]
        x, wanted = parts[group.index].to(dtype), torch.stack(parts).sum(0).to(dtype)
        self.comm.all_reduce(x, group)
        self._check(x, wanted, f"all-reduce of {num_elements} {dtype} in {group.ranks}")

    def heads(self, group: Group, key: int) -> None:
        """To own heads of all tokens and back, with grouped keys and values, and tokens that differ in number."""
        tokens, size = [3 + index for index in range(len(group))], len(group)
        begin = sum(tokens[: group.index])
        whole = [self._heads(sum(tokens), heads, key + heads) for heads in (4 * size, 2 * size, 2 * size)]
        own = [tensor[:, begin : begin + tokens[group.index]].contiguous() for tensor in whole]
        scattered = self.comm.scatter_heads(own, group, tokens=tokens)
        for got, tensor in zip(scattered, whole, strict=True):
            self._check(got, tensor.chunk(size, dim=2)[group.index], f"scattered heads in {group.ranks}")
        back = self.comm.gather_heads(scattered[0].contiguous(), group, tokens=tokens)
        self._check(back, own[0], f"gathered heads in {group.ranks}")

    def _heads(self, tokens: int, heads: int, key: int) -> torch.Tensor:
        shape, dtype = (2, tokens, heads, 16), torch.bfloat16
        num_bytes = 2 * tokens * heads * 16 * dtype.itemsize
        return random_bytes(self.comm.device, num_bytes, key).view(dtype).view(shape)

    def _place(self, x: torch.Tensor, in_heap: bool) -> torch.Tensor:
        return self.comm.empty(x.shape, x.dtype).copy_(x) if in_heap else x

    def _check(self, got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        if got.shape != wanted.shape or not same_bits(got, wanted):
            raise AssertionError(f"rank {self.comm.rank}: wrong bytes in {what}")
        self.count += 1


def ordered_subsets(comm: GroupFreeComm, largest: int, sizes: Sequence[int]) -> int:
    """Every ordered subset of at most ``largest`` ranks, one operation right after the other."""
    operations = Operations(comm)
    subsets = [
        ranks for size in range(1, largest + 1) for ranks in itertools.permutations(range(comm.world_size), size)
    ]
    for key, ranks in enumerate(subsets):
        if comm.rank not in ranks:
            continue
        group, num_bytes = comm.group(ranks), sizes[key % len(sizes)]
        operations.all_gather(group, num_bytes, key)
        operations.all_to_all(group, even_rows(len(ranks), num_bytes), key)
        if len(ranks) > 1:
            operations.broadcast(group, num_bytes, key)
        comm.barrier(group)
    return operations.count


def path_check(comm: GroupFreeComm, path: Path, num_programs: int, sizes: Sequence[int]) -> str:
    """By one path: all operations it can serve, with about ``num_programs``. What was done, or why nothing."""
    selector, done = comm.selector, 0
    assert selector is not None
    group = comm.group([*range(1, comm.world_size), 0])
    operations = Operations(comm)
    in_heap = (path is Path.DIRECT_PULL, path is Path.DIRECT_PUSH)
    reason = ""
    for key, num_bytes in enumerate(sizes):
        for operation, run in _operations_of(operations, group, num_bytes, key, in_heap).items():
            heap_ends = (False, False) if operation is Operation.BROADCAST else in_heap
            situation = Situation(operation, len(group), num_bytes, *heap_ends)
            choices = [choice for choice in selector.candidates(situation) if choice.path is path]
            if not choices:
                reason = selector.obstacle(path, situation) or reason
                continue
            with selector.forced(min(choices, key=lambda choice: abs(choice.num_programs - num_programs))):
                run()
            done += 1
    # Heads by this path, into places where there are any.
    has_places = selector.site.layout.place_bytes > 0
    situation = Situation(Operation.SCATTER_HEADS, len(group), sizes[-1], target_in_heap=has_places)
    choices = [choice for choice in selector.candidates(situation) if choice.path is path]
    if choices:
        with selector.forced(min(choices, key=lambda choice: abs(choice.num_programs - num_programs))):
            operations.heads(group, len(sizes))
        done += 2
    return f"{done} operations" if done else f"not possible here: {reason}"


def _operations_of(
    operations: Operations, group: Group, num_bytes: int, key: int, in_heap: tuple[bool, bool]
) -> dict[Operation, Callable[[], None]]:
    size = len(group)
    return {
        Operation.BARRIER: lambda: operations.comm.barrier(group),
        Operation.ALL_GATHER: lambda: operations.all_gather(group, num_bytes, key, in_heap),
        Operation.ALL_TO_ALL: lambda: operations.all_to_all(group, even_rows(size, num_bytes), key, in_heap),
        Operation.BROADCAST: lambda: operations.broadcast(group, num_bytes, key),
    }


def uneven_check(comm: GroupFreeComm) -> int:
    """Parts of different sizes, some of them empty."""
    operations = Operations(comm)
    group = comm.group([*range(1, comm.world_size), 0])
    for key, sizes in enumerate(([0, 1, 17], [100, 5000, 0], [3, 3, 3])):
        rows = [[sizes[(i * 2 + j + key) % 3] for j in range(len(group))] for i in range(len(group))]
        operations.all_to_all(group, rows, key)
    return operations.count


def sums_and_heads(comm: GroupFreeComm, num_elements: Sequence[int]) -> int:
    operations = Operations(comm)
    for key, (dtype, number) in enumerate(itertools.product(DTYPES, num_elements)):
        operations.all_reduce(comm.group(range(comm.world_size)), number, dtype, key)
    for key, ranks in enumerate(((0, 1), (1, 0), tuple(range(comm.world_size)))):
        if comm.rank in ranks:
            operations.heads(comm.group(ranks), key)
    return operations.count


def random_sequence(comm: GroupFreeComm, seed: int, length: int, sizes: Sequence[int]) -> int:
    """The same random operations on random ordered subsets in all ranks, on two lanes."""
    numbers, stream = random.Random(seed), None
    lanes = [Operations(comm), Operations(comm.lane("migration"))]
    if comm.device.type == "cuda":
        stream = torch.cuda.Stream(comm.device)
    for key in range(length):
        ranks = tuple(numbers.sample(range(comm.world_size), numbers.randint(2, comm.world_size)))
        kind, lane, num_bytes = numbers.randrange(4), numbers.randrange(2), numbers.choice(list(sizes))
        if comm.rank not in ranks:
            continue
        operations = lanes[lane]
        group = operations.comm.group(ranks)
        with torch.cuda.stream(stream) if lane and stream else contextlib.nullcontext():
            if kind == 0:
                operations.all_gather(group, num_bytes, key)
            elif kind == 1:
                operations.all_to_all(group, even_rows(len(ranks), num_bytes), key)
            elif kind == 2:
                operations.broadcast(group, num_bytes, key)
            else:
                operations.send(ranks[0], ranks[1], num_bytes, key)
    return sum(operations.count for operations in lanes)


def even_rows(size: int, num_bytes: int) -> list[list[int]]:
    return [[num_bytes] * size for _ in range(size)]
