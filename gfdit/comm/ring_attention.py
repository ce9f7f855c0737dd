"""Attention over a sequence that is split among ranks, in any number: keys and values go round a ring.

Every rank keeps its queries and attends to one block of keys and values after the other: its own, then that of the
rank before it, and so on, while each rank passes on the block it attends to. What the blocks give is merged by
their log-sum-exp, in float32. The result is that of attention to all keys at once, up to rounding.

Shape letters: B batch, Q queries, L tokens of one rank, S tokens of all ranks (P * L), T replicated tokens, H
heads, G heads of keys and values (H is a multiple of it), D head size, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gfdit.comm.beside import Beside
from gfdit.comm.group import Group
from gfdit.comm.group_free_comm import GroupFreeComm

# Added to the scores of masked keys. No weight is left beside any other key, and a block in which all keys of a
# row are masked keeps a finite log-sum-exp: minus infinity would make its merge undefined. It fits float16.
_MASKED = -3e4


@dataclass(frozen=True, slots=True)
class Block:
    """Keys and values (B, L, G, D), and which of the keys count: (B, L) bool, all without a mask."""

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None

    def joined(self, other: Block) -> Block:
        """With the keys of ``other`` behind its own."""
        mask = None
        if self.mask is not None or other.mask is not None:
            mask = torch.cat((_mask_of(self), _mask_of(other)), dim=1)
        return Block(torch.cat((self.key, other.key), 1), torch.cat((self.value, other.value), 1), mask)


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention to some of the keys: normalised output (B, Q, H, D) and log-sum-exp (B, H, Q), both float32."""

    output: torch.Tensor
    lse: torch.Tensor

    def merged(self, other: Partial) -> Partial:
        """Attention to the keys of both."""
        lse = torch.logaddexp(self.lse, other.lse)
        output = self.output * _weight(self.lse, lse) + other.output * _weight(other.lse, lse)
        return Partial(output, lse)


def ring_attention(
    comm: GroupFreeComm,
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    replicated: Block | None = None,
) -> torch.Tensor:
    """``query`` (B, Q, H, D) attends to the keys of all members of ``group``; returns (B, Q, H, D).

    ``key`` and ``value`` (B, L, G, D) are this rank's part, of the same shape on every member. ``key_mask`` (B, S)
    bool is the same on every member and in the order of the group; keys where it is False do not count. Every
    member has the same ``replicated`` keys besides, which count once. Some key must count for every row.
    """
    size, own, beside = len(group), key.shape[1], comm.beside()
    block = torch.stack((key, value))
    total: Partial | None = None
    for step in range(size):
        following = _passed_on(beside, group, block) if step + 1 < size else block
        first = (group.index - step) % size * own  # of the tokens that the block holds
        mask = None if key_mask is None else key_mask[:, first : first + own]
        keys = Block(block[0], block[1], mask)
        if step == 0 and replicated is not None:
            keys = replicated.joined(keys)
        partial = attend(query, keys, scale)
        total = partial if total is None else total.merged(partial)
        beside.join()
        block = following
    assert total is not None
    return total.output.to(query.dtype)


def _passed_on(beside: Beside, group: Group, block: torch.Tensor) -> torch.Tensor:
    """The block of the member before this one, once joined; an exchange, so nobody waits in a circle."""
    size, received = len(group), torch.empty_like(block)
    to_next, from_previous = [0] * size, [0] * size
    to_next[(group.index + 1) % size] = from_previous[(group.index - 1) % size] = block.numel()
    with beside.running((block, received)) as comm:
        comm.all_to_all_single(received.view(-1), block.view(-1), group, from_previous, to_next)
    return received


def attend(query: torch.Tensor, keys: Block, scale: float) -> Partial:
    """``query`` (B, Q, H, D) to the keys of one block, by a kernel of torch that also gives the log-sum-exp."""
    repeats = query.shape[2] // keys.key.shape[2]
    q = query.transpose(1, 2)
    k, v = (tensor.repeat_interleave(repeats, 2).transpose(1, 2) for tensor in (keys.key, keys.value))
    bias = None if keys.mask is None else _bias(keys.mask, q)
    run = _attend_on_cpu if q.device.type == "cpu" else _attend_on_gpu
    output, lse = run(q, k, v, bias, scale)
    return Partial(output.transpose(1, 2).float(), lse[:, :, : q.shape[2]].float())


def _attend_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All (B, H, tokens, D); returns output and log-sum-exp (B, H, Q)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )


def _attend_on_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As on a CPU; the log-sum-exp may be padded at its end. Never run on a GPU."""
    if bias is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, scale=scale)[:2]
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)[:2]


def _bias(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What is added to the scores, (B, H, Q, K), the same for all heads and queries.

    GPU kernels want rows that begin at multiples of 16 bytes.
    """
    batch, num_keys = mask.shape
    padded = q.new_zeros((batch, 1, 1, -(-num_keys // 8) * 8))
    bias = padded[..., :num_keys].masked_fill_(~mask[:, None, None], _MASKED)
    return bias.expand(batch, q.shape[1], q.shape[2], num_keys)


def _mask_of(block: Block) -> torch.Tensor:
    if block.mask is not None:
        return block.mask
    return torch.ones(block.key.shape[:2], dtype=torch.bool, device=block.key.device)


def _weight(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(B, H, Q) to the share (B, Q, H, 1) of each query's weight."""
    return (lse - total).exp().transpose(1, 2).unsqueeze(-1)
