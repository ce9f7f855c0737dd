"""Ulysses sequence parallelism over group-free collectives, as a vLLM-Omni attention strategy.

Before attention, queries, keys and values change from (all heads, own tokens) to (own heads, all tokens) by
one all-to-all; after it, the output changes back. Text that joins the image tokens in attention is replicated
on every rank: its heads are sliced before and gathered after. Only data moves, so the result is bit-identical
to vLLM-Omni's own strategy at the same degree.

Shape suffixes: B batch, S all image tokens, L own image tokens (S / P), T text tokens, H heads, D head size,
P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.parallel.base import ParallelAttentionContext

from gfdit.comm import Group, GroupFreeComm
from gfdit.omni.task_scope import TaskScope


@dataclass(frozen=True, slots=True)
class UlyssesContext(ParallelAttentionContext):
    """What :meth:`GroupFreeUlysses.post_attention` needs: how many text tokens, and on which side."""

    num_text: int = 0
    text_first: bool = True


class GroupFreeUlysses:
    """One instance serves every attention layer of a worker; the group is the running task's."""

    enabled = True
    # vLLM-Omni keys its strict-mode checks on this name.
    name = "ulysses"

    def __init__(self, scope: TaskScope) -> None:
        self._scope = scope

    @torch.compiler.disable
    def pre_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata | None, ParallelAttentionContext]:
        """Q, K, V: (B, L, H, D) to (B, T + S, H / P, D), K and V heads may be fewer (grouped).

        Raises ``ValueError`` if a head count does not divide by the degree, before anything is sent.
        """
        group, comm = self._scope.sp, self._scope.comm
        size, index = len(group.ranks), group.ranks.index(self._scope.rank)
        text = _text_tensors(attn_metadata)
        _check_heads((query, key, value, *text), size)
        image = scatter_heads((query, key, value), comm, group)
        if not text:
            q, k, v = image
            return q, k, v, _with_key_mask(attn_metadata, k), UlyssesContext(self.name)
        assert attn_metadata is not None
        text_first = _text_first(attn_metadata)
        own_text = [tensor.chunk(size, dim=2)[index] for tensor in text]
        if len(own_text) != len(image):
            raise ValueError("joint_query, joint_key and joint_value go together")
        q, k, v = (
            torch.cat((txt, img) if text_first else (img, txt), dim=1)
            for txt, img in zip(own_text, image, strict=True)
        )
        context = UlyssesContext(self.name, own_text[0].shape[1], text_first)
        return q, k, v, _with_key_mask(attn_metadata, k), context

    @torch.compiler.disable
    def post_attention(self, attn_output: torch.Tensor, ctx: ParallelAttentionContext | None) -> torch.Tensor:
        """Output (B, T + S, H / P, D) back to (B, T + L, H, D)."""
        assert isinstance(ctx, UlyssesContext)
        group, comm = self._scope.sp, self._scope.comm
        if ctx.num_text == 0:
            return gather_heads(attn_output, comm, group)
        num_image = attn_output.shape[1] - ctx.num_text
        if ctx.text_first:
            text, image = attn_output.split((ctx.num_text, num_image), dim=1)
        else:
            image, text = attn_output.split((num_image, ctx.num_text), dim=1)
        image, text = gather_heads(image, comm, group), _gather_text_heads(text, comm, group)
        return torch.cat((text, image) if ctx.text_first else (image, text), dim=1)


def scatter_heads(
    tensors_BLHD: tuple[torch.Tensor, ...], comm: GroupFreeComm, group: Group
) -> tuple[torch.Tensor, ...]:
    """(B, L, H, D) each to (B, S, H / P, D); tensors of one shape share a collective."""
    first = tensors_BLHD[0]
    if any(tensor.shape != first.shape for tensor in tensors_BLHD):
        return tuple(scatter_heads((tensor,), comm, group)[0] for tensor in tensors_BLHD)
    size = len(group.ranks)
    batch, own, heads, head_size = first.shape
    # Rows by destination rank, then tensor: what goes to one rank is contiguous.
    rows = torch.stack(tensors_BLHD).reshape(len(tensors_BLHD), batch, own, size, heads // size, head_size)
    send = rows.permute(3, 0, 1, 2, 4, 5).contiguous()
    received = torch.empty_like(send)
    comm.all_to_all_single(received, send, group)
    whole = received.permute(1, 2, 0, 3, 4, 5).reshape(
        len(tensors_BLHD), batch, size * own, heads // size, head_size
    )
    return tuple(whole.unbind(0))


def gather_heads(tensor_BSHD: torch.Tensor, comm: GroupFreeComm, group: Group) -> torch.Tensor:
    """(B, S, H / P, D) back to (B, L, H, D)."""
    size = len(group.ranks)
    batch, total, heads, head_size = tensor_BSHD.shape
    send = tensor_BSHD.reshape(batch, size, total // size, heads, head_size).transpose(0, 1).contiguous()
    received = torch.empty_like(send)
    comm.all_to_all_single(received, send, group)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, total // size, size * heads, head_size)


def _gather_text_heads(text_BTHD: torch.Tensor, comm: GroupFreeComm, group: Group) -> torch.Tensor:
    source = text_BTHD.contiguous()
    size = len(group.ranks)
    gathered = source.new_empty((size * source.shape[0], *source.shape[1:]))
    comm.all_gather_into_tensor(gathered, source, group)
    return torch.cat(gathered.chunk(size), dim=2)


def _text_tensors(attn_metadata: AttentionMetadata | None) -> tuple[torch.Tensor, ...]:
    if attn_metadata is None:
        return ()
    joint = (attn_metadata.joint_query, attn_metadata.joint_key, attn_metadata.joint_value)
    return tuple(tensor for tensor in joint if tensor is not None)


def _text_first(attn_metadata: AttentionMetadata) -> bool:
    side = attn_metadata.joint_strategy
    if side not in ("front", "rear"):
        raise ValueError(f"joint_strategy must be 'front' or 'rear', got {side!r}")
    return side == "front"


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
