"""A DiT block of real dimensions at every degree, eager, compiled and captured, compared bit by bit.

Within a degree the reference computes the same pieces on tensors of the same shapes without sending anything, so
bits must be equal. Between degrees matrix products have other shapes, and may round in another way: there the
largest difference is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu import dit
from benchmarks.gpu.job import Job
from benchmarks.gpu.ranks import Where, one_by_one, same_bits, together
from benchmarks.gpu.shapes import FLUX, QWEN, WAN_480, Model
from benchmarks.gpu.timings import repeat, slowest, time_calls, time_once
from gfdit.comm import Group, GroupFreeComm
from gfdit.comm.measure import captured
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES

DEGREES = (1, 4, 2)
# How far results of bfloat16 may be from those of another degree, in the size of the largest: some roundings.
_CLOSE = 0.03
_REPEATS = 5
# Tracing is what can be checked without a GPU; code for one cannot be made.
_GPU_BACKEND, _CPU_BACKEND = "inductor", "aot_eager"


def run(job: Job) -> None:
    where = Where.of(job)
    models = (QWEN, WAN_480, FLUX) if where.on_gpu and not job.spec.quick else (WAN_480,)
    for compiled in (False, True):  # which takes longer
        for model in models:
            scaled = model if where.on_gpu else model.small()
            for degree in DEGREES if not job.spec.quick else (2,):
                name = f"{scaled.name}, {'compiled' if compiled else 'eager'}, degree {degree}"
                job.check(name, partial(_check, job, where, scaled, degree, compiled))


def _check(job: Job, where: Where, model: Model, degree: int, compiled: bool) -> str:
    rounds = job.spec.rounds if where.on_gpu else 1
    sizes = DEVICE_SIZES if where.on_gpu else where.sizes
    if compiled:
        torch._dynamo.reset()  # it keeps only so many shapes
    told = where.run(_rank, model, degree, compiled, rounds, num_ranks=degree, sizes=sizes)
    for way in told[0].seconds:
        times = slowest([entry.seconds[way] for entry in told])
        job.row(model=model.name, degree=degree, way=way, **times)
    far = max(entry.off_degree_1 for entry in told)
    if far > _CLOSE:
        raise AssertionError(f"off what degree 1 gives by {far:.3g} of its size")
    same = "bits of degree 1, too" if far == 0 else f"within {far:.2g} of degree 1"
    return f"bits of the reference in {', '.join(told[0].seconds)}; {same}"


@dataclass(frozen=True, slots=True)
class Told:
    """Of a rank: seconds of the block by way and round, and how far its result is from that of degree 1."""

    seconds: dict[str, list[float]]
    off_degree_1: float


class Ulysses:
    """Exchanges by group-free collectives."""

    def __init__(self, comm: GroupFreeComm, group: Group) -> None:
        self._comm, self._group = comm, group

    def scatter(self, heads: dit.Heads) -> Sequence[torch.Tensor]:
        return self._comm.scatter_heads(heads, self._group)

    def gather(self, attended: torch.Tensor) -> torch.Tensor:
        return self._comm.gather_heads(attended, self._group)


class Dry:
    """Nothing is sent: memory of the right shapes, so that all a block needs is loaded before any rank waits."""

    def __init__(self, degree: int) -> None:
        self._degree = degree

    def scatter(self, heads: dit.Heads) -> Sequence[torch.Tensor]:
        return [self._filled(x, 1, 2) for x in heads]

    def gather(self, attended: torch.Tensor) -> torch.Tensor:
        return self._filled(attended, 2, 1)

    def _filled(self, x: torch.Tensor, more: int, less: int) -> torch.Tensor:
        shape = list(x.shape)
        shape[more], shape[less] = shape[more] * self._degree, shape[less] // self._degree
        return x.new_zeros(shape)


@torch.no_grad()
def _rank(comm: GroupFreeComm, model: Model, degree: int, compiled: bool, rounds: int) -> Told:
    on_gpu, way, pieces = comm.device.type == "cuda", "eager", dit.EAGER
    if compiled:
        way, pieces = "compiled", dit.Pieces.compiled(_GPU_BACKEND if on_gpu else _CPU_BACKEND)
    weights = dit.Weights.random(model, comm.device, torch.bfloat16)
    angles, inputs = dit.angles_of(model, comm.device), [_input(model, comm.device, seed) for seed in range(2)]

    def prepare() -> list[torch.Tensor]:
        wanted = [dit.reference(x, weights, angles, degree, pieces)[comm.rank] for x in inputs]
        dit.block(inputs[0].chunk(degree, dim=1)[0], weights, angles.chunk(degree)[0], Dry(degree), pieces)
        return wanted

    # By one rank after the other: compiling is not made for threads, and loading may wait for whoever waits.
    wanted = one_by_one(comm, prepare)
    whole = one_by_one(comm, lambda: dit.reference(inputs[0], weights, angles, 1, dit.EAGER)[0])
    own = [x.chunk(degree, dim=1)[comm.rank].clone() for x in inputs]
    x, own_angles, group = own[0].clone(), angles.chunk(degree)[comm.rank], comm.group(range(degree))
    call = partial(dit.block, x, weights, own_angles, Ulysses(comm, group), pieces)
    together(comm)
    result = call()
    _compare(comm, result, wanted[0], way)
    off = (result.float() - whole.chunk(degree, dim=1)[comm.rank].float()).abs().max() / whole.abs().max()
    together(comm)
    seconds = {way: [time_once(comm, partial(repeat, call, _REPEATS)) / _REPEATS for _ in range(rounds)]}
    together(comm)
    if on_gpu:
        _replay(comm, call, x, own, wanted)
        seconds[f"{way}, captured"] = time_calls(comm, call, rounds, _REPEATS)
    return Told(seconds, float(off))


def _replay(
    comm: GroupFreeComm,
    call: Callable[[], torch.Tensor],
    x: torch.Tensor,
    own: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
) -> None:
    """One graph, replayed on one input after the other. Never run on a GPU."""
    results: list[torch.Tensor] = []
    graph = captured(lambda: results.append(call()), 1)
    together(comm)
    for number in (1, 0, 1):
        x.copy_(own[number])
        graph.replay()
        _compare(comm, results[0], wanted[number], "captured")
    together(comm)


def _input(model: Model, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(100 + seed)
    return torch.randn((1, model.tokens, model.width), generator=generator, device=device).to(torch.bfloat16)


def _compare(comm: GroupFreeComm, result: torch.Tensor, wanted: torch.Tensor, way: str) -> None:
    comm.synchronize()
    if not same_bits(result, wanted):
        off = float((result.float() - wanted.float()).abs().max())
        raise AssertionError(f"rank {comm.rank}, {way}: other bits than the reference, by up to {off:.3g}")
