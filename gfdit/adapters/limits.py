"""How much work one request may ask for."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from gfdit.core.json_fields import one_line, shown
from gfdit.core.tasks import Shape

_DEFAULT_SIDE = 1024
_SCALES = ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "strength")


@dataclass(frozen=True, slots=True)
class Limits:
    """Each check raises ``ValueError`` naming the field and what is allowed.

    The outputs of a request go through the model as one batch, so they share the pixels that it may have:
    ``max_pixels`` of a frame and of all images, ``max_video_pixels`` of all frames of all videos. ``max_steps``
    are the denoising steps of the whole request, be they of several chunks of a video.
    """

    max_steps: int
    max_outputs: int
    max_pixels: int
    max_video_pixels: int

    def check_fields(self, sampling: Any) -> None:
        """What vLLM-Omni's sampling parameters say by themselves, before anything is made of them.

        Not every endpoint checks types: a number may be anything that JSON has.
        """
        height = _whole("height", sampling.height) or _DEFAULT_SIDE
        width = _whole("width", sampling.width) or _DEFAULT_SIDE
        num_frames = _whole("num_frames", sampling.num_frames) or 1
        num_steps = _whole("num_inference_steps", sampling.num_inference_steps)
        _whole("num_outputs_per_prompt", sampling.num_outputs_per_prompt)
        _whole("resolution", getattr(sampling, "resolution", None))
        seed = sampling.seed
        if seed is not None and not (_is_integer(seed) and -(2**63) <= seed < 2**63):
            raise ValueError(f"seed must be an integer of 64 bits, got {shown(seed)}")
        for name in _SCALES:
            if (scale := getattr(sampling, name, None)) is not None and not _is_finite(scale):
                raise ValueError(f"{name} must be a number, got {shown(scale)}")
        self.check(Shape(height, width, num_frames), num_steps, sampling)

    def check(self, shape: Shape, num_steps: int, sampling: Any) -> None:
        """What an adapter makes of a request: its real size, and the steps of all its parts."""
        num_outputs = num_outputs_of(sampling)
        if num_outputs > self.max_outputs:
            raise ValueError(f"num_outputs_per_prompt (n) must be at most {self.max_outputs}, got {num_outputs}")
        if num_steps > self.max_steps:
            raise ValueError(
                f"num_inference_steps: {num_steps} steps in all, at most {self.max_steps} are allowed"
            )
        frame = shape.height * shape.width
        if frame > self.max_pixels:
            raise ValueError(f"size {shape} has {frame} pixels a frame, at most {self.max_pixels} are allowed")
        is_video = shape.num_frames > 1
        allowed = self.max_video_pixels if is_video else self.max_pixels
        if (pixels := num_outputs * shape.num_frames * frame) > allowed:
            name = "num_frames" if is_video else "num_outputs_per_prompt (n)"
            raise ValueError(
                f"{name}: {num_outputs} of {shape} have {pixels} pixels, at most {allowed} are allowed"
            )


def read_images(prompt: Any) -> None:
    """Decode the images of a request, which PIL leaves to whoever is first to look at a pixel.

    Raises ``ValueError`` naming the field of one that is broken: decoders raise whatever comes of its bytes.
    """
    from PIL import Image  # settings, which `gfdit serve` reads where nothing is installed, need the limits alone

    given = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
    for name, value in (given or {}).items():
        for image in value if isinstance(value, list) else [value]:
            if isinstance(image, Image.Image):
                try:
                    image.load()
                except Exception as error:
                    raise ValueError(f"{name} cannot be read: {one_line(error)}") from error


def check_lora(lora: Any) -> None:
    """Raise ``ValueError`` for adapters in a folder that is not there; a name of the hub is looked for later."""
    path = getattr(lora, "lora_path", None) or ""
    # ``Path.exists`` raises for a name that is too long.
    if path.startswith(("/", ".", "~")) and not os.path.exists(os.path.expanduser(path)):
        raise ValueError(f"lora: there is nothing at {shown(path)}")


def num_outputs_of(sampling: Any) -> int:
    """Images or videos of a request."""
    return max(1, sampling.num_outputs_per_prompt or 1)


def _whole(name: str, value: Any) -> int:
    """0 for what is not given, which every pipeline takes for its default."""
    if value is None:
        return 0
    if not _is_integer(value) or value < 0:
        raise ValueError(f"{name} must be a positive integer, got {shown(value)}")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max
