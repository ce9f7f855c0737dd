"""Z-Image's guidance on several ranks: both branches are rows of one batch upstream, and ranks take half each.

Upstream pads the shorter captions of a batch with zeros, which attention sees, and gives all rows the positions of
the first. So what comes out of a row depends on the others: hooks make it the same where those are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gfdit.adapters.forward.known import Sizes
from gfdit.adapters.sequence_plan import SequencePlan, Split

CAPTION_MULTIPLE = 32
"""Tokens of a caption are padded to a multiple of this."""
_PATCH = 16  # pixels a side: the VAE halves it three times and the transformer takes 2 x 2 patches
# vLLM-Omni's own plan, but that every split pads: it takes only lengths that divide by the degree.
SEQUENCE_PLAN = SequencePlan(
    {
        "unified_prepare": {
            0: Split(1, 3, output=True),  # tokens
            1: Split(1, 3, output=True),  # cosines
            2: Split(1, 3, output=True),  # sines
            3: Split(1, 2, output=True),  # mask
        }
    },
    gather="all_final_layer.2-1",
)


def sizes(od_config: Any) -> Sizes:
    _, rows, columns = _positions(od_config)
    return Sizes(_PATCH, exact=True, longest=(rows * _PATCH, columns * _PATCH))


def max_text_tokens(od_config: Any) -> int:
    """The image takes the position after the caption, and padding that of 0."""
    return (_positions(od_config)[0] - 2) // CAPTION_MULTIPLE * CAPTION_MULTIPLE


def _positions(od_config: Any) -> tuple[int, int, int]:
    """How many rotary positions there are: of captions and what goes with them, rows, columns of patches."""
    from gfdit.adapters.tiny_models.own_dimensions import transformer_field

    return tuple(transformer_field(od_config, "axes_lens"))


def split_rows(pipeline: Any) -> None:
    """Have passes of an even number of rows split among two CFG ranks."""
    transformer = pipeline.transformer
    if not hasattr(transformer, "gfdit_rows"):
        transformer.gfdit_rows = _Rows(transformer)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a row takes from the batch it is of: length of the longest caption, rotation of the first row.

    ``image`` and ``caption`` are cosines and sines, (1, tokens, d), of captions with zeros up to ``num_tokens``.
    """

    num_tokens: int
    image: tuple[torch.Tensor, ...]
    caption: tuple[torch.Tensor, ...]


class _Rows:
    """In place of the transformer's ``forward``.

    In a batch a shorter caption is followed by zeros, in the caption's own blocks and then at the end of the joint
    sequence, and all rows are rotated by the positions of the first: those of the image begin where its caption
    ends. Hooks on the transformer do the same while a part of a batch is computed.
    """

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._forward = transformer.forward
        self._batch: _Batch | None = None
        for block in transformer.noise_refiner:
            block.register_forward_pre_hook(self._in_image_block)
        for block in transformer.context_refiner:
            block.register_forward_pre_hook(self._in_caption_block)
        transformer.unified_prepare.register_forward_pre_hook(self._in_joining)
        transformer.forward = self.forward

    def forward(
        self, x: list[torch.Tensor], t: torch.Tensor, cap_feats: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """N images (C, 1, H, W), timesteps (N,) and captions (tokens, D) to N predictions like the images."""
        from vllm_omni.diffusion.distributed import parallel_state as state

        if state.get_classifier_free_guidance_world_size() == 1 or len(x) % 2 or args or kwargs:
            return self._forward(x, t, cap_feats, *args, **kwargs)
        half = len(x) // 2
        own = slice(half) if state.get_classifier_free_guidance_rank() == 0 else slice(half, None)
        with self.part_of(cap_feats, x[0]):
            made = torch.stack(self._forward(x[own], t[own], cap_feats[own])[0])
        parts = state.get_cfg_group().all_gather(made, separate_tensors=True)
        return [row for part in parts for row in part.unbind()], {}

    @contextmanager
    def part_of(self, captions: list[torch.Tensor], image: torch.Tensor) -> Iterator[None]:
        """A batch with these captions, and images like ``image``."""
        grid, rope = self._transformer.create_coordinate_grid, self._transformer.rope_embedder
        lengths = [-(-len(caption) // CAPTION_MULTIPLE) * CAPTION_MULTIPLE for caption in captions]
        rows, columns = image.shape[-2] // 2, image.shape[-1] // 2
        positions = grid((1, rows, columns), (lengths[0] + 1, 0, 0), image.device).flatten(0, 2)
        positions = torch.nn.functional.pad(positions, (0, 0, 0, -len(positions) % CAPTION_MULTIPLE))
        caption = grid((lengths[0], 1, 1), (1, 0, 0), image.device).flatten(0, 2)
        self._batch = _Batch(
            max(lengths),
            tuple(part[None] for part in rope(positions)),
            tuple(_pad(part[None], max(lengths)) for part in rope(caption)),
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
        caption, mask = (
            torch.cat([_pad(row[None, :length], num_tokens) for row, length in zip(tensor, lengths, strict=True)])
            for tensor in (caption, mask)
        )
        image_rotation = (part.expand(num_rows, -1, -1) for part in self._batch.image)
        rotation = (part.expand(num_rows, -1, -1) for part in self._batch.caption)
        lengths = [num_tokens] * num_rows
        return x, *image_rotation, caption, *rotation, image_lengths, lengths, image_mask, mask


def _pad(tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Zeros after dimension 1 up to ``num_tokens``, which is at least what there are."""
    missing = num_tokens - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing)) if missing else tensor
