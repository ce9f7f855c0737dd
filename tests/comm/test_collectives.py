"""Every operation over every ordered subset of four ranks, against results put together from the inputs."""

from __future__ import annotations

import itertools

import pytest
import torch

from gfdit.comm import Group, GroupFreeComm
from tests.comm.worlds import random_bytes, random_tensor, run_ranks, same_bits, stale

WORLD_SIZE = 4
SLOT_BYTES = 4096
ALL_GROUPS = [
    ranks for size in range(1, WORLD_SIZE + 1) for ranks in itertools.permutations(range(WORLD_SIZE), size)
]
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


def check_all_gather(comm: GroupFreeComm, group: Group, shape: tuple[int, ...], dtype, key: int) -> None:
    inputs = {rank: random_tensor(shape, dtype, key, rank) for rank in group.ranks}
    out = stale((len(group) * shape[0], *shape[1:]), dtype)
    comm.all_gather_into_tensor(out, inputs[comm.rank], group)
    assert same_bits(out, torch.cat([inputs[rank] for rank in group.ranks])), (group, shape, dtype)


def check_all_to_all(comm: GroupFreeComm, group: Group, rows: int, width: int, dtype, key: int) -> None:
    shape = (rows * len(group), width)
    inputs = {rank: random_tensor(shape, dtype, key, rank) for rank in group.ranks}
    out = stale(shape, dtype)
    comm.all_to_all_single(out, inputs[comm.rank], group)
    begin = group.index * rows
    expected = torch.cat([inputs[rank][begin : begin + rows] for rank in group.ranks])
    assert same_bits(out, expected), (group, shape, dtype)


def check_uneven_all_to_all(comm: GroupFreeComm, group: Group, key: int) -> None:
    """rows[i][j] rows go from position i to position j; some pairs exchange nothing, some several slots."""
    choices = [0, 1, 5, 300, 0, 2000]
    picks = random_bytes(len(group) ** 2, key, 99).tolist()
    rows = [[choices[picks[i * len(group) + j] % 6] for j in range(len(group))] for i in range(len(group))]
    width = 3
    inputs = [random_tensor((sum(rows[i]), width), torch.int32, key, i) for i in range(len(group))]
    me = group.index
    received = [rows[i][me] for i in range(len(group))]
    out = stale((sum(received), width), torch.int32)
    comm.all_to_all_single(out, inputs[me], group, received, rows[me])
    expected = torch.cat([torch.split(inputs[i], rows[i])[me] for i in range(len(group))])
    assert same_bits(out, expected), (group, rows)


def check_broadcast(comm: GroupFreeComm, group: Group, num_bytes: int, key: int) -> None:
    for src in group.ranks:
        payload = random_bytes(num_bytes, key, src)
        x = payload.clone() if src == comm.rank else stale((num_bytes,), torch.uint8)
        comm.broadcast(x, src, group)
        assert same_bits(x, payload), (group, src)


def check_all_reduce(comm: GroupFreeComm, group: Group, num_elements: int, dtype, key: int) -> None:
    def value(rank: int) -> torch.Tensor:
        if dtype.is_floating_point:
            generator = torch.Generator().manual_seed(key * 10 + rank)
            return torch.randn(num_elements, generator=generator).to(dtype)
        return random_tensor((num_elements,), torch.uint8, key, rank).to(dtype)

    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = torch.zeros(num_elements, dtype=wide)
    for rank in group.ranks:
        total = total + value(rank).to(wide)
    x = value(comm.rank)
    comm.all_reduce(x, group)
    # -0.0 + 0.0 is the one difference between starting from zero and from the first member.
    assert torch.equal(x, total.to(dtype)), (group, num_elements, dtype)


def all_ordered_subsets(comm: GroupFreeComm) -> int:
    for key, ranks in enumerate(ALL_GROUPS):
        if comm.rank not in ranks:
            continue
        group = comm.group(ranks)
        comm.barrier(group)
        check_all_gather(comm, group, (3, 5), torch.float32, key)
        check_all_to_all(comm, group, 2, 700, torch.bfloat16, key)
        check_uneven_all_to_all(comm, group, key)
        check_broadcast(comm, group, 4096 + 257 * (key % 7), key)
        check_all_reduce(comm, group, 100 + key, torch.float32, key)
    return len(ALL_GROUPS)


def odd_sizes(comm: GroupFreeComm) -> None:
    sizes = [0, 1, 5, 7, 63, 64, 65, 4095, 4096, 4097, 8192, 12345, *(4096 + 257 * k for k in range(1, 12, 3))]
    for key, num_bytes in enumerate([*sizes, 1_000_003]):
        for ranks in [(0, 1, 2, 3), (3, 1), (2, 0, 1)]:
            if comm.rank not in ranks:
                continue
            group = comm.group(ranks)
            check_all_gather(comm, group, (num_bytes,), torch.uint8, key)
            check_all_to_all(comm, group, num_bytes, 1, torch.uint8, key)
            check_broadcast(comm, group, num_bytes, key)
            check_all_reduce(comm, group, num_bytes // 4, torch.int32, key)


def all_dtypes(comm: GroupFreeComm) -> None:
    group = comm.group((2, 0, 3, 1))
    for key, dtype in enumerate(DTYPES):
        check_all_gather(comm, group, (7, 3), dtype, key)
        check_all_to_all(comm, group, 3, 1001, dtype, key)
        x = random_tensor((50, 3), dtype, key) if comm.rank == 3 else stale((50, 3), dtype)
        comm.broadcast(x, 3, group)
        assert same_bits(x, random_tensor((50, 3), dtype, key))
    summable = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    for key, dtype in enumerate(summable):
        for num_elements in (1, 33, 50_001, 300_000):
            check_all_reduce(comm, group, num_elements, dtype, key)


def large_messages(comm: GroupFreeComm) -> None:
    if comm.rank in (1, 3):
        group = comm.group((1, 3))
        check_all_to_all(comm, group, 1000, 1031, torch.float32, 1)
        check_broadcast(comm, group, 5 * 2**20 + 3, 2)


def strided_inputs(comm: GroupFreeComm) -> None:
    group = comm.group(range(WORLD_SIZE))
    everyone = [torch.arange(4 * 6 * 5).view(4, 6, 5) * 10 + rank for rank in range(WORLD_SIZE)]
    views = [x.permute(2, 0, 1)[:, :, ::2] for x in everyone]
    mine = views[comm.rank]
    assert not mine.is_contiguous()
    out = torch.empty(4 * 5, 4, 3, dtype=torch.int64)
    comm.all_gather_into_tensor(out, mine, group)
    assert torch.equal(out, torch.cat(views))
    columns = [x.view(4, 30).t()[:8] for x in everyone]
    out = torch.empty(8, 4, dtype=torch.int64)
    comm.all_to_all_single(out, columns[comm.rank], group)
    assert torch.equal(out, torch.cat([c[2 * group.index : 2 * group.index + 2] for c in columns]))
    x = everyone[comm.rank].clone().permute(2, 0, 1)
    comm.all_reduce(x, group)
    assert torch.equal(x, sum(everyone).permute(2, 0, 1))
    if comm.rank == 0:
        comm.send(columns[0], 1)
    elif comm.rank == 1:
        out = torch.empty(8, 4, dtype=torch.int64)
        comm.recv(out, 0)
        assert torch.equal(out, columns[0])


def gather_forms(comm: GroupFreeComm) -> None:
    group = comm.group((3, 2, 1, 0))
    stacked = torch.empty(4, 2, 3)
    comm.all_gather_into_tensor(stacked, torch.full((2, 3), float(comm.rank)), group)
    assert stacked[:, 0, 0].tolist() == [3, 2, 1, 0]
    scalars = torch.empty(4)
    comm.all_gather_into_tensor(scalars, torch.tensor(float(comm.rank)), group)
    assert scalars.tolist() == [3, 2, 1, 0]
    in_place = torch.full((4 * 5000,), -1)
    own = in_place.view(4, 5000)[group.index]
    own.fill_(comm.rank)
    comm.all_gather_into_tensor(in_place, own, group)
    assert in_place.view(4, 5000)[:, 4999].tolist() == [3, 2, 1, 0]


def group_of_one(comm: GroupFreeComm) -> None:
    alone = comm.group((comm.rank,))
    comm.barrier(alone)
    x = torch.arange(10_000) + comm.rank
    for move in (comm.all_gather_into_tensor, comm.all_to_all_single):
        out = torch.empty_like(x)
        move(out, x, alone)
        assert torch.equal(out, x)
    y = x.clone()
    comm.all_reduce(y, alone)
    comm.broadcast(y, comm.rank, alone)
    assert torch.equal(y, x)


def buffers_are_reused(comm: GroupFreeComm) -> None:
    """The same tensors again and again, each time with other bytes: an old chunk would show."""
    group = comm.group((1, 0, 2, 3))
    x, out = torch.empty(4, 3001, dtype=torch.int32), torch.empty(4, 3001, dtype=torch.int32)
    for step in range(60):
        x.copy_(torch.arange(4).view(4, 1) + 100 * comm.rank + 10_000 * step)
        comm.all_to_all_single(out, x, group)
        x.fill_(-1)  # the operation returned, so the input is ours again
        expected = torch.tensor([group.index + 100 * rank + 10_000 * step for rank in group.ranks])
        assert torch.equal(out, expected.to(torch.int32).view(4, 1).expand(4, 3001)), step


@pytest.mark.parametrize(
    "check",
    [
        all_ordered_subsets,
        odd_sizes,
        all_dtypes,
        large_messages,
        strided_inputs,
        gather_forms,
        group_of_one,
        buffers_are_reused,
    ],
)
def test_results(check) -> None:
    run_ranks(check, WORLD_SIZE, slot_bytes=SLOT_BYTES)


def many_summands(comm: GroupFreeComm) -> torch.Tensor:
    group = comm.group((2, 0, 1))
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(comm.rank)) * 10.0**comm.rank
    comm.all_reduce(x, group)
    return x


def test_all_reduce_gives_every_member_the_same_bits() -> None:
    results = run_ranks(many_summands, 3)
    assert all(same_bits(results[0], other) for other in results[1:])


def mistakes(comm: GroupFreeComm) -> list[str]:
    """Every mistake is refused before anything is communicated: the barrier after each one still agrees."""
    group = comm.group((0, 1))
    x, wide, strided = torch.zeros(4, 2), torch.zeros(8, 2), torch.zeros(2, 8).t()
    attempts = [
        lambda: comm.group((0, 0, 1)),
        lambda: comm.group((0, 1, 2)),
        lambda: comm.group((1 - comm.rank,)),
        lambda: comm.group((-1, 0, 1)),
        lambda: comm.all_gather_into_tensor(x, x, group),
        lambda: comm.all_gather_into_tensor(wide.double(), x, group),
        lambda: comm.all_gather_into_tensor(strided, x, group),
        lambda: comm.all_gather_into_tensor(wide.to("meta"), x, group),
        lambda: comm.all_to_all_single(torch.zeros(3, 2), torch.zeros(3, 2), group),
        lambda: comm.all_to_all_single(torch.zeros(4, 2), x, group, [2, 2], [3, 2]),
        lambda: comm.all_to_all_single(torch.zeros(4, 2), x, group, [5, -1], [2, 2]),
        lambda: comm.all_to_all_single(torch.zeros(4, 2), x, group, [4], [2, 2]),
        lambda: comm.all_to_all_single(torch.zeros(4, 3), x, group),
        lambda: comm.all_to_all_single(torch.zeros(()), torch.zeros(()), group),
        lambda: comm.all_to_all_single(torch.zeros(4, 2), x, group, [[1, 3], [3, 1]][comm.rank], [2, 2]),
        lambda: comm.all_to_all_single(x, x, group),
        lambda: comm.broadcast(x, 2, group),
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.bool), group),
        lambda: comm.all_reduce(torch.zeros(3).to(torch.float8_e4m3fn), group),
        lambda: comm.send(x, comm.rank),
        lambda: comm.send(x, 2),
        lambda: comm.recv(strided, 1 - comm.rank),
        lambda: comm.barrier(Group((1 - comm.rank,), 0, 0, ())),
        lambda: comm.lane("other"),
        lambda: comm.abort((7,)),
        lambda: comm.reset((7,)),
        lambda: GroupFreeComm(comm._heap),
        lambda: GroupFreeComm(comm._heap, timeout_s=0),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        messages.append(str(caught.value))
        comm.barrier(group)
    return messages


def test_mistakes_are_value_errors_and_reach_nobody() -> None:
    messages = run_ranks(mistakes, 2)[0]
    assert all(message and "\n" not in message for message in messages)
    assert any("compute, migration" in message for message in messages)
