"""FLUX.1: guidance is distilled into an embedding; a negative prompt and ``true_cfg_scale`` > 1 guide for real.

The transformer has blocks with a stream for text and one for the image, then blocks with a single stream of both.
Image tokens are split, text tokens are on every rank: see :class:`gfdit.omni.joint_attention.JointAttention`.
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
from gfdit.adapters.prompts import given_embeddings, negative_text
from gfdit.adapters.sampling import num_images, rounded_size
from gfdit.adapters.sequence_plan import SequencePlan, Split
from gfdit.core.tasks import Shape

# The VAE halves each side three times and latents are packed 2 x 2; both are fixed by the family.
_ALIGNMENT = 16


class FluxAdapter(PooledTextAdapter):
    """Adapter for ``FluxPipeline``."""

    pipeline_class = "FluxPipeline"
    default_num_steps = 28
    max_text_tokens = 512
    # Rotary embeddings are made of positions, text before image: splitting those of the image splits them.
    sequence_plan = SequencePlan({"": {"hidden_states": Split(1, 3), "img_ids": Split(0, 2)}}, gather="proj_out")

    # Engine half

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        return Shape(*rounded_size(request.sampling_params, _ALIGNMENT))

    def is_guided(self, prompt: Any, sampling: Any) -> bool:
        if (sampling.true_cfg_scale or 1.0) <= 1:
            return False
        return negative_text(prompt) is not None or given_embeddings(prompt)["negative_prompt_embeds"] is not None

    # Worker half

    def restore_pipeline(self, state: StepRequestState) -> None:
        super().restore_pipeline(state)
        self.pipeline._guidance_scale = state.sampling.guidance_scale
        self.pipeline._joint_attention_kwargs = {}
        self.pipeline._current_timestep = state.current_timestep
        self.pipeline._num_timesteps = state.total_steps
        self.pipeline.transformer.do_true_cfg = state.do_true_cfg

    def encode_state(self, state: StepRequestState) -> None:
        super().encode_state(state)
        pipeline, sampling = self.pipeline, state.sampling
        state.extra["image_ids"] = pipeline._prepare_latent_image_ids(
            sampling.height // _ALIGNMENT, sampling.width // _ALIGNMENT, pipeline.device, state.prompt_embeds.dtype
        )

    def embed(self, sampling: Any, **text: Any) -> dict[str, torch.Tensor]:
        """Beside embeddings the positions of the tokens, (T, 3)."""
        embeds, pooled, positions = self.pipeline.encode_prompt(
            **text,
            prompt_2=None,
            num_images_per_prompt=num_images(sampling),
            max_sequence_length=sampling.max_sequence_length or self.max_text_tokens,
        )
        return {"prompt_embeds": embeds, "pooled": pooled, "text_ids": positions}

    def prepare_state(self, state: StepRequestState) -> None:
        pipeline, sampling = self.pipeline, state.sampling
        state.latents, _ = pipeline.prepare_latents(
            num_images(sampling),
            pipeline.transformer.in_channels // 4,
            sampling.height,
            sampling.width,
            state.prompt_embeds.dtype,
            pipeline.device,
            [sampling.generator] * num_images(sampling),  # each image is drawn by itself, as in forward
            sampling.latents,
        )
        self.prepare_steps(state)

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        pipeline, first = self.pipeline, states[0]
        latents = rows([state.latents for state in states], [state.latents for state in states])
        guidance = None
        if pipeline.transformer.guidance_embeds:
            scale = first.sampling.guidance_scale
            guidance = latents.new_full([1], scale, dtype=torch.float32).expand(latents.shape[0])
        common = {
            "hidden_states": latents,
            "timestep": timestep_rows(states, latents.device).to(latents.dtype) / 1000,
            "guidance": guidance,
            "img_ids": first.extra["image_ids"],
            "joint_attention_kwargs": pipeline.joint_attention_kwargs,
            "return_dict": False,
        }
        return self.predict_guided(states, first.sampling.true_cfg_scale or 1.0, common)

    def text_arguments(self, states: Sequence[StepRequestState], sign: str) -> dict[str, torch.Tensor]:
        return {**super().text_arguments(states, sign), "txt_ids": states[0].extra[f"{sign}text_ids"]}

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        sampling = state.sampling
        if sampling.output_type == "latent":
            return DiffusionOutput(output=state.latents)
        size = (sampling.height, sampling.width, self.pipeline.vae_scale_factor)
        return decode_image(self.pipeline.vae, self.pipeline._unpack_latents(state.latents, *size))
