"""Ring attention over group-free collectives, for degrees that do not divide the attention heads.

Ulysses needs a whole number of heads on every rank. Where that cannot be, every rank keeps its tokens with all
their heads, and keys and values go round (:mod:`gfdit.comm.ring_attention`). Text that joins the image tokens is
replicated: its queries go with the own ones, its keys count once.

vLLM-Omni asks a strategy before and after attention, and runs the layer's kernel between. A ring communicates
between its blocks, so the kernel has a stand-in, which leaves to it all that is not a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.attention.parallel.base import ParallelAttentionContext

from gfdit.comm import operators
from gfdit.omni.task_scope import TaskScope
from gfdit.omni.ulysses import GroupFreeUlysses, is_text_first, num_real, text_tensors

# What a kernel may be told that a ring cannot heed.
_UNSUPPORTED = ("full_attn_spans", "query_ranges", "packed_padding")


@dataclass
class RingMetadata(AttentionMetadata):
    """Tells the stand-in of the kernel that the keys it gets are one rank's.

    Masks are of keys, True where they count: ``image_mask`` (B, S), tokens of all ranks, ``text_mask`` (B, T).
    Without an ``image_mask`` the first ``num_image`` tokens count: padding stays in the blocks that go round.
    """

    num_image: int = 0
    image_mask: torch.Tensor | None = None
    text_mask: torch.Tensor | None = None


class GroupFreeRing:
    """Strategy for one degree: queries stay where they are, and so does what comes of them."""

    enabled = True
    name = "ring"

    def __init__(self, scope: TaskScope) -> None:
        self._scope = scope

    def pre_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata | None, ParallelAttentionContext]:
        """Q: (B, L, H, D) to (B, T + L, H, D); K and V stay (B, L, G, D), G heads of keys and values.

        Raises ``ValueError`` for metadata that a ring cannot heed, before anything is sent.
        """
        given = attn_metadata or AttentionMetadata()
        _check_metadata(given)
        size = self._scope.sp_degree
        num_image = num_real(size * query.shape[1], size)
        if given.joint_query is not None:
            parts = (given.joint_query, query) if is_text_first(given) else (query, given.joint_query)
            query = torch.cat(parts, dim=1)
        metadata = RingMetadata(
            joint_query=given.joint_query,
            joint_key=given.joint_key,
            joint_value=given.joint_value,
            joint_strategy=given.joint_strategy,
            extra=given.extra,
            video_layout=given.video_layout,
            num_image=num_image,
            image_mask=given.attn_mask,
            text_mask=given.joint_attn_mask,
        )
        return query, key, value, metadata, ParallelAttentionContext(self.name)

    def post_attention(self, attn_output: torch.Tensor, ctx: ParallelAttentionContext | None) -> torch.Tensor:
        """(B, T + L, H, D), as it is."""
        return attn_output


class UlyssesOrRing:
    """Ulysses wherever the heads divide by the running task's degree, else a ring: the one place that decides."""

    enabled = True
    # vLLM-Omni keys its strict-mode checks on this name.
    name = "ulysses"

    def __init__(self, scope: TaskScope, ulysses: GroupFreeUlysses, ring: GroupFreeRing) -> None:
        self._scope = scope
        self._ulysses = ulysses
        self._ring = ring

    def pre_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata | None, ParallelAttentionContext]:
        size = self._scope.sp_degree
        heads = [tensor.shape[2] for tensor in (query, key, value, *text_tensors(attn_metadata))]
        if any(count % size for count in heads):
            return self._ring.pre_attention(query, key, value, attn_metadata)
        return self._ulysses.pre_attention(query, key, value, attn_metadata)

    def post_attention(self, attn_output: torch.Tensor, ctx: ParallelAttentionContext | None) -> torch.Tensor:
        if ctx is not None and ctx.name == self._ring.name:
            return self._ring.post_attention(attn_output, ctx)
        return self._ulysses.post_attention(attn_output, ctx)


class RingOrKernel:
    """Takes the place of a layer's kernel (``AttentionImpl``), for calls of :class:`GroupFreeRing` only."""

    def __init__(self, scope: TaskScope, kernel: Any, scale: float) -> None:
        self._scope = scope
        self._kernel = kernel
        self._scale = scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """(B, Q, H, D) queries to (B, Q, H, D) outputs."""
        if not isinstance(attn_metadata, RingMetadata):
            return self._kernel.forward(query, key, value, attn_metadata)
        return self._ring(query, key, value, attn_metadata)

    def _ring(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: RingMetadata
    ) -> torch.Tensor:
        text, text_mask = [], None
        if metadata.joint_key is not None:
            assert metadata.joint_value is not None
            text, text_mask = [metadata.joint_key, metadata.joint_value], _as_bool(metadata.text_mask)
        return operators.attend_in_ring(
            self._scope.order,
            query,
            key,
            value,
            _as_bool(metadata.image_mask),
            text,
            text_mask,
            self._scale,
            metadata.num_image,
            self._scope.sp_degree,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def allow_ring(layer: Attention, name: str, scope: TaskScope) -> None:
    """Give ``layer`` what a ring needs. Raises ``ValueError`` naming a layer that cannot do it, and why."""
    obstacles = {
        "its attention is causal": layer.causal,
        "its keys and values are quantized": layer._kv_cache_dtype not in (None, "float"),
        "its kernel is a module of the model": isinstance(layer.attention, torch.nn.Module),
    }
    for reason, holds in obstacles.items():
        if holds:
            raise ValueError(f"gfdit setting 'ring' does not work with attention layer {name}: {reason}")
    layer.attention = RingOrKernel(scope, layer.attention, layer.softmax_scale)
    if layer.sdpa_fallback is not None:
        layer.sdpa_fallback = RingOrKernel(scope, layer.sdpa_fallback, layer.softmax_scale)


def _check_metadata(metadata: AttentionMetadata) -> None:
    for name in _UNSUPPORTED:
        if getattr(metadata, name) is not None:
            raise ValueError(f"ring attention cannot heed {name} of the attention metadata")
    for name in ("attn_mask", "joint_attn_mask"):
        mask = getattr(metadata, name)
        if mask is not None and mask.ndim != 2:
            raise ValueError(f"ring attention takes {name} of keys, (batch, tokens), got {tuple(mask.shape)}")


def _as_bool(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.bool()
