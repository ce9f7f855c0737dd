"""A head exchange as kernels take it: strides in bytes, and who has which heads and tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from gfdit.comm.choice import Choice, Path
from gfdit.comm.heads import HeadExchange
from gfdit.comm.places import Places
from gfdit.kernels import ulysses_exchange
from gfdit.kernels.launch import Launch, combined
from gfdit.kernels.members import ROW_WORDS, Members
from gfdit.kernels.ulysses_exchange import Strides

Tensors = Sequence[torch.Tensor]
Run = Callable[[int, Tensors, Tensors], None]


def is_even(heads: HeadExchange) -> bool:
    """Whether the exchange can be told without a table."""
    return len(set(heads.tokens)) == len(set(heads.units)) == 1


def edge_bytes(heads: HeadExchange, sender: int, receiver: int) -> int:
    """Bytes that travel between two positions."""
    tokens, units = (receiver, sender) if heads.gather else (sender, receiver)
    return heads.sources[0].shape[0] * heads.tokens[tokens] * heads.units[units] * sum(_unit_bytes(heads))


def fits(heads: HeadExchange, slot_bytes: int) -> bool:
    """Whether a row of every member fits into a data slot; the same answer in all members."""
    return max(heads.units) * sum(_unit_bytes(heads)) <= slot_bytes


def table_rows(heads: HeadExchange, ranks: tuple[int, ...], digests: list[int]) -> list[tuple[int, ...]]:
    """What the kernel's table says, by position."""
    columns = (ranks, heads.unit_offsets, heads.units, heads.token_offsets, heads.tokens, digests)
    return [(*fields, *(0,) * (ROW_WORDS - len(fields))) for fields in zip(*columns, strict=True)]


def largest_edge_bytes(heads: HeadExchange) -> int:
    """The most that any two members send each other, which all of them know."""
    positions = range(len(heads.tokens))
    return max((edge_bytes(heads, i, j) for i in positions for j in positions if i != j), default=0)


def fit_places(heads: HeadExchange, places: Places | None) -> bool:
    """Whether peers can put rows into place, or their places; the same answer in all members."""
    if places is None or combined(_unit_bytes(heads)) % 16:
        return False
    itemsize = heads.sources[0].element_size()
    return all(
        places.hold([math.prod(shape) * itemsize for shape in heads.output_shapes(position)])
        for position in range(len(heads.tokens))
    )


def plan_exchange(members: Members, heads: HeadExchange, choice: Choice) -> Run:
    """One launch through data slots, given its label, sources and targets like those of ``heads``.

    Where heads and head size of a tensor are not dense, it is copied around the launch.
    """
    launch = _plan_launch(members, heads, choice, heads.sources, heads.targets)
    dense_sources, dense_targets = ([_is_dense(x) for x in side] for side in (heads.sources, heads.targets))
    if all(dense_sources) and all(dense_targets):
        return lambda label, sources, targets: launch(label, _pairs(sources, targets))

    def run(label: int, sources: Tensors, targets: Tensors) -> None:
        given = [x if dense else x.contiguous() for x, dense in zip(sources, dense_sources, strict=True)]
        taken = [
            x if dense else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            for x, dense in zip(targets, dense_targets, strict=True)
        ]
        launch(label, _pairs(given, taken))
        _copy_others(targets, taken)

    return run


def plan_direct(members: Members, heads: HeadExchange, choice: Choice, places: Places, reach: range) -> Run:
    """One launch straight into targets whose addresses are within ``reach``, like ``plan_exchange``.

    Targets elsewhere, or of strides that kernels cannot take, are copied out of the spare place.
    """
    dtype, shapes = heads.sources[0].dtype, [target.shape for target in heads.targets]
    wide_sources, wide_targets = (all(map(_is_wide, side)) for side in (heads.sources, heads.targets))

    @functools.cache
    def launch(as_given: bool, into_targets: bool) -> Launch:
        sources = heads.sources if as_given else _dense(heads.sources)
        targets = heads.targets if into_targets else _dense(heads.targets)
        return _plan_launch(members, heads, choice, sources, targets)

    def run(label: int, sources: Tensors, targets: Tensors) -> None:
        pairs = _pairs(sources, targets)
        as_given, into_targets = wide_sources, wide_targets
        for source, target in pairs:
            as_given &= not source % 16
            into_targets &= reach.start <= target < reach.stop and not target % 16
        if as_given and into_targets:
            launch(True, True)(label, pairs)
            return
        if not as_given:
            sources = [source.clone(memory_format=torch.contiguous_format) for source in sources]
        taken = targets if into_targets else places.spare(shapes, dtype)
        launch(as_given, into_targets)(label, _pairs(sources, taken))
        _copy_others(targets, taken)

    return run


def _plan_launch(
    members: Members, heads: HeadExchange, choice: Choice, sources: Tensors, targets: Tensors
) -> Launch:
    strides = [
        Strides(*_strides(source), *_strides(target), unit_bytes)
        for source, target, unit_bytes in zip(sources, targets, _unit_bytes(heads), strict=True)
    ]
    return ulysses_exchange.plan(
        members,
        strides,
        batch=heads.sources[0].shape[0],
        units=heads.units[0],
        tokens=heads.tokens[0],
        token_stride=0 if heads.replicated else heads.tokens[0],
        gather=heads.gather,
        chunk_bytes=choice.chunk_bytes,
        num_programs=choice.num_programs,
        direct=choice.path is Path.DIRECT_PUSH,
    )


def _pairs(sources: Tensors, targets: Tensors) -> list[tuple[int, int]]:
    return [(source.data_ptr(), target.data_ptr()) for source, target in zip(sources, targets, strict=True)]


def _copy_others(targets: Tensors, taken: Tensors) -> None:
    for target, brought in zip(targets, taken, strict=True):
        if target is not brought:
            target.copy_(brought)


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether rows can be copied in pieces of 16 bytes, once the first one can."""
    return _is_dense(tensor) and combined(_strides(tensor)) % 16 == 0


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """Of batch and token in bytes, once the tensor is dense."""
    if not _is_dense(tensor):
        (tensor,) = _dense([tensor])
    return tensor.stride(0) * tensor.element_size(), tensor.stride(1) * tensor.element_size()


def _dense(tensors: Tensors) -> Tensors:
    """Of the same shapes, without memory."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]


def _unit_bytes(heads: HeadExchange) -> list[int]:
    return [
        heads.unit_heads(number) * source.shape[3] * source.element_size()
        for number, source in enumerate(heads.sources)
    ]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3]
