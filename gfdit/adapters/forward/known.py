"""What can be said of a request before its model is loaded: how large its output will be, and what it cannot be.

Pipelines check much of what they are asked for when they begin. Here is what they would fail at later, or make
something else of than was meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gfdit.core.tasks import Shape

_MAX_FRAMES = 1 << 30


class Known(NamedTuple):
    """``num_steps`` None: as the self-test has it; ``guided`` None: nobody knows whether both branches run.

    Sequence-parallel degrees have to divide all ``divided``.
    """

    shape: Shape
    num_steps: int | None = None
    guided: bool | None = None
    divided: tuple[int, ...] = ()


#: Of vLLM-Omni's ``OmniDiffusionConfig`` and ``OmniDiffusionRequest``, and the size where none is asked for.
#: Raises ``ValueError`` naming the field for what the model cannot take.
Look = Callable[[Any, Any, Shape], Known]


class Sizes(NamedTuple):
    """``multiple`` in pixels: other sides are rounded down, or refused if ``exact``. None: no bound is known."""

    multiple: int = 16
    exact: bool = False
    longest: tuple[int, int] | None = None
    smallest: int | None = None
    frames_per_latent: int = 1
    max_frames: int = _MAX_FRAMES

    def shape(self, asked: Shape) -> Shape:
        height, width = self._side("height", asked.height, 0), self._side("width", asked.width, 1)
        if not 1 <= asked.num_frames <= self.max_frames:
            raise ValueError(f"num_frames must be between 1 and {self.max_frames}, got {asked.num_frames}")
        frames = asked.num_frames
        if frames % self.frames_per_latent != 1 % self.frames_per_latent:
            frames = frames // self.frames_per_latent * self.frames_per_latent + 1
        return Shape(height, width, frames)

    def _side(self, name: str, side: int, index: int) -> int:
        longest = side if self.longest is None else self.longest[index]
        smallest = self.multiple if self.smallest is None else self.smallest
        if self.exact and (side % self.multiple or not self.multiple <= side <= longest):
            bound = "" if self.longest is None else f" up to {longest}"
            raise ValueError(f"{name} must be a multiple of {self.multiple}{bound} pixels, got {side}")
        if not smallest <= side <= longest:
            allowed = f"at least {smallest}" if self.longest is None else f"between {smallest} and {longest}"
            raise ValueError(f"{name} must be {allowed} pixels, got {side}")
        return max(self.multiple, side // self.multiple * self.multiple)


def given_of(request: Any) -> dict[str, Any]:
    """What the client gives beside a text, by kind."""
    return {} if isinstance(request.prompt, str) else request.prompt.get("multi_modal_data") or {}


def images_of(request: Any) -> list[Any]:
    """The input images of a request, however many it may have."""
    image = given_of(request).get("image")
    return image if isinstance(image, list) else [] if image is None else [image]


def asked_shape(request: Any, default: Shape) -> Shape:
    sampling = request.sampling_params
    height, width = sampling.height or default.height, sampling.width or default.width
    return Shape(height, width, sampling.num_frames or default.num_frames)


def unknown(od_config: Any, request: Any, default: Shape) -> Known:
    """Of a family of which nobody has said more."""
    return Known(asked_shape(request, default))


def sized(
    sizes: Sizes | Callable[[Any], Sizes],
    guided: Callable[[Any], bool],
    max_text_tokens: int | Callable[[Any], int] | None = None,
    *,
    needs_image: bool = False,
) -> Look:
    """A family whose sizes, and tokens of a text at most, follow from the configuration if they are not fixed."""

    def look(od_config: Any, request: Any, default: Shape) -> Known:
        if needs_image and not images_of(request):
            raise ValueError("image is missing: this model makes an image of one or more")
        limit = max_text_tokens(od_config) if callable(max_text_tokens) else max_text_tokens
        length = request.sampling_params.max_sequence_length
        if limit is not None and length is not None and not 1 <= length <= limit:
            raise ValueError(f"max_sequence_length must be between 1 and {limit}, got {length}")
        own = sizes(od_config) if callable(sizes) else sizes
        return Known(own.shape(asked_shape(request, default)), guided=guided(request))

    return look


def has_negative(request: Any) -> bool:
    """Whether the client says what not to draw, be it nothing."""
    fields = {} if isinstance(request.prompt, str) else request.prompt
    return any(fields.get(name) is not None for name in ("negative_prompt", "negative_prompt_embeds"))


def true_cfg(default: float) -> Callable[[Any], bool]:
    """Guided against a negative prompt, with a scale that is ``default`` if there is none."""
    return lambda request: has_negative(request) and (request.sampling_params.true_cfg_scale or default) > 1


def scale_above(threshold: float) -> Callable[[Any], bool]:
    """Guided with such a scale, with a negative prompt or without."""
    return lambda request: request.sampling_params.guidance_scale > threshold


def read_config(od_config: Any, path: str) -> dict[str, Any]:
    """A JSON file of the checkpoint, {} if it has none of that name."""
    from vllm.transformers_utils.config import get_hf_file_to_dict

    return get_hf_file_to_dict(path, od_config.model, revision=od_config.revision) or {}


def sd3_sizes(od_config: Any) -> Sizes:
    longest = int(od_config.tf_model_config.get("pos_embed_max_size", 192)) * 16
    return Sizes(exact=True, longest=(longest, longest))


def wan(default_guidance_scale: float) -> Look:
    """Where no guidance is asked for Wan has some of its own."""

    def look(od_config: Any, request: Any, default: Shape) -> Known:
        from vllm_omni.diffusion.models.wan2_2 import pipeline_wan2_2 as stock
        from vllm_omni.diffusion.utils.hf_utils import get_diffusion_model_index

        sampling, given = request.sampling_params, given_of(request)
        index = get_diffusion_model_index(str(od_config.model), revision=od_config.revision) or {}
        takes_image = od_config.model_class_name == "WanImageToVideoPipeline" or index.get("expand_timesteps")
        if given.get("image") is not None and not takes_image:
            raise ValueError("image is given, but this checkpoint makes videos of text alone")
        stock.resolve_wan_sample_solver(request)
        if not 0 < (shift := stock.resolve_wan_flow_shift(request, od_config)) < float("inf"):
            raise ValueError(f"flow_shift must be a positive number, got {shift}")
        if sampling.num_inference_steps == 0:
            raise ValueError("num_inference_steps must be at least 1, got 0")
        vae = read_config(od_config, "vae/config.json")
        transformer = od_config.tf_model_config
        frames_per_patch, patch, _ = transformer.get("patch_size", (1, 2, 2))
        multiple, frames = vae.get("scale_factor_spatial", 8) * patch, vae.get("scale_factor_temporal", 4)
        positions = transformer.get("rope_max_seq_len", 1024)
        longest = multiple * positions, multiple * positions
        max_frames = frames * (positions * frames_per_patch - 1) + 1
        shape = Sizes(multiple, False, longest, None, frames, max_frames).shape(asked_shape(request, default))
        if given.get("last_image") is not None and shape.num_frames < 2:
            raise ValueError("last_image needs a num_frames of at least 2")
        return Known(shape, guided=max(stock.resolve_wan_guidance_scales(sampling, default_guidance_scale)) > 1)

    return look
