"""What a request asks of Helios: a video in chunks, each in as many steps as one, of one size or of a pyramid."""

from __future__ import annotations

from typing import Any

from gfdit.adapters.forward.known import Known, Sizes, asked_shape, read_config
from gfdit.core.tasks import Shape

# Of the family's VAE: pixels and frames that one latent stands for; and latents of a token's side.
_PIXELS_PER_LATENT, _FRAMES_PER_LATENT, _PATCH = 8, 4, 2
# Latents (frames, height, width) of which one token is made, by how long ago the frames were.
_HISTORY_PATCHES = ((1, 2, 2), (2, 4, 4), (4, 8, 8))


LATENTS_PER_CHUNK = 9
WINDOW = (LATENTS_PER_CHUNK - 1) * _FRAMES_PER_LATENT + 1
"""Frames of a chunk; chunks are made whole."""
INDICES = ("indices_hidden_states", *(f"indices_latents_history_{part}" for part in ("short", "mid", "long")))
"""Arguments of the model that say which frames it is given."""
# Latent frames in view, the most recent first, with the first of all; ``forward`` takes no others.
_HISTORY = (2, 2, 16)
_FIXED = {"num_latent_frames_per_chunk": LATENTS_PER_CHUNK, "history_sizes": [16, 2, 1]}


def look(od_config: Any, request: Any, default: Shape) -> Known:
    """With the defaults of the pipeline's ``forward``. It splits tokens by itself, and pads what does not divide
    with some that attention sees: degrees have to divide the chunk at every size, and each part of the history.
    """
    sampling = request.sampling_params
    extra = sampling.extra_args or {}
    for name, fixed in _FIXED.items():
        if extra.get(name, fixed) != fixed:
            raise ValueError(f"{name} must be {fixed}, which is what this pipeline has, got {extra[name]!r}")
    pyramid = bool(extra.get("is_enable_stage2", False))
    num_sizes = _whole("pyramid_num_stages", extra.get("pyramid_num_stages", 3)) if pyramid else 1
    asked = asked_shape(request, default)
    shape = Sizes().shape(asked)
    if pyramid:  # every size is one of whole patches
        Sizes(16 * 2 ** (num_sizes - 1), exact=True).shape(shape)
    num_chunks = -(-asked.num_frames // WINDOW)
    distilled = read_config(od_config, "scheduler/scheduler_config.json").get("scheduler_type") == "dmd"
    first, other = _steps(sampling, extra, num_sizes if pyramid else None, distilled)
    scale = sampling.guidance_scale if sampling.guidance_scale_provided else 5.0
    return Known(
        shape._replace(num_frames=num_chunks * WINDOW),
        first + (num_chunks - 1) * other,
        # A pyramid and CFG-Zero* compute both branches one after the other.
        scale > 1 and not pyramid and not extra.get("use_cfg_zero_star", False),
        _token_counts(shape.height, shape.width, num_sizes),
    )


def _token_counts(height: int, width: int, num_sizes: int) -> tuple[int, ...]:
    rows, columns = height // _PIXELS_PER_LATENT, width // _PIXELS_PER_LATENT
    scales = [_PATCH * 2**size for size in range(num_sizes)]
    counts = [LATENTS_PER_CHUNK * (rows // scale) * (columns // scale) for scale in scales]
    for in_view, (frames, high, wide) in zip(_HISTORY, _HISTORY_PATCHES, strict=True):
        counts.append(-(-in_view // frames) * -(-rows // high) * -(-columns // wide))
    return tuple(counts)


def _steps(sampling: Any, extra: dict[str, Any], num_sizes: int | None, distilled: bool) -> tuple[int, int]:
    """Of the first chunk and of every other one, as the scheduler makes them."""
    if num_sizes is None:
        count = _whole("num_inference_steps", sampling.num_inference_steps or 50)
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
