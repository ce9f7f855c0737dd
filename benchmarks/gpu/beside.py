"""What a migration and a ring cost a matrix product that runs meanwhile, and what it costs them.

One rank multiplies matrices on its stream; on another stream and the migration lane bytes travel to or from it.
Both are timed alone and together. Then attention whose keys go round a ring, against attention to all at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.ranks import Where, random_bytes, same_bits, together
from benchmarks.gpu.shapes import QWEN, Model
from benchmarks.gpu.timings import repeat, slowest, time_calls
from gfdit.comm import GroupFreeComm
from gfdit.comm.cuda_setup import new_stream
from gfdit.comm.ring_attention import Block, attend, ring_attention
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES

# Of a product of square matrices in bfloat16, and of one transfer: latents of a video.
GPU_EXTENT, GPU_BYTES, GPU_PRODUCTS = 8192, 64 << 20, 30
CPU_EXTENT, CPU_BYTES, CPU_PRODUCTS = 64, 5000, 3
_MOST_TRANSFERS = 400
# Rounded to bfloat16 block by block; outputs of magnitude 1.
_CLOSE = 0.03


def run(job: Job) -> None:
    where = Where.of(job)
    for worker, name in ((0, "sends"), (1, "receives")):
        job.check(f"product on the rank that {name}", partial(_products, job, where, worker, name, False))
    job.check("product beside a ring's passes", partial(_products, job, where, 0, "passes on", True))
    job.check("ring attention", partial(_ring, job, where))
    job.check("migration from layout to layout", lambda: _migration(job, where))


def _products(job: Job, where: Where, worker: int, name: str, ring: bool) -> str:
    rounds = job.spec.rounds if where.on_gpu else 1
    sizes = DEVICE_SIZES if where.on_gpu else where.sizes
    told = where.run(_beside, worker, ring, rounds, num_ranks=2, sizes=sizes)[worker]
    label = {"rank": name, "transfers": told.num_transfers, "products": told.num_products}
    job.row(**label, **told.milliseconds, **told.slowdowns)
    if not where.on_gpu:
        return "bytes right, one after the other"
    return f"bytes right; the product takes {told.slowdowns['product slow-down']:.2f} x as long beside it"


@dataclass(frozen=True, slots=True)
class Beside:
    """Of the rank that multiplies: medians over the rounds."""

    num_products: int
    num_transfers: int
    milliseconds: dict[str, float]
    slowdowns: dict[str, float]


def _beside(comm: GroupFreeComm, worker: int, ring: bool, rounds: int) -> Beside:
    on_gpu = comm.device.type == "cuda"
    extent, num_bytes = (GPU_EXTENT, GPU_BYTES) if on_gpu else (CPU_EXTENT, CPU_BYTES)
    num_products = GPU_PRODUCTS if on_gpu else CPU_PRODUCTS
    lane, stream = comm.lane("migration"), new_stream(comm.device) if on_gpu else None
    together(comm)
    generator = torch.Generator(comm.device).manual_seed(comm.rank)
    a, b = (torch.randn(extent, extent, generator=generator, device=comm.device).bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    transfer, verify = (_passes if ring else _sends)(lane, num_bytes)
    products = partial(torch.mm, a, b, out=c)
    products()
    _wait(comm, stream)
    together(comm)
    with _on(stream):
        transfer()
    _wait(comm, stream)
    verify()
    comm.check()
    together(comm)

    def timed(num_transfers: int, multiplies: bool) -> tuple[float, float]:
        """Milliseconds of products and of transfers."""
        together(comm)
        main, side = _Span(comm.device), _Span(comm.device)
        with _on(stream), side:
            repeat(transfer, num_transfers)
        with main:
            if multiplies and comm.rank == worker:
                repeat(products, num_products)
        _wait(comm, stream)
        lane.check()
        return main.milliseconds(), side.milliseconds()

    alone = [timed(0, True)[0] for _ in range(rounds)]
    one_transfer = median(timed(3, False)[1] / 3 for _ in range(rounds))
    # As many as last about as long as the products: the same number in both ranks, told by the one that sends.
    number = torch.tensor([median(alone) / max(one_transfer, 1e-3)], dtype=torch.float64, device=comm.device)
    comm.broadcast(number, worker, comm.group((worker, 1 - worker)))
    comm.synchronize()
    num_transfers = max(2, min(_MOST_TRANSFERS, round(float(number)))) if on_gpu else 2
    beside = [timed(num_transfers, True) for _ in range(rounds)]
    transfers_alone = median(timed(num_transfers, False)[1] for _ in range(rounds))
    verify()
    products_ms, transfers_ms = (median(column) for column in zip(*beside, strict=True))
    return Beside(
        num_products,
        num_transfers,
        {
            "products ms": median(alone),
            "beside ms": products_ms,
            "transfers ms": transfers_alone,
            "transfers beside ms": transfers_ms,
            "GB/s": num_transfers * num_bytes / max(transfers_alone, 1e-9) / 1e6,
        },
        {
            "product slow-down": products_ms / max(median(alone), 1e-9),
            "transfer slow-down": transfers_ms / max(transfers_alone, 1e-9),
        },
    )


def _sends(lane: GroupFreeComm, num_bytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """What a migration's large pieces are: broadcasts, from rank 0 to rank 1; and whether it has come."""
    group, wanted = lane.group((0, 1)), random_bytes(lane.device, num_bytes, 3)
    x = wanted.clone() if lane.rank == 0 else torch.zeros_like(wanted)

    def verify() -> None:
        if not same_bits(x, wanted):
            raise AssertionError(f"rank {lane.rank}: other bytes have come")

    return lambda: lane.broadcast(x, 0, group), verify


def _passes(lane: GroupFreeComm, num_bytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """What a ring does between two blocks of keys: everybody sends to the next and receives from the last."""
    group, size = lane.group((0, 1)), 2
    blocks = [random_bytes(lane.device, num_bytes, 4, rank) for rank in range(size)]
    x, out = blocks[lane.rank], torch.zeros_like(blocks[0])
    forth = [num_bytes if position != lane.rank else 0 for position in range(size)]

    def verify() -> None:
        if not same_bits(out, blocks[1 - lane.rank]):
            raise AssertionError(f"rank {lane.rank}: another block has come")

    return lambda: lane.all_to_all_single(out, x, group, forth, forth), verify


class _Span:
    """Time on the current stream, or on the host where there is none."""

    def __init__(self, device: torch.device) -> None:
        kind: Any = torch.cuda.Event if device.type == "cuda" else _HostEvent
        self._ends = [kind(enable_timing=True) for _ in range(2)]

    def __enter__(self) -> None:
        self._ends[0].record()

    def __exit__(self, *_: object) -> None:
        self._ends[1].record()

    def milliseconds(self) -> float:
        return float(self._ends[0].elapsed_time(self._ends[1]))


class _HostEvent:
    """As CUDA's, by the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _HostEvent) -> float:
        return 1e3 * (end._seconds - self._seconds)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(comm: GroupFreeComm, stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        stream.synchronize()
    comm.synchronize()


def _ring(job: Job, where: Where) -> str:
    model = QWEN if where.on_gpu else QWEN.small()
    sizes = DEVICE_SIZES if where.on_gpu else where.sizes
    rounds = job.spec.rounds if where.on_gpu else 1
    told = where.run(_ring_rank, model, rounds, num_ranks=4, sizes=sizes)
    for way in told[0][1]:
        job.row(model=model.name, degree=4, way=way, **slowest([times[way] for _, times in told]))
    off = max(off for off, _ in told)
    if off > _CLOSE:
        raise AssertionError(f"off attention to all keys at once by {off:.3g}")
    return f"within {off:.2g} of attention to all keys at once"


@torch.no_grad()
def _ring_rank(comm: GroupFreeComm, model: Model, rounds: int) -> tuple[float, dict[str, list[float]]]:
    group = comm.group(range(4))
    whole = [_heads(model, comm.device, seed) for seed in range(3)]
    query, key, value = (x.chunk(4, dim=1)[comm.rank].contiguous() for x in whole)
    scale = model.head_size**-0.5
    # All shapes once, before any rank waits for another one.
    at_once = attend(query, Block(whole[1], whole[2]), scale).output
    attend(query, Block(key, value), scale).merged(attend(query, Block(key, value), scale))
    comm.synchronize()
    together(comm)

    def ring() -> torch.Tensor:
        return ring_attention(comm, group, query, key, value, scale=scale)

    off = float((ring().float() - at_once).abs().max())
    comm.synchronize()
    together(comm)
    repeats = 10 if comm.device.type == "cuda" else 1
    times = {"ring": time_calls(comm, ring, rounds, repeats)}
    local = partial(attend, query, Block(whole[1], whole[2]), scale)
    times["all keys at once, no ring"] = time_calls(comm, local, rounds, repeats)
    return off, times


def _heads(model: Model, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(50 + seed)
    shape = (1, model.tokens, model.heads, model.head_size)
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def _migration(job: Job, where: Where) -> str:
    try:
        from benchmarks.gpu.migrations import MOVES, migration_rank
    except ImportError as error:
        return f"not run: {error}"
    num_bytes = GPU_BYTES if where.on_gpu else CPU_BYTES
    sizes = DEVICE_SIZES if where.on_gpu else where.sizes
    rounds = job.spec.rounds if where.on_gpu else 1
    moves: Sequence[str] = list(MOVES)
    told = where.run(migration_rank, num_bytes, rounds, num_ranks=4, sizes=sizes)
    for index, move in enumerate(moves):
        times = slowest([by_rank[index] for by_rank in told])
        job.row(migration=move, megabytes=num_bytes / 1e6, **times)
    return f"{len(moves)} ways, whole: metadata, new tensors, bytes compared"
