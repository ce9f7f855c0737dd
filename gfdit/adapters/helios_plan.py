"""What a request asks of Helios: chunks, their sizes and steps, and the history in view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from vllm_omni.diffusion.request import OmniDiffusionRequest

from gfdit.core.tasks import Shape

# Of the family's VAE: pixels and frames that one latent stands for.
_PIXELS_PER_LATENT = 8
_FRAMES_PER_LATENT = 4
_ALIGNMENT = 16
_PATCH = 2
# Latents (frames, height, width) of which one token is made, by how long ago the frames were.
_HISTORY_PATCHES = ((1, 2, 2), (2, 4, 4), (4, 8, 8))


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What a request asks of Helios; field for field what ``prepare_encode`` reads, with its defaults.

    ``height`` and ``width`` in pixels, ``frames_per_chunk`` in latent frames. ``steps`` of the first chunk and of
    every other one. ``history`` are the latent frames in view, the most recent first; ``num_sizes`` is 1 without a
    pyramid.
    """

    height: int
    width: int
    num_chunks: int
    frames_per_chunk: int
    steps: tuple[int, int]
    history: tuple[int, int, int]
    num_sizes: int
    guidance_scale: float
    zero_star: bool

    @classmethod
    def of(cls, request: OmniDiffusionRequest, distilled: bool) -> Self:
        """Raises ``ValueError`` naming what Helios cannot take."""
        sampling = request.sampling_params
        extra = sampling.extra_args or {}
        frames_per_chunk = _whole("num_latent_frames_per_chunk", extra.get("num_latent_frames_per_chunk", 9))
        window = (frames_per_chunk - 1) * _FRAMES_PER_LATENT + 1
        num_frames = _whole("num_frames", sampling.num_frames or extra.get("frame_num", 132))
        pyramid = bool(extra.get("is_enable_stage2", False))
        num_sizes = _whole("pyramid_num_stages", extra.get("pyramid_num_stages", 3)) if pyramid else 1
        height, width = (
            _side(name, given or extra.get(name, default), num_sizes)
            for name, given, default in (("height", sampling.height, 384), ("width", sampling.width, 640))
        )
        guidance_scale = extra.get("guidance_scale", 5.0)
        if sampling.guidance_scale_provided:
            guidance_scale = sampling.guidance_scale
        long, mid, recent = _history(extra.get("history_sizes", [16, 2, 1]))
        return cls(
            height=height,
            width=width,
            num_chunks=-(-num_frames // window),
            frames_per_chunk=frames_per_chunk,
            steps=_steps(sampling, extra, pyramid, num_sizes, distilled),
            history=(recent + 1, mid, long),  # with the first frame, or one more
            num_sizes=num_sizes,
            guidance_scale=float(guidance_scale),
            zero_star=bool(extra.get("use_cfg_zero_star", False)),
        )

    @property
    def shape(self) -> Shape:
        window = (self.frames_per_chunk - 1) * _FRAMES_PER_LATENT + 1
        return Shape(self.height, self.width, self.num_chunks * window)

    @property
    def num_steps(self) -> int:
        first, other = self.steps
        return first + (self.num_chunks - 1) * other

    def token_counts(self) -> list[int]:
        """Tokens of each part that the transformer splits by itself: the chunk at every size, and the history."""
        height, width = self.height // _PIXELS_PER_LATENT, self.width // _PIXELS_PER_LATENT
        counts = [
            self.frames_per_chunk * (height // 2**size // _PATCH) * (width // 2**size // _PATCH)
            for size in range(self.num_sizes)
        ]
        for num_frames, (frames, rows, columns) in zip(self.history, _HISTORY_PATCHES, strict=True):
            counts.append(-(-num_frames // frames) * -(-height // rows) * -(-width // columns))
        return counts


def _steps(
    sampling: Any, extra: dict[str, Any], pyramid: bool, num_sizes: int, distilled: bool
) -> tuple[int, int]:
    """Of the first chunk and of every other one, as the scheduler makes them."""
    if not pyramid:
        asked = sampling.num_inference_steps or extra.get("num_inference_steps", 50)
        count = _whole("num_inference_steps", asked)
        # The scheduler of a distilled model drops the last step, but for a single one.
        count = max(1, count - 1) if distilled else count
        return count, count
    per_size = extra.get("pyramid_num_inference_steps_list", [10, 10, 10])
    if not isinstance(per_size, (list, tuple)) or len(per_size) != num_sizes:
        raise ValueError(
            f"pyramid_num_inference_steps_list must be a list of {num_sizes} numbers, one for each of "
            f"pyramid_num_stages, got {per_size!r}"
        )
    count = sum(_whole("pyramid_num_inference_steps_list", steps) for steps in per_size)
    return (2 * count if distilled and extra.get("is_amplify_first_chunk") else count), count


def _whole(name: str, value: Any) -> int:
    """Raises ``ValueError`` naming the field unless ``value`` is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return int(value)


def _side(name: str, value: Any, num_sizes: int) -> int:
    """In pixels, rounded down as Helios does; every size of a pyramid must be one of whole patches."""
    side = _whole(name, value) // _ALIGNMENT * _ALIGNMENT
    smallest = _ALIGNMENT * 2 ** (num_sizes - 1)
    if not side or side % smallest:
        several = "a multiple of" if num_sizes > 1 else "at least"
        raise ValueError(f"{name} must be {several} {smallest} pixels, got {value}")
    return side


def _history(sizes: Any) -> list[int]:
    if not isinstance(sizes, (list, tuple)) or len(sizes) != len(_HISTORY_PATCHES):
        raise ValueError(f"history_sizes must be a list of {len(_HISTORY_PATCHES)} numbers, got {sizes!r}")
    return sorted((_whole("history_sizes", size) for size in sizes), reverse=True)
