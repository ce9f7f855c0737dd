"""One branch of Z-Image's guidance, computed as a part of the batch of both that upstream runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm_omni.diffusion.models.z_image.z_image_transformer import SEQ_MULTI_OF


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a branch takes from the batch it would be in: length of the longest caption, rotation of the first row.

    ``image`` and ``caption`` are cosines and sines, (1, tokens, d), of captions with zeros up to ``num_tokens``.
    """

    num_tokens: int
    image: tuple[torch.Tensor, ...]
    caption: tuple[torch.Tensor, ...]


class BranchOfBatch:
    """Makes a pass over one branch of guidance what it is in upstream's batch of both, positive first.

    There the shorter caption is followed by zeros, in the caption's own blocks and then at the end of the joint
    sequence, and all rows are rotated by the positions of the first: those of the image begin where its caption
    ends. Hooks on the transformer do the same while :meth:`of` is entered.
    """

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._batch: _Batch | None = None
        for block in transformer.noise_refiner:
            block.register_forward_pre_hook(self._in_image_block)
        for block in transformer.context_refiner:
            block.register_forward_pre_hook(self._in_caption_block)
        transformer.unified_prepare.register_forward_pre_hook(self._in_joining)

    @contextmanager
    def of(self, positive: int, negative: int, latents: torch.Tensor) -> Iterator[None]:
        """Two captions of so many tokens, padded; ``latents`` (N, C, H, W) are those of the pass."""
        grid, rope = self._transformer.create_coordinate_grid, self._transformer.rope_embedder
        rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
        image = grid((1, rows, columns), (positive + 1, 0, 0), latents.device).flatten(0, 2)
        image = torch.nn.functional.pad(image, (0, 0, 0, -len(image) % SEQ_MULTI_OF))
        caption = grid((positive, 1, 1), (1, 0, 0), latents.device).flatten(0, 2)
        longest = max(positive, negative)
        self._batch = _Batch(
            longest,
            tuple(part[None] for part in rope(image)),
            tuple(_pad(part[None], longest) for part in rope(caption)),
        )
        try:
            yield
        finally:
            self._batch = None

    def _in_image_block(self, block: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Inputs: tokens, mask, cosines, sines, modulation."""
        if self._batch is None:
            return args
        x, mask, _, _, modulation = args
        return x, mask, *self._batch.image, modulation

    def _in_caption_block(
        self, block: torch.nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Inputs: tokens (B, T, D), mask (B, T), cosines and sines (B, T, d)."""
        if self._batch is None:
            return args
        x, mask, _, _ = args
        return _pad(x, self._batch.num_tokens), _pad(mask, self._batch.num_tokens), *self._batch.caption

    def _in_joining(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs of the module that puts every image and its caption together."""
        if self._batch is None:
            return args
        x, _, _, caption, _, _, image_lengths, lengths, image_mask, mask = args
        num_rows, num_tokens = len(lengths), self._batch.num_tokens
        # What the blocks made of the zeros is dropped, as in the batch; the mask is not used by the model.
        caption, mask = (_pad(tensor[:, : lengths[0]], num_tokens) for tensor in (caption, mask))
        image_rotation = (part.expand(num_rows, -1, -1) for part in self._batch.image)
        rotation = (part.expand(num_rows, -1, -1) for part in self._batch.caption)
        lengths = [num_tokens] * num_rows
        return x, *image_rotation, caption, *rotation, image_lengths, lengths, image_mask, mask


def _pad(tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Zeros after dimension 1 up to ``num_tokens``, which is at least what there are."""
    missing = num_tokens - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing)) if missing else tensor
