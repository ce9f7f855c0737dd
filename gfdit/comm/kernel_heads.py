"""A head exchange as kernels take it: strides in bytes, and who has which heads and tokens."""

from __future__ import annotations

import torch

from gfdit.comm.heads import HeadExchange
from gfdit.kernels import ulysses_exchange
from gfdit.kernels.members import ROW_WORDS, Members
from gfdit.kernels.ulysses_exchange import StridedRows

# Rows of a slot are cut into this many chunks, each with its own token.
NUM_CHUNKS = 4


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


def launch_exchange(members: Members, heads: HeadExchange) -> None:
    """One launch. Where heads and head size of a tensor are not dense, it is copied around the launch."""
    sources = [_dense(source) for source in heads.sources]
    targets = [target if _is_dense(target) else torch.empty_like(target).contiguous() for target in heads.targets]
    tensors = [
        StridedRows(
            source.data_ptr(),
            source.stride(0) * source.element_size(),
            source.stride(1) * source.element_size(),
            target.data_ptr(),
            target.stride(0) * target.element_size(),
            target.stride(1) * target.element_size(),
            unit_bytes,
        )
        for source, target, unit_bytes in zip(sources, targets, _unit_bytes(heads), strict=True)
    ]
    ulysses_exchange.run(
        members,
        tensors,
        batch=sources[0].shape[0],
        units=heads.units[0],
        tokens=heads.tokens[0],
        token_stride=0 if heads.replicated else heads.tokens[0],
        gather=heads.gather,
        num_chunks=NUM_CHUNKS,
        num_programs=1,
    )
    for target, wanted in zip(targets, heads.targets, strict=True):
        if target is not wanted:
            wanted.copy_(target)


def _unit_bytes(heads: HeadExchange) -> list[int]:
    return [
        heads.unit_heads(number) * source.shape[3] * source.element_size()
        for number, source in enumerate(heads.sources)
    ]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_dense(tensor) else tensor.contiguous()
