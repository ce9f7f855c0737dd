"""What a request asks of a Wan pipeline, with the defaults that vLLM-Omni's ``forward`` fills in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import PIL.Image
import torch
from vllm.transformers_utils.config import get_hf_file_to_dict
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.wan2_2.chunked_mp4 import (
    resolve_wan_preencode_batch_frames,
    resolve_wan_preencode_mp4,
    resolve_wan_video_codec_options,
)
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import (
    FASTWAN_DMD_TIMESTEPS,
    resolve_wan_flow_shift,
    resolve_wan_guidance_scales,
    resolve_wan_sample_solver,
)
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.utils.hf_utils import get_diffusion_model_index
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from gfdit.core.tasks import Shape

DMD = "dmd"
"""The name here of FastWan's sampling: three fixed timesteps, with fresh noise between them."""

_DEFAULT_HEIGHT, _DEFAULT_WIDTH, _DEFAULT_NUM_FRAMES = 480, 832, 81
_DEFAULT_NUM_STEPS = 40
_DEFAULT_BOUNDARY_RATIO = 0.875


@dataclass(frozen=True, slots=True)
class WanOptions:
    """``guidance`` are the scales above and below the boundary, ``boundary_ratio`` of the training timesteps.

    ``solver`` is ``unipc``, ``euler`` or :data:`DMD`, which ignores ``flow_shift``.
    """

    num_steps: int
    guidance: tuple[float, float]
    boundary_ratio: float
    solver: str
    flow_shift: float

    @classmethod
    def of(
        cls, request: OmniDiffusionRequest, od_config: OmniDiffusionConfig, default_guidance: float
    ) -> WanOptions:
        """Raises ``ValueError`` naming the field for what the pipeline could not take.

        The default solver is always the pipeline's first: there it is the one that the request before asked for.
        """
        sampling = request.sampling_params
        dmd = is_dmd(od_config)
        boundary_ratio = sampling.boundary_ratio if od_config.boundary_ratio is None else od_config.boundary_ratio
        num_steps = sampling.num_inference_steps
        options = cls(
            num_steps=len(FASTWAN_DMD_TIMESTEPS)
            if dmd
            else _DEFAULT_NUM_STEPS
            if num_steps is None
            else num_steps,
            guidance=resolve_wan_guidance_scales(sampling, 1.0 if dmd else default_guidance),
            boundary_ratio=_DEFAULT_BOUNDARY_RATIO if boundary_ratio is None else boundary_ratio,
            solver=DMD if dmd else resolve_wan_sample_solver(request),
            flow_shift=resolve_wan_flow_shift(request, od_config),
        )
        if not (math.isfinite(options.flow_shift) and options.flow_shift > 0):
            raise ValueError(f"flow_shift must be a positive number, got {options.flow_shift}")
        _check_output(sampling)
        return options

    @property
    def guided(self) -> bool:
        """Whether there is a step that computes both branches."""
        return max(self.guidance) > 1.0


def is_dmd(od_config: OmniDiffusionConfig) -> bool:
    """Whether the checkpoint is one of FastWan."""
    return od_config.model_class_name == "WanDMDPipeline"


@dataclass(frozen=True, slots=True)
class WanCheckpoint:
    """What the engine half knows of a checkpoint without loading it.

    ``alignment`` in pixels and ``frames_per_latent`` round sizes; ``max_positions`` bounds each side of the grid
    of patches. ``expand_timesteps`` says that a first frame enters as latents without noise, of timestep 0.
    """

    alignment: int
    frames_per_latent: int
    frames_per_patch: int
    max_positions: int
    expand_timesteps: bool

    @classmethod
    def of(cls, od_config: OmniDiffusionConfig) -> WanCheckpoint:
        model, revision = od_config.model, od_config.revision
        transformer = od_config.tf_model_config
        vae = get_hf_file_to_dict("vae/config.json", model, revision=revision) or {}
        index = get_diffusion_model_index(str(model), revision=revision) or {}
        frames_per_patch, patch_side, _ = transformer.get("patch_size", (1, 2, 2))
        return cls(
            alignment=vae.get("scale_factor_spatial", 8) * patch_side,
            frames_per_latent=vae.get("scale_factor_temporal", 4),
            frames_per_patch=frames_per_patch,
            max_positions=transformer.get("rope_max_seq_len", 1024),
            expand_timesteps=bool(index.get("expand_timesteps", False)),
        )

    def shape(self, sampling: Any) -> Shape:
        """The size that is made of the one asked for. Raises ``ValueError`` naming the side that is impossible."""
        height = self._side("height", sampling.height or _DEFAULT_HEIGHT)
        width = self._side("width", sampling.width or _DEFAULT_WIDTH)
        return Shape(height, width, self._num_frames(sampling.num_frames or _DEFAULT_NUM_FRAMES))

    def _side(self, name: str, pixels: int) -> int:
        most = self.alignment * self.max_positions
        if not self.alignment <= pixels <= most:
            raise ValueError(f"{name} must be between {self.alignment} and {most} pixels, got {pixels}")
        return pixels // self.alignment * self.alignment

    def _num_frames(self, num_frames: int) -> int:
        most = self.frames_per_latent * (self.max_positions * self.frames_per_patch - 1) + 1
        if not 1 <= num_frames <= most:
            raise ValueError(f"num_frames must be between 1 and {most}, got {num_frames}")
        if num_frames % self.frames_per_latent == 1:
            return num_frames
        return num_frames // self.frames_per_latent * self.frames_per_latent + 1


def input_image(request: OmniDiffusionRequest, name: str) -> PIL.Image.Image | None:
    """The image ``name`` of a request's prompt. Raises ``ValueError`` naming it for anything but one image."""
    prompt = request.prompt
    data = None if isinstance(prompt, str) else prompt.get("multi_modal_data")
    image = (data or {}).get(name)
    if image is None or isinstance(image, PIL.Image.Image):
        return image
    raise ValueError(f"{name} must be one image, got {type(image).__name__}")


def prompt_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt.get("prompt") or ""


def given_embeds(prompt: Any, name: str) -> torch.Tensor | None:
    """Embeddings that the request brings, (1, tokens, width)."""
    embeds = DiffusionRequestBatch.get_prompt_field(prompt, name)
    return None if embeds is None else embeds.unsqueeze(0)


def _check_output(sampling: Any) -> None:
    """What the decode task will read."""
    if resolve_wan_preencode_mp4(sampling, output_type=sampling.output_type or "np"):
        resolve_wan_preencode_batch_frames(sampling)
        resolve_wan_video_codec_options(sampling)
