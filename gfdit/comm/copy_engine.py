"""Exchanges whose bytes are moved by plain device copies, which a GPU gives to its copy engines.

Each rank copies what it sends into its export area. A barrier says that all have; each copies its parts out of the
peers' areas; another barrier says that all have done so and the areas are free again. In rounds, if an area is
smaller than what it has to hold. No multiprocessor works while the bytes travel, so compute on other streams goes
on undisturbed; the price is two barriers, and every copy is an operation of the stream.

Heads go, row by row, into the peers' spare places, between two barriers as well, and out of the own one: nobody
has to say where the outputs are, and the engines copy blocks of rows as they are.

After a failed barrier the copies still run, from areas that hold anything; the operation raises, and its edges
refuse work until a reset.

Reference: ``HostTransport.exchange``. Range: messages of megabytes beside compute. Never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gfdit.comm.choice import Site, Situation
from gfdit.comm.exchange import Exchange
from gfdit.comm.heads import HeadExchange
from gfdit.comm.heap import KernelHeap
from gfdit.comm.places import spare_of
from gfdit.comm.strided_copy import copy_rows
from gfdit.kernels import barrier
from gfdit.kernels.members import Members


def copy_engine_obstacle(situation: Situation, site: Site) -> str | None:
    if situation.num_bytes is None:
        return "only some members know how much the others exchange"
    if site.layout.export_bytes < 16 * situation.group_size:
        return f"the heap has {site.layout.export_bytes} export_bytes"
    return None


def copy_engine(exchange: Exchange) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
    num_bytes = exchange.call.num_bytes
    assert num_bytes is not None  # copy_engine_obstacle
    members, parts = exchange.members, exchange.parts
    rank, size = exchange.heap.rank, members.size
    area_stride, area_bytes = exchange.export_areas()
    others = [(members.index + distance) % size for distance in range(1, size)]
    pieces = {position: parts[members.ranks[position]] for position in others if members.ranks[position] in parts}
    meet, own = barrier.plan(members), parts.get(rank)

    def run(label: int, source: torch.Tensor, target: torch.Tensor) -> None:
        source, target = _bytes(source), _bytes(target)
        if own is not None and own.send_bytes:
            _copy(target[own.recv_offset :], source[own.send_offset : own.send_offset + own.send_bytes])
        for begin in range(0, max(num_bytes, 1), area_bytes):
            area = exchange.export_area(rank)
            for position, piece in pieces.items():
                count = min(piece.send_bytes - begin, area_bytes)
                # What is the same for everybody is put there once.
                if count > 0 and (area_stride or position == others[0]):
                    first = piece.send_offset + begin
                    _copy(area[position * area_stride :], source[first : first + count])
            meet(label)
            for position, piece in reversed(pieces.items()):
                count = min(piece.recv_bytes - begin, area_bytes)
                if count > 0:
                    area = exchange.export_area(members.ranks[position])[members.index * area_stride :]
                    _copy(target[piece.recv_offset + begin :], area[:count])
            meet(label)

    return run


def copy_heads(
    members: Members, heads: HeadExchange, heap: KernelHeap
) -> Callable[[int, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]:
    """Given its label, sources and targets like those of ``heads``, whose dense outputs fit into a place."""
    meet, me, size = barrier.plan(members), members.index, members.size
    dtype, on_gpu = heads.sources[0].dtype, heap.device.type == "cuda"

    def run(label: int, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(heap.device).cuda_stream if on_gpu else None
        dense = [source if source[0, 0].is_contiguous() else source.contiguous() for source in sources]
        given = replace(heads, sources=tuple(dense), targets=tuple(targets))
        meet(label)
        for distance in range(1, size):
            position = (me + distance) % size
            spare = spare_of(heap, members.ranks[position], heads.output_shapes(position), dtype)
            there = replace(heads, targets=spare).parts(me, outgoing=False)
            for target, source in zip(there, given.parts(position, outgoing=True), strict=True):
                copy_rows(target, source, stream)
        meet(label)
        spare = spare_of(heap, heap.rank, heads.output_shapes(me), dtype)
        for position in range(size):
            if position == me:
                brought = given.parts(me, outgoing=True)
            else:
                brought = replace(heads, targets=spare).parts(position, outgoing=False)
            for target, source in zip(given.parts(position, outgoing=False), brought, strict=True):
                target.copy_(source)

    return run


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """All of ``source`` to the begin of ``target``; nothing if it is there already."""
    if target.data_ptr() != source.data_ptr():
        target[: source.nbytes].copy_(source, non_blocking=True)
