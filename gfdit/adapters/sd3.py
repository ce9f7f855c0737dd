"""Stable Diffusion 3 and 3.5: two streams that join in attention, and image-only attention in some blocks.

Guidance runs with a scale above 1, against an empty text where no negative prompt is given. Image tokens are
split, text tokens are on every rank: see :class:`gfdit.omni.joint_attention.JointAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.denoise_loop import rows, timestep_rows
from gfdit.adapters.image_vae import decode_image
from gfdit.adapters.pooled_text import PooledTextAdapter
from gfdit.adapters.sampling import check_sides, image_size, num_images
from gfdit.adapters.sequence_plan import SequencePlan, Split
from gfdit.core.tasks import Shape

# The VAE halves each side three times and the transformer takes 2 x 2 patches; both are fixed by the family.
_ALIGNMENT = 16
_DEFAULT_TEXT_TOKENS = 256


class StableDiffusion3Adapter(PooledTextAdapter):
    """Adapter for ``StableDiffusion3Pipeline``."""

    pipeline_class = "StableDiffusion3Pipeline"
    default_num_steps = 28
    max_text_tokens = 512
    sequence_plan = SequencePlan({"pos_embed": {0: Split(1, 3, output=True)}}, gather="proj_out")

    # Engine half

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        height, width = image_size(request.sampling_params)
        longest = self.od_config.tf_model_config.get("pos_embed_max_size", 192) * _ALIGNMENT
        check_sides(height, width, _ALIGNMENT, (longest, longest))
        return Shape(height, width)

    def is_guided(self, prompt: Any, sampling: Any) -> bool:
        return sampling.guidance_scale > 1

    # Worker half

    def restore_pipeline(self, state: StepRequestState) -> None:
        super().restore_pipeline(state)
        self.pipeline._guidance_scale = state.sampling.guidance_scale
        self.pipeline._current_timestep = state.current_timestep
        self.pipeline._num_timesteps = state.total_steps

    def embed(self, sampling: Any, **text: Any) -> dict[str, torch.Tensor]:
        """One row each, (1, T, D) and (1, D), broadcast over the images later."""
        embeds, pooled = self.pipeline.encode_prompt(
            **text,
            prompt_2="",
            prompt_3="",
            max_sequence_length=sampling.max_sequence_length or _DEFAULT_TEXT_TOKENS,
        )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def prepare_state(self, state: StepRequestState) -> None:
        pipeline, sampling = self.pipeline, state.sampling
        state.latents = pipeline.prepare_latents(
            num_images(sampling),
            pipeline.transformer.in_channels,
            sampling.height,
            sampling.width,
            [sampling.generator] * num_images(sampling),  # each image is drawn by itself, as in forward
            sampling.latents,
        )
        self.prepare_steps(state)

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        pipeline = self.pipeline
        common = {
            "hidden_states": rows([state.latents for state in states], [state.latents for state in states]),
            "timestep": timestep_rows(states, pipeline.device).to(pipeline.od_config.dtype),
            "return_dict": False,
        }
        return self.predict_guided(states, states[0].sampling.guidance_scale, common)

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        if state.sampling.output_type == "latent":
            return DiffusionOutput(output=state.latents)
        return decode_image(self.pipeline.vae, state.latents.to(self.pipeline.vae.dtype))
