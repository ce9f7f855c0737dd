"""Ulysses sequence parallelism over group-free collectives, as a vLLM-Omni attention strategy.

Before attention, queries, keys and values change from (all heads, own tokens) to (own heads, all tokens) in one
exchange; after it, the output changes back. Text that joins the image tokens in attention is replicated on every
rank: its heads are sliced before and gathered after. Only
data moves, so the result is bit-identical to vLLM-Omni's own strategy at the same degree.

Where a length does not divide by the degree, what evens out the shards is not exchanged. So attention sees the
tokens it would see on one rank, needs no mask, and takes the kernel that it takes at lengths that divide. Whether
there is padding is nothing that a compiled block decides on, so one graph serves all lengths: operators are told
how many tokens are real, and do the rest.

Shape suffixes: B batch, S all image tokens, L own image tokens (S / P, rounded up), T text tokens, H heads, D head
size, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.parallel.base import ParallelAttentionContext
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

from gfdit.adapters.sequence_plan import LAST_SPLIT, SHARD_GROUP
from gfdit.comm import operators
from gfdit.omni.task_scope import TaskScope


@dataclass(frozen=True, slots=True)
class UlyssesContext(ParallelAttentionContext):
    """What :meth:`GroupFreeUlysses.post_attention` needs: the text's tokens and side, and own image tokens."""

    num_text: int = 0
    text_first: bool = True
    num_own: int = 0


class GroupFreeUlysses:
    """One instance serves every attention layer of a worker; the group is the running task's."""

    enabled = True
    # vLLM-Omni keys its strict-mode checks on this name.
    name = "ulysses"

    def __init__(self, scope: TaskScope) -> None:
        self._scope = scope

    def pre_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata | None, ParallelAttentionContext]:
        """Q, K, V: (B, L, H, D) to (B, T + S, H / P, D), without padding; K and V heads may be fewer (grouped).

        Raises ``ValueError`` if a head count does not divide by the degree, before anything is sent.
        """
        size = self._scope.sp_degree
        text = text_tensors(attn_metadata)
        _check_heads((query, key, value, *text), size)
        num_text, text_first = 0, True
        if len(text) > 0:
            assert attn_metadata is not None
            if len(text) != 3:
                raise ValueError("joint_query, joint_key and joint_value go together")
            num_text, text_first = text[0].shape[1], is_text_first(attn_metadata)
        num_own = query.shape[1]
        q, k, v = operators.scatter_heads(
            self._scope.order, query, key, value, list(text), text_first, num_real(size * num_own, size), size
        )
        context = UlyssesContext(self.name, num_text, text_first, num_own)
        return q, k, v, _with_key_mask(attn_metadata, k), context

    def post_attention(self, attn_output: torch.Tensor, ctx: ParallelAttentionContext | None) -> torch.Tensor:
        """Output (B, T + S, H / P, D) back to (B, T + L, H, D)."""
        assert isinstance(ctx, UlyssesContext)
        return operators.gather_heads(
            self._scope.order, attn_output, ctx.num_text, ctx.text_first, ctx.num_own, self._scope.sp_degree
        )


def text_tensors(attn_metadata: AttentionMetadata | None) -> tuple[torch.Tensor, ...]:
    if attn_metadata is None:
        return ()
    joint = (attn_metadata.joint_query, attn_metadata.joint_key, attn_metadata.joint_value)
    return tuple(tensor for tensor in joint if tensor is not None)


def is_text_first(attn_metadata: AttentionMetadata) -> bool:
    side = attn_metadata.joint_strategy
    if side not in ("front", "rear"):
        raise ValueError(f"joint_strategy must be 'front' or 'rear', got {side!r}")
    return side == "front"


def num_real(num_tokens: int, size: int) -> int:
    """How many of ``num_tokens``, which ``size`` ranks have together, are not there to even out the shards only.

    They come first. All of them, if these tokens are no split sequence of the model's.
    """
    if not is_forward_context_available():
        return num_tokens
    context = get_forward_context()
    lengths = context.sp_shard_metadata
    for length in (lengths.get(SHARD_GROUP), lengths.get(LAST_SPLIT), context.sp_original_seq_len):
        # One comparison for lengths with padding and without: a graph is guarded by its outcome.
        if length is not None and num_tokens - size < length <= num_tokens:
            return length
    return num_tokens


def _check_heads(tensors: tuple[torch.Tensor, ...], size: int) -> None:
    for tensor in tensors:
        if tensor.shape[2] % size:
            raise ValueError(f"{tensor.shape[2]} attention heads do not divide by sequence-parallel degree {size}")


def _with_key_mask(attn_metadata: AttentionMetadata | None, key: torch.Tensor) -> AttentionMetadata | None:
    """Join the 2-D key masks of text and image, absent ones counting as all true."""
    if attn_metadata is None:
        return None
    image, text = attn_metadata.attn_mask, attn_metadata.joint_attn_mask
    if not any(mask is not None and mask.ndim == 2 for mask in (image, text)):
        return attn_metadata
    if attn_metadata.joint_key is not None:
        if image is None:
            assert text is not None
            image = text.new_ones((key.shape[0], key.shape[1] - text.shape[1]), dtype=torch.bool)
        elif text is None:
            text = image.new_ones((key.shape[0], key.shape[1] - image.shape[1]), dtype=torch.bool)
        assert text is not None
        image = torch.cat((text, image) if attn_metadata.joint_strategy == "front" else (image, text), dim=1)
    assert image is not None and image.shape[1] == key.shape[1], "attention mask and keys differ in length"
    attn_metadata.attn_mask = image.bool().contiguous()
    return attn_metadata
