"""Ulysses' exchanges at the shapes of published models, compared bit by bit and timed.

Against what does the same without being folded with its permutes: copies, an all-to-all, copies. And against the
device's copy rate, for the bytes that have to be read and written once at least, by all ranks that share a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.ranks import Where, same_bits, together
from benchmarks.gpu.shapes import FLUX, QWEN, WAN_720, Model
from benchmarks.gpu.timings import repeat, slowest, time_calls, time_once
from gfdit.comm import Group, GroupFreeComm
from gfdit.comm.choice import Choice, Situation
from gfdit.comm.heap import Operation
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES

# Of one measurement: as many exchanges as move these bytes, within limits.
_VOLUME_BYTES, _FEWEST, _MOST = 8 << 30, 3, 50
# Candidates worth the time: exchanges of this size want many programs.
_FEWEST_PROGRAMS = 8


def run(job: Job) -> None:
    where = Where.of(job)
    for group_size in (4, 2):
        for model in (QWEN, WAN_720, FLUX) if where.on_gpu and not job.spec.quick else (QWEN,):
            scaled = model if where.on_gpu else model.small()
            job.check(f"{scaled.name}, {group_size} ranks", partial(_check, job, where, scaled, group_size))


def _check(job: Job, where: Where, model: Model, group_size: int) -> str:
    sizes = where.sizes
    if where.on_gpu:
        # Outputs go into places: three tensors, and what they are aligned by.
        place_bytes = 3 * model.tokens * model.width // group_size * 2 + 4096
        sizes = DEVICE_SIZES | {"place_bytes": max(DEVICE_SIZES["place_bytes"], -(-place_bytes // 4096) * 4096)}
    rounds = job.spec.rounds if where.on_gpu else 1
    by_rank = where.run(_rank, model, rounds, num_ranks=group_size, sizes=sizes)
    cases = [
        (entries[0].label, entries[0].num_bytes, slowest([entry.seconds for entry in entries]))
        for entries in zip(*by_rank, strict=True)
    ]
    copy_us = {num_bytes: times["us"] for label, num_bytes, times in cases if label["way"] == "device copy"}
    shared = group_size if where.heap == "local" else 1
    best: dict[str, dict[str, Any]] = {}
    for label, num_bytes, times in cases:
        fields = {"model": model.name, "ranks": group_size} | label | times
        # What all ranks of a device read and write, in the time of a copy of as many bytes.
        share = copy_us[num_bytes] * shared / times["us"] if label["way"] != "device copy" else 1.0
        job.row(**fields, of_copy_rate=round(share, 3))
        exchange = label["exchange"]
        if label["way"] not in ("device copy", "unfused copies"):
            best[exchange] = min(best.get(exchange, fields), fields, key=lambda entry: entry["us"])
        elif label["way"] == "unfused copies":
            best[f"{exchange}, unfused"] = min(
                best.get(f"{exchange}, unfused", fields), fields, key=lambda entry: entry["us"]
            )
    if not where.on_gpu:
        return f"{len(cases)} cases"
    return "; ".join(f"{name}: {fields['us']:.0f} us" for name, fields in best.items())


@dataclass(frozen=True, slots=True)
class Timed:
    """``num_bytes``: of this rank's tensors, before or after. ``seconds`` of one exchange, by round."""

    label: dict[str, Any]
    num_bytes: int
    seconds: list[float]


def _rank(comm: GroupFreeComm, model: Model, rounds: int) -> list[Timed]:
    group = comm.group(range(comm.world_size))
    parts = [Parts.of(comm, model, position) for position in range(len(group))]
    told: list[Timed] = []
    for gather in (False, True):
        wanted = _gathered(parts, group.index) if gather else _scattered(parts, group.index)
        given = [_scattered(parts, group.index)[0]] if gather else parts[group.index].tensors
        together(comm)
        told += _direction(comm, group, gather, given, wanted, rounds)
    return told


@dataclass(frozen=True, slots=True)
class Parts:
    """Query, key and value of one rank's tokens, (1, L, H, D) bfloat16; on every rank the same."""

    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, comm: GroupFreeComm, model: Model, position: int) -> Parts:
        generator = torch.Generator(comm.device).manual_seed(1 + position)
        shape = (1, model.tokens // comm.world_size, model.heads, model.head_size)
        options: dict[str, Any] = {"generator": generator, "device": comm.device, "dtype": torch.bfloat16}
        return cls([torch.randn(shape, **options) for _ in range(3)])


def _scattered(parts: Sequence[Parts], index: int) -> list[torch.Tensor]:
    """The own heads of all tokens."""
    size = len(parts)
    columns = zip(*(part.tensors for part in parts), strict=True)
    return [torch.cat([x.chunk(size, dim=2)[index] for x in column], dim=1) for column in columns]


def _gathered(parts: Sequence[Parts], index: int) -> list[torch.Tensor]:
    """All heads of the own tokens: of the queries, which take the place of attention's output."""
    return [parts[index].tensors[0]]


def _direction(
    comm: GroupFreeComm,
    group: Group,
    gather: bool,
    given: list[torch.Tensor],
    wanted: list[torch.Tensor],
    rounds: int,
) -> list[Timed]:
    name = "gather" if gather else "scatter"
    num_bytes = sum(x.nbytes for x in given)
    repeats = max(_FEWEST, min(_MOST, _VOLUME_BYTES // (num_bytes * comm.world_size)))
    if comm.device.type != "cuda":
        repeats = 1
    told = []

    def timed(way: str, call: Callable[[], Sequence[torch.Tensor]], choice: Choice | None, eager: bool) -> None:
        with comm.selector.forced(choice) if comm.selector else nullcontext():
            got = call()
            comm.synchronize()
            if not all(same_bits(x, y) for x, y in zip(got, wanted, strict=True)):
                raise AssertionError(f"rank {comm.rank}: wrong bytes, {name} by {way}")
            del got
            together(comm)
            label = {"exchange": name, "way": way}
            if eager:
                seconds = [time_once(comm, partial(repeat, call, repeats)) / repeats for _ in range(rounds)]
                told.append(Timed(label | {"launched": "one by one"}, num_bytes, seconds))
                together(comm)
            seconds = time_calls(comm, call, rounds, repeats)
            told.append(Timed(label | {"launched": "in a graph"}, num_bytes, seconds))

    exchange = partial(_exchange, comm, group, gather, given)
    timed("as chosen", exchange, None, True)
    for choice in _choices(comm, group, gather, num_bytes):
        timed(str(choice), exchange, choice, False)
    timed("unfused copies", partial(_unfused, comm, group, gather, given), None, True)
    label = {"exchange": name, "way": "device copy", "launched": "one by one"}
    told.append(Timed(label, num_bytes, _copy_seconds(comm, num_bytes, rounds)))
    return told


def _choices(comm: GroupFreeComm, group: Group, gather: bool, num_bytes: int) -> list[Choice]:
    """On a GPU every way there is, with several numbers of programs where they run at once."""
    if comm.selector is None or comm.device.type != "cuda":
        return []
    operation = Operation.GATHER_HEADS if gather else Operation.SCATTER_HEADS
    situation = Situation(operation, len(group), num_bytes // len(group), target_in_heap=True)
    candidates = comm.selector.candidates(situation)
    of_path = {choice.path: choice.num_programs for choice in sorted(candidates, key=lambda c: c.num_programs)}
    return [
        choice
        for choice in candidates
        if choice.num_programs >= _FEWEST_PROGRAMS or choice.num_programs == of_path[choice.path]
    ]


def _exchange(
    comm: GroupFreeComm, group: Group, gather: bool, given: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    return [comm.gather_heads(given[0], group)] if gather else comm.scatter_heads(given, group)


def _unfused(comm: GroupFreeComm, group: Group, gather: bool, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same by copies around an all-to-all for each tensor, as without kernels of one's own."""
    size, results = len(group), []
    for x in given:
        batch, tokens, heads, head_size = x.shape
        if gather:
            packed = x.view(batch, size, tokens // size, heads, head_size).transpose(0, 1).contiguous()
        else:
            packed = x.view(batch, tokens, size, heads // size, head_size).permute(2, 0, 1, 3, 4).contiguous()
        arrived = torch.empty_like(packed)
        comm.all_to_all_single(arrived.view(-1), packed.view(-1), group)
        if gather:
            back = arrived.permute(1, 2, 0, 3, 4).reshape(batch, tokens // size, size * heads, head_size)
        else:
            back = arrived.transpose(0, 1).reshape(batch, size * tokens, heads // size, head_size)
        results.append(back)
    return results


def _copy_seconds(comm: GroupFreeComm, num_bytes: int, rounds: int) -> list[float]:
    """Of as many bytes as a rank has, by rank 0 alone."""
    seconds = []
    if comm.rank == 0:
        x = torch.ones(num_bytes, dtype=torch.uint8, device=comm.device)
        out = torch.empty_like(x)
        out.copy_(x)
        comm.synchronize()
        seconds = [time_once(comm, lambda: repeat(lambda: out.copy_(x), 10)) / 10 for _ in range(rounds)]
    together(comm)
    return seconds
