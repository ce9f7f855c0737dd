"""Ulysses for transformers that know nothing of sequence parallelism: a plan of gfdit's splits their tokens.

Such a model joins text and image tokens itself, text first, and hands attention one tensor of both. Under a plan
(:mod:`gfdit.adapters.sequence_plan`) every rank has all text tokens and its own image tokens in it. The plan's
hooks leave the number of all image tokens in vLLM-Omni's forward context, which tells the two apart: in two-stream
blocks, in single-stream blocks, and where image tokens attend alone. Outside the part of a model that is split
there is no such number, and nothing to exchange.

What padding has added to even out the shards comes last. It is cut off before attention and put back after it, so
attention sees the tokens it would see on one rank: no mask, and the same result up to rounding.

Shape suffixes: B batch, S all image tokens, L own image tokens (S / P, rounded up), T text tokens, H heads, D head
size, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.parallel.base import ParallelAttentionContext
from vllm_omni.diffusion.distributed.sp_sharding import sp_gather
from vllm_omni.diffusion.forward_context import get_forward_context

from gfdit.adapters.sequence_plan import SHARD_GROUP
from gfdit.omni.ulysses import GroupFreeUlysses


@dataclass(frozen=True, slots=True)
class JointContext(ParallelAttentionContext):
    """What :meth:`JointUlysses.post_attention` needs: the exchange's own context, and how much is padding."""

    exchange: ParallelAttentionContext
    num_padding: int


class JointUlysses(GroupFreeUlysses):
    """One instance serves every attention layer of a worker; the group is the running task's."""

    @torch.compiler.disable
    def pre_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata | None, ParallelAttentionContext]:
        """Q, K, V: (B, T + L, H, D) to (B, T + S, H / P, D); unchanged outside the part that is split.

        Raises ``ValueError`` if a head count does not divide by the degree, or for attention with a mask.
        """
        num_image = get_forward_context().sp_shard_metadata.get(SHARD_GROUP)
        if num_image is None:
            return query, key, value, attn_metadata, ParallelAttentionContext(self.name)
        if attn_metadata is not None:
            raise ValueError("a plan of gfdit's cannot split the tokens of attention with a mask")
        size = len(self._scope.sp.ranks)
        num_own = -(-num_image // size)
        num_text = query.shape[1] - num_own
        text, image = zip(*((t[:, :num_text], t[:, num_text:]) for t in (query, key, value)), strict=True)
        q, k, v, _, exchange = super().pre_attention(*image, _joint(*text))
        end = num_text + num_image
        context = JointContext(self.name, exchange, num_padding=size * num_own - num_image)
        return q[:, :end], k[:, :end], v[:, :end], None, context

    @torch.compiler.disable
    def post_attention(self, attn_output: torch.Tensor, ctx: ParallelAttentionContext | None) -> torch.Tensor:
        """Output (B, T + S, H / P, D) back to (B, T + L, H, D)."""
        if not isinstance(ctx, JointContext):
            return attn_output
        if ctx.num_padding:
            attn_output = torch.nn.functional.pad(attn_output, (0, 0, 0, 0, 0, ctx.num_padding))
        return super().post_attention(attn_output, ctx.exchange)


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


def _joint(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttentionMetadata | None:
    """Text tokens that join those of the image in front, None if there are none."""
    if query.shape[1] == 0:
        return None
    return AttentionMetadata(joint_query=query, joint_key=key, joint_value=value, joint_strategy="front")
