"""Stable Diffusion 3 and 3.5: two streams that join in attention, and image-only attention in some blocks.

Guidance runs with a scale above 1, against an empty text where no negative prompt is given. Image tokens are
split, text tokens are on every rank: see :class:`gfdit.omni.joint_ulysses.JointUlysses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.base import Trajectory
from gfdit.adapters.denoise_loop import DenoiseLoopAdapter, rows, timestep_rows
from gfdit.adapters.prompts import given_embeddings, negative_text, positive_text
from gfdit.adapters.sampling import check_max_sequence_length, check_sides, image_size, num_images
from gfdit.adapters.sequence_plan import SequencePlan, split
from gfdit.core.tasks import Shape

# The VAE halves each side three times and the transformer takes 2 x 2 patches; both are fixed by the family.
_ALIGNMENT = 16
_DEFAULT_TEXT_TOKENS = 256
_MAX_TEXT_TOKENS = 512


class StableDiffusion3Adapter(DenoiseLoopAdapter):
    """Adapter for ``StableDiffusion3Pipeline``."""

    pipeline_class = "StableDiffusion3Pipeline"
    default_num_steps = 28
    batches = True
    sequence_plan = SequencePlan({"pos_embed": {0: split(1, 3, output=True)}}, gather="proj_out")

    # Engine half

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        check_max_sequence_length(request.sampling_params, _MAX_TEXT_TOKENS)
        given_embeddings(request.prompt)
        return super().convert(request, max_sp)

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        height, width = image_size(request.sampling_params)
        longest = self.od_config.tf_model_config.get("pos_embed_max_size", 192) * _ALIGNMENT
        check_sides(height, width, _ALIGNMENT, (longest, longest))
        return Shape(height, width)

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        return request.sampling_params.guidance_scale > 1

    # Worker half

    def restore_pipeline(self, state: StepRequestState) -> None:
        super().restore_pipeline(state)
        self.pipeline._guidance_scale = state.sampling.guidance_scale
        self.pipeline._current_timestep = state.current_timestep
        self.pipeline._num_timesteps = state.total_steps

    def encode_state(self, state: StepRequestState) -> None:
        sampling, given = state.sampling, given_embeddings(state.prompt)
        sampling.height, sampling.width = image_size(sampling)
        state.do_true_cfg = sampling.guidance_scale > 1
        state.prompt_embeds, state.extra["pooled"] = self._encode(
            positive_text(state.prompt), sampling, given["prompt_embeds"], given["pooled_prompt_embeds"]
        )
        if state.do_true_cfg:
            state.negative_prompt_embeds, state.extra["negative_pooled"] = self._encode(
                negative_text(state.prompt) or "",
                sampling,
                given["negative_prompt_embeds"],
                given["negative_pooled_prompt_embeds"],
            )

    def _encode(
        self, text: str, sampling: Any, embeds: torch.Tensor | None, pooled: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of tokens (1, T, D) and of the whole text (1, D), broadcast over the images later."""
        return self.pipeline.encode_prompt(
            prompt=[text] if embeds is None else None,
            prompt_2="",
            prompt_3="",
            prompt_embeds=embeds,
            pooled_prompt_embeds=pooled,
            max_sequence_length=sampling.max_sequence_length or _DEFAULT_TEXT_TOKENS,
        )

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
        num_steps = sampling.num_inference_steps or self.default_num_steps
        state.timesteps, _ = pipeline.prepare_timesteps(num_steps, sampling.sigmas, state.latents.shape[1])
        state.scheduler = self.own_scheduler()

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        pipeline, first = self.pipeline, states[0]
        latents = rows([state.latents for state in states], [state.latents for state in states])
        common = {
            "hidden_states": latents,
            "timestep": timestep_rows(states).to(device=pipeline.device, dtype=pipeline.od_config.dtype),
            "return_dict": False,
        }
        return pipeline.predict_noise_maybe_with_cfg(
            first.do_true_cfg,
            first.sampling.guidance_scale,
            {**common, **_text(states, "")},
            {**common, **_text(states, "negative_")} if first.do_true_cfg else None,
            False,
        )

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        if state.sampling.output_type == "latent":
            return DiffusionOutput(output=state.latents)
        vae = self.pipeline.vae
        latents = (state.latents.to(vae.dtype) / vae.config.scaling_factor) + vae.config.shift_factor
        return DiffusionOutput(output=vae.decode(latents, return_dict=False)[0])


def _text(states: Sequence[StepRequestState], sign: str) -> dict[str, torch.Tensor]:
    """Text arguments of the transformer for one branch of guidance; ``sign`` is "" or "negative_"."""
    latents = [state.latents for state in states]
    return {
        "encoder_hidden_states": rows([getattr(state, f"{sign}prompt_embeds") for state in states], latents),
        "pooled_projections": rows([state.extra[f"{sign}pooled"] for state in states], latents),
    }
