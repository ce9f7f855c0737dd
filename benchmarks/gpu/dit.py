"""A block of a Diffusion Transformer in plain torch, its tokens split among ranks by Ulysses.

What models have in common at their real sizes: modulated norms, query, key and value with their own norms and
rotary positions, attention over all tokens, attention to a text apart where a model has it, and an MLP. Between
the pieces, which only see one rank's tensors and can be compiled, tokens and heads are exchanged.

Shape letters: L own tokens, S all tokens, T text tokens, H heads, h own heads, D head size, W width (H * D).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as f

from benchmarks.gpu.shapes import Model

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one block, and what its inputs are modulated by; the same on every rank."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    modulation: torch.Tensor
    text_query: torch.Tensor
    text_keys: torch.Tensor
    text_out: torch.Tensor
    text: torch.Tensor

    @classmethod
    def random(cls, model: Model, device: torch.device, dtype: torch.dtype) -> Weights:
        generator = torch.Generator(device).manual_seed(7)

        def matrix(*shape: int, scale: float | None = None) -> torch.Tensor:
            scale = shape[-1] ** -0.5 if scale is None else scale
            return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

        width, text = model.width, model.width if model.text else 0
        return cls(
            qkv=matrix(3 * width, width),
            out=matrix(width, width),
            up=matrix(model.mlp, width),
            down=matrix(width, model.mlp),
            query_norm=1 + matrix(model.head_size, scale=0.1),
            key_norm=1 + matrix(model.head_size, scale=0.1),
            modulation=matrix(6, width, scale=0.3),
            text_query=matrix(text, width),
            text_keys=matrix(2 * text, width),
            text_out=matrix(width, text, scale=width**-0.5),
            text=matrix(1, model.text, width, scale=1.0),
        )


class Exchange(Protocol):
    """Between a rank's tokens of all heads, (1, L, H, D), and its heads of all tokens, (1, S, h, D)."""

    def scatter(self, heads: Heads) -> Sequence[torch.Tensor]: ...

    def gather(self, attended: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a rank computes by itself; see ``before``, ``attend`` and ``after``."""

    before: Callable[..., Heads]
    attend: Callable[..., torch.Tensor]
    after: Callable[..., torch.Tensor]

    @classmethod
    @functools.cache
    def compiled(cls, backend: str) -> Pieces:
        """A graph for each piece and shape, the same for all virtual ranks.

        Once the collectives are operators of torch, all of ``block`` can be one graph.
        """
        make: Any = torch.compile
        options = {"backend": backend, "dynamic": False, "fullgraph": True}
        return cls(make(before, **options), make(attend, **options), make(after, **options))


def block(
    x: torch.Tensor, weights: Weights, angles: torch.Tensor, exchange: Exchange, run: Pieces
) -> torch.Tensor:
    """``x`` (1, L, W) and ``angles`` (L, D // 2) of the own tokens; returns (1, L, W)."""
    query, key, value = exchange.scatter(run.before(x, weights.qkv, weights, angles))
    attended = exchange.gather(run.attend(query, key, value))
    return run.after(x, attended, weights)


def before(x: torch.Tensor, qkv: torch.Tensor, weights: Weights, angles: torch.Tensor) -> Heads:
    """Query, key and value, (1, L, H, D) each."""
    head_size = weights.query_norm.shape[0]
    shift, scale = weights.modulation[0], weights.modulation[1]
    normed = f.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
    query, key, value = f.linear(normed, qkv).view(*x.shape[:2], 3, -1, head_size).unbind(2)
    query = rotated(f.rms_norm(query, (head_size,), weights.query_norm), angles)
    key = rotated(f.rms_norm(key, (head_size,), weights.key_norm), angles)
    return query, key, value


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(1, S, h, D) each and so is the result."""
    out = f.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return out.transpose(1, 2)


def after(x: torch.Tensor, attended: torch.Tensor, weights: Weights) -> torch.Tensor:
    """``attended`` (1, L, H, D); the block's output, (1, L, W)."""
    gate, shift, scale, last_gate = weights.modulation[2:].unbind(0)
    x = x + gate * f.linear(attended.flatten(2), weights.out)
    if weights.text.shape[1]:
        head_size = weights.query_norm.shape[0]
        query = f.linear(x, weights.text_query).unflatten(2, (-1, head_size))
        key, value = f.linear(weights.text, weights.text_keys).unflatten(2, (2, -1, head_size)).unbind(2)
        x = x + f.linear(attend(query, key, value).flatten(2), weights.text_out)
    normed = f.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
    return x + last_gate * f.linear(f.gelu(f.linear(normed, weights.up), approximate="tanh"), weights.down)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``x`` (1, L, H, D) by ``angles`` (L, D // 2)."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def angles_of(model: Model, device: torch.device) -> torch.Tensor:
    """(S, D // 2), float32."""
    frequencies = 10_000 ** -torch.linspace(0, 1, model.head_size // 2, device=device)
    return torch.arange(model.tokens, device=device)[:, None] * frequencies


EAGER = Pieces(before, attend, after)


def reference(
    x: torch.Tensor, weights: Weights, angles: torch.Tensor, degree: int, run: Pieces
) -> list[torch.Tensor]:
    """What each of ``degree`` ranks must have, computed by one that has all tokens, (1, S, W), and never sends.

    Each piece gets tensors of the shapes that it gets on a rank, so results are equal bit by bit.
    """
    own_x, own_angles = x.chunk(degree, dim=1), angles.chunk(degree)
    own = [
        run.before(tokens, weights.qkv, weights, turns) for tokens, turns in zip(own_x, own_angles, strict=True)
    ]
    attended = []
    for rank in range(degree):
        query, key, value = (
            torch.cat([heads[number].chunk(degree, dim=2)[rank] for heads in own], dim=1) for number in range(3)
        )
        attended.append(run.attend(query, key, value))
    results = []
    for rank, tokens in enumerate(own_x):
        own_heads = torch.cat([heads.chunk(degree, dim=1)[rank] for heads in attended], dim=2)
        results.append(run.after(tokens, own_heads, weights))
    return results
