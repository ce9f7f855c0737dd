"""What a ControlNet tells a base transformer: residuals, one by one, from a hook on each of its blocks to another.

A net gives a residual as soon as the block that it comes from has run, and a base asks for it right after the
block that it is added to. So both may run at the same time. diffusers collects all residuals first and hands them
over together; the numbers are the same.

A stream begins with a tensor that says what follows (:class:`Header`), then come the residuals in order: those of
blocks with two streams, then those of blocks with one.

Shape suffixes: B rows of latents, S image tokens, L a rank's share of them (S / SP, rounded up), D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from vllm_omni.diffusion.distributed.parallel_state import (
    get_classifier_free_guidance_rank,
    get_classifier_free_guidance_world_size,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
)

#: The blocks of transformers, by what a header counts.
BLOCKS = ("transformer_blocks", "single_transformer_blocks")


class Header(NamedTuple):
    """``counts`` residuals are for the blocks of :data:`BLOCKS`.

    Without ``active`` none of them follows: the net is outside of its window of steps. ``repeats`` is how they are
    spread over the blocks (as XLabs' nets are), ``both`` that rows of the negative branch come before the others.
    """

    counts: tuple[int, int]
    active: bool = True
    repeats: bool = False
    both: bool = False

    def to_tensor(self) -> torch.Tensor:
        return torch.tensor([*self.counts, self.active, self.repeats, self.both], dtype=torch.int64)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Header:
        double, single, active, repeats, both = tensor.tolist()
        return cls((double, single), bool(active), bool(repeats), bool(both))


class Stream(Protocol):
    """A deferred input."""

    def fetch(self, index: int) -> torch.Tensor: ...


Emit = Callable[[int, torch.Tensor], None]


class _NoMoreNeededError(Exception):
    """Nothing is left to compute."""


class ResidualSource:
    """Hooks on the blocks of one of diffusers' nets, which end its forward after the last block.

    What that forward would do with what the blocks leave is done by the hooks.
    """

    def __init__(self, net: nn.Module) -> None:
        self._emit: Emit | None = None
        self._scale = 1.0
        blocks: list[tuple[nn.Module, nn.Module]] = []
        counts = []
        for name, projections in zip(BLOCKS, ("controlnet_blocks", "controlnet_single_blocks"), strict=True):
            group = list(zip(getattr(net, name, ()), getattr(net, projections, ()), strict=True))
            counts.append(len(group))
            blocks += group
        self.counts = counts[0], counts[1]
        for number, (block, projection) in enumerate(blocks):
            last = number + 1 == len(blocks)
            block.register_forward_hook(partial(self._after_block, number, last, projection))

    def run(self, forward: Callable[[], Any], scale: float, emit: Emit) -> None:
        """``emit`` gets (1 + index, residual (B, S, D)) of every block of ``forward``."""
        self._emit, self._scale = emit, scale
        try:
            forward()
        except _NoMoreNeededError:
            pass
        finally:
            self._emit = None

    def _after_block(
        self, number: int, last: bool, projection: nn.Module, block: nn.Module, args: Any, output: Any
    ) -> None:
        if self._emit is None:
            return
        hidden = output[-1] if isinstance(output, tuple) else output
        self._emit(1 + number, projection(hidden) * self._scale)
        if last:
            raise _NoMoreNeededError


#: (block, number of blocks, number of residuals) to the residual that is added after it, None for none.
Spread = Callable[[int, int, int], int | None]


def in_runs(block: int, num_blocks: int, num_residuals: int) -> int | None:
    """FLUX and Qwen-Image: runs of equal length, but for the last one."""
    return block // math.ceil(num_blocks / num_residuals)


def in_runs_but_the_last(block: int, num_blocks: int, num_residuals: int) -> int | None:
    """Stable Diffusion 3: runs whose lengths differ by one at most; nothing after the last block."""
    return None if block + 1 == num_blocks else int(block / (num_blocks / num_residuals))


class ResidualSink:
    """Hooks on the blocks of a base transformer of vLLM-Omni's, which do nothing outside of :meth:`adding`."""

    def __init__(self, transformer: nn.Module, spread: Spread) -> None:
        self.spread = spread
        self._step: _Step | None = None
        transformer.register_forward_pre_hook(self._before_pass)
        for group, name in enumerate(BLOCKS):
            blocks = getattr(transformer, name, ())
            for number, block in enumerate(blocks):
                block.register_forward_hook(partial(self._after_block, group, number, len(blocks)))

    @contextmanager
    def adding(self, streams: Sequence[Stream]) -> Iterator[None]:
        """What all ``streams`` sum up to is added in the passes of the body, a positive branch first."""
        self._step = _Step(streams) if streams else None
        try:
            yield
        finally:
            self._step = None

    def _before_pass(self, transformer: nn.Module, args: Any) -> None:
        if self._step is not None:
            self._step.num_passes += 1

    def _after_block(
        self, group: int, number: int, num_blocks: int, block: nn.Module, args: Any, output: Any
    ) -> Any:
        step = self._step
        if step is None:
            return None
        residual = step.residual(group, number, num_blocks, self.spread)
        if residual is None:
            return None
        text, hidden = output
        return text, hidden + _own_tokens(residual, hidden.shape[1])


class _Step:
    """The residuals of one step, each fetched when a block first wants it, and kept for the other branch."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        headers = [Header.of(stream.fetch(0)) for stream in streams]
        self._active = [(stream, header) for stream, header in zip(streams, headers, strict=True) if header.active]
        # Where nets differ in number, what all have is added; so do diffusers' pipelines.
        groups = zip(*(header.counts for header in headers), strict=True)
        self._counts = [min((count for count in counts if count), default=0) for counts in groups]
        self._repeats = any(header.repeats for header in headers)
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        self.num_passes = 0

    def residual(self, group: int, block: int, num_blocks: int, spread: Spread) -> torch.Tensor | None:
        """(B, S, D), of the guidance branch whose pass it is."""
        count = self._counts[group]
        if count == 0 or not self._active:
            return None
        index = block % count if self._repeats else spread(block, num_blocks, count)
        if index is None:
            return None
        key = group, index
        if key not in self._sums:
            self._sums[key] = self._sum(group, index)
        residual = self._sums[key]
        if not self._active[0][1].both:
            return residual
        negative, positive = residual.chunk(2)
        return negative if self._branch() else positive

    def _sum(self, group: int, index: int) -> torch.Tensor:
        parts = [
            stream.fetch(1 + sum(header.counts[:group]) + index)
            for stream, header in self._active
            if header.counts[group]
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _branch(self) -> int:
        """0 is the positive one. With a rank for each, it is this rank's."""
        if get_classifier_free_guidance_world_size() > 1:
            return get_classifier_free_guidance_rank()
        return self.num_passes - 1


def _own_tokens(residual: torch.Tensor, num_own: int) -> torch.Tensor:
    """(B, S, D) to this rank's (B, L, D): vLLM-Omni pads at the end and gives every rank as many tokens."""
    if get_sequence_parallel_world_size() == 1:
        return residual
    start = get_sequence_parallel_rank() * num_own
    own = residual[:, start : start + num_own]
    if num_padding := num_own - own.shape[1]:
        own = torch.nn.functional.pad(own, (0, 0, 0, num_padding))
    return own
