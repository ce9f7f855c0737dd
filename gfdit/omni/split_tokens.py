"""Splitting a transformer's tokens among the ranks of a task, at any length and for any attention backend.

vLLM-Omni's own hooks do it, but for one step: where a length does not divide by the degree they pad it, and refuse
backends that take no mask, since they leave padding in attention. Here it does not get there
(:func:`gfdit.omni.ulysses.num_real`), so nothing has to be masked, and models are not told that there is any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.experimental.sym_node import DynamicInt
from vllm_omni.diffusion.distributed.parallel_state import (
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
)
from vllm_omni.diffusion.forward_context import get_forward_context
from vllm_omni.diffusion.hooks import HookRegistry
from vllm_omni.diffusion.hooks.sequence_parallel import (
    SequenceParallelSplitHook,
    _get_submodule_by_name,
    apply_sequence_parallel,
)

from gfdit.adapters import masked_tokens
from gfdit.adapters.sequence_plan import LAST_SPLIT
from gfdit.omni.task_scope import TaskDegrees


class PaddingSplitHook(SequenceParallelSplitHook):
    """Leaves the length without padding in the forward context, as vLLM-Omni's does, and nothing about padding.

    As a ``DynamicInt``: compiled blocks read it, and a plain integer that is not among their arguments would be a
    constant of their graphs.
    """

    def _shard_with_auto_pad(self, x: torch.Tensor, dim: int, shard_group: str | None) -> torch.Tensor:
        """This rank's part of ``x``, whose ``dim`` is made a multiple of the degree by zeros at its end.

        Raises ``ValueError`` for tensors of one group that differ in length.
        """
        size = get_sequence_parallel_world_size()
        dim %= x.ndim
        if (prediction := masked_tokens.current()) is not None:
            x = prediction.choose(x, dim)
        context, num_real = get_forward_context(), x.size(dim)
        lengths = context.sp_shard_metadata
        if size == 1:
            if shard_group is not None:  # where tokens come together again, it is asked for at any degree
                lengths[shard_group] = DynamicInt(num_real)
            return x
        if shard_group is not None:
            known = lengths.setdefault(shard_group, DynamicInt(num_real))
            if known != num_real:
                raise ValueError(f"tensors that are split as {shard_group!r} have {known} and {num_real} tokens")
        num_padding = -num_real % size
        if shard_group is None and context.sp_original_seq_len is None:
            lengths[LAST_SPLIT] = DynamicInt(num_real)
            if num_padding:
                context.sp_original_seq_len = num_real
        if num_padding:
            zeros = x.new_zeros((*x.shape[:dim], num_padding, *x.shape[dim + 1 :]))
            x = torch.cat((x, zeros), dim=dim)
        return x.chunk(size, dim=dim)[get_sequence_parallel_rank()]


def split_tokens(transformer: torch.nn.Module, degrees: TaskDegrees, plan: Mapping[str, Any]) -> None:
    """Carry out ``plan``, of vLLM-Omni's form, in every forward pass; at degree 1 that does nothing."""
    for name, entry in plan.items():
        if not isinstance(entry, dict):
            apply_sequence_parallel(transformer, degrees, {name: entry})
            continue
        found = _get_submodule_by_name(transformer, name)
        for module in found if isinstance(found, list) else [found]:
            HookRegistry.get_or_create(module).register_hook(
                f"gfdit_split {name}", PaddingSplitHook(entry, degrees)
            )
