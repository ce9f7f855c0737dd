"""A head exchange as kernels take it: strides in bytes, and who has which heads and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gfdit.comm.choice import Choice
from gfdit.comm.heads import HeadExchange
from gfdit.kernels import ulysses_exchange
from gfdit.kernels.members import ROW_WORDS, Members
from gfdit.kernels.ulysses_exchange import Strides


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


def plan_exchange(
    members: Members, heads: HeadExchange, choice: Choice
) -> Callable[[int, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]:
    """One launch, given its label, sources and targets like those of ``heads``.

    Where heads and head size of a tensor are not dense, it is copied around the launch.
    """
    dense_sources, dense_targets = ([_is_dense(x) for x in side] for side in (heads.sources, heads.targets))
    strides = [
        Strides(*_strides(source), *_strides(target), unit_bytes)
        for source, target, unit_bytes in zip(heads.sources, heads.targets, _unit_bytes(heads), strict=True)
    ]
    launch = ulysses_exchange.plan(
        members,
        strides,
        batch=heads.sources[0].shape[0],
        units=heads.units[0],
        tokens=heads.tokens[0],
        token_stride=0 if heads.replicated else heads.tokens[0],
        gather=heads.gather,
        chunk_bytes=choice.chunk_bytes,
        num_programs=choice.num_programs,
    )
    if all(dense_sources) and all(dense_targets):
        return lambda label, sources, targets: launch(
            label,
            [(source.data_ptr(), target.data_ptr()) for source, target in zip(sources, targets, strict=True)],
        )

    def run(label: int, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        given = [x if dense else x.contiguous() for x, dense in zip(sources, dense_sources, strict=True)]
        taken = [
            x if dense else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            for x, dense in zip(targets, dense_targets, strict=True)
        ]
        launch(
            label, [(source.data_ptr(), target.data_ptr()) for source, target in zip(given, taken, strict=True)]
        )
        for target, wanted in zip(taken, targets, strict=True):
            if target is not wanted:
                wanted.copy_(target)

    return run


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """Of batch and token in bytes, once the tensor is dense."""
    if not _is_dense(tensor):
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.stride(0) * tensor.element_size(), tensor.stride(1) * tensor.element_size()


def _unit_bytes(heads: HeadExchange) -> list[int]:
    return [
        heads.unit_heads(number) * source.shape[3] * source.element_size()
        for number, source in enumerate(heads.sources)
    ]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3]
