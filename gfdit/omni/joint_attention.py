"""Attention to text and image tokens together, where a plan of gfdit's splits the tokens of the image.

Under such a plan (:mod:`gfdit.adapters.sequence_plan`) every rank has all text tokens and its own image tokens.
Some transformers join the two themselves, text first, and hand attention one tensor of both; others name the text
in the metadata. The plan's hooks leave the number of all image tokens in vLLM-Omni's forward context, which tells
the two apart: in two-stream blocks, in single-stream blocks, and where image tokens attend alone. Outside the part
of a model that is split there is no such number, and nothing to exchange.

How they are exchanged is the business of another strategy, Ulysses or a ring, which gets image tokens with the
text beside them, and leaves out what padding has added to even out the shards.

Shape suffixes: B batch, S all image tokens, L own image tokens (S / P, rounded up), T text tokens, H heads, D head
size, P ranks.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.parallel.base import ParallelAttentionContext
from vllm_omni.diffusion.distributed.sp_sharding import sp_gather
from vllm_omni.diffusion.forward_context import get_forward_context

from gfdit.adapters.sequence_plan import SHARD_GROUP
from gfdit.omni.ring import RingMetadata, UlyssesOrRing
from gfdit.omni.task_scope import TaskScope
from gfdit.omni.ulysses import GroupFreeUlysses

# All but what tells attention about the text, with its value when nothing is told.
_OTHER_FIELDS = tuple(
    (field.name, getattr(AttentionMetadata(), field.name))
    for field in fields(AttentionMetadata)
    if field.name not in {"joint_query", "joint_key", "joint_value"}
)


_OUTSIDE = "outside"
"""Names the context of attention outside the part that is split."""


class JointAttention:
    """One instance serves every attention layer of a worker; the group is the running task's."""

    enabled = True
    # vLLM-Omni keys its strict-mode checks on this name.
    name = "ulysses"

    def __init__(self, scope: TaskScope, exchange: GroupFreeUlysses | UlyssesOrRing) -> None:
        self._scope = scope
        self._exchange = exchange

    def pre_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata | None, ParallelAttentionContext]:
        """Q, K, V: (B, T + L, H, D), or (B, L, H, D) with the text in ``attn_metadata``.

        They become what the exchange makes of them, (B, T + S, H / P, D) by Ulysses, and stay as they are outside
        the part that is split. Raises ``ValueError`` for attention with a mask, and if a head count does not
        divide by the degree where there is no ring.
        """
        num_image = get_forward_context().sp_shard_metadata.get(SHARD_GROUP)
        if num_image is None:
            return query, key, value, attn_metadata, ParallelAttentionContext(_OUTSIDE)
        image = (query, key, value)
        if attn_metadata is None:
            num_own = -(-num_image // self._scope.sp_degree)
            num_text = query.shape[1] - num_own
            attn_metadata = _text_in_front(query[:, :num_text], key[:, :num_text], value[:, :num_text])
            image = query[:, num_text:], key[:, num_text:], value[:, num_text:]
        else:
            _check_metadata(attn_metadata)
        q, k, v, metadata, context = self._exchange.pre_attention(*image, attn_metadata)
        return q, k, v, metadata if isinstance(metadata, RingMetadata) else None, context

    def post_attention(self, attn_output: torch.Tensor, ctx: ParallelAttentionContext | None) -> torch.Tensor:
        """(B, T + L, H, D), of what the exchange gave attention."""
        if ctx is None or ctx.name == _OUTSIDE:
            return attn_output
        return self._exchange.post_attention(attn_output, ctx)


def gather_tokens(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of the module where a plan's tokens come together: (B, L, ...) to (B, S, ...), no padding.

    Some modules return a bias that they did not add beside it.
    """
    num_image = get_forward_context().sp_shard_metadata.pop(SHARD_GROUP, None)
    if num_image is None:
        return output
    own, *others = output if isinstance(output, tuple) else (output,)
    whole = sp_gather(own, 1, validate=False)[:, :num_image]
    return (whole, *others) if isinstance(output, tuple) else whole


def _text_in_front(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttentionMetadata | None:
    """Text tokens that join those of the image in front, None if there are none."""
    if query.shape[1] == 0:
        return None
    return AttentionMetadata(joint_query=query, joint_key=key, joint_value=value, joint_strategy="front")


def _check_metadata(metadata: AttentionMetadata) -> None:
    """It may put text in front of the image: padding comes last, and is no text."""
    others = [name for name, default in _OTHER_FIELDS if _is_given(getattr(metadata, name), default)]
    if len(others) > 0:
        raise ValueError(f"a plan of gfdit's cannot split the tokens of attention with {', '.join(others)}")


def _is_given(value: Any, default: Any) -> bool:
    return value is not None if default is None else value != default
