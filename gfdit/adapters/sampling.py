"""What image pipelines read from a request's ``OmniDiffusionSamplingParams``, with the defaults they share."""

from __future__ import annotations

from typing import Any

_DEFAULT_SIDE = 1024


def image_size(sampling: Any) -> tuple[int, int]:
    """Height and width asked for, in pixels."""
    return sampling.height or _DEFAULT_SIDE, sampling.width or _DEFAULT_SIDE


def rounded_size(sampling: Any, alignment: int) -> tuple[int, int]:
    """Height and width as a pipeline makes them that rounds down to multiples of ``alignment``.

    Raises ``ValueError`` for a side shorter than that.
    """
    sides = image_size(sampling)
    for name, side in zip(("height", "width"), sides, strict=True):
        if side < alignment:
            raise ValueError(f"{name} must be at least {alignment} pixels, got {side}")
    height, width = (side // alignment * alignment for side in sides)
    return height, width


def num_images(sampling: Any) -> int:
    """Images per prompt."""
    return max(1, sampling.num_outputs_per_prompt or 1)


def check_sides(height: int, width: int, alignment: int, longest: tuple[int, int]) -> None:
    """Raises ``ValueError`` for a side that is no multiple of ``alignment`` or longer than its bound."""
    for name, side, bound in (("height", height, longest[0]), ("width", width, longest[1])):
        if side % alignment or not alignment <= side <= bound:
            raise ValueError(f"{name} must be a multiple of {alignment} up to {bound} pixels, got {side}")


def check_max_sequence_length(sampling: Any, limit: int) -> None:
    """Raises ``ValueError`` for more text tokens than ``limit``, or less than one."""
    length = sampling.max_sequence_length
    if length is not None and not 1 <= length <= limit:
        raise ValueError(f"max_sequence_length must be between 1 and {limit}, got {length}")
