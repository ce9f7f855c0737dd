"""FLUX.1: guidance is distilled into an embedding; a negative prompt and ``true_cfg_scale`` > 1 guide for real.

The transformer has blocks with a stream for text and one for the image, then blocks with a single stream of both.
Image tokens are split, text tokens are on every rank: see :class:`gfdit.omni.joint_ulysses.JointUlysses`.
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
from gfdit.adapters.sampling import check_max_sequence_length, image_size, num_images
from gfdit.adapters.sequence_plan import SequencePlan, split
from gfdit.core.tasks import Shape

# The VAE halves each side three times and latents are packed 2 x 2; both are fixed by the family.
_ALIGNMENT = 16
_MAX_TEXT_TOKENS = 512


class FluxAdapter(DenoiseLoopAdapter):
    """Adapter for ``FluxPipeline``."""

    pipeline_class = "FluxPipeline"
    default_num_steps = 28
    batches = True
    # Rotary embeddings are made of positions, text before image: splitting those of the image splits them.
    sequence_plan = SequencePlan({"": {"hidden_states": split(1, 3), "img_ids": split(0, 2)}}, gather="proj_out")

    # Engine half

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        check_max_sequence_length(request.sampling_params, _MAX_TEXT_TOKENS)
        given_embeddings(request.prompt)
        return super().convert(request, max_sp)

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        """What the pipeline makes of the size asked for: it rounds down."""
        height, width = image_size(request.sampling_params)
        for name, side in (("height", height), ("width", width)):
            if side < _ALIGNMENT:
                raise ValueError(f"{name} must be at least {_ALIGNMENT} pixels, got {side}")
        return Shape(height // _ALIGNMENT * _ALIGNMENT, width // _ALIGNMENT * _ALIGNMENT)

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        return _guided(request.prompt, request.sampling_params)

    # Worker half

    def restore_pipeline(self, state: StepRequestState) -> None:
        super().restore_pipeline(state)
        self.pipeline._guidance_scale = state.sampling.guidance_scale
        self.pipeline._joint_attention_kwargs = {}
        self.pipeline._current_timestep = state.current_timestep
        self.pipeline._num_timesteps = state.total_steps
        self.pipeline.transformer.do_true_cfg = state.do_true_cfg

    def encode_state(self, state: StepRequestState) -> None:
        sampling, given = state.sampling, given_embeddings(state.prompt)
        sampling.height, sampling.width = image_size(sampling)
        state.do_true_cfg = _guided(state.prompt, sampling)
        state.prompt_embeds, pooled, text_ids = self._encode(
            positive_text(state.prompt), sampling, given["prompt_embeds"], given["pooled_prompt_embeds"]
        )
        state.extra.update(pooled=pooled, text_ids=text_ids)
        if state.do_true_cfg:
            state.negative_prompt_embeds, pooled, text_ids = self._encode(
                negative_text(state.prompt) or "",
                sampling,
                given["negative_prompt_embeds"],
                given["negative_pooled_prompt_embeds"],
            )
            state.extra.update(negative_pooled=pooled, negative_text_ids=text_ids)
        pipeline = self.pipeline
        state.extra["image_ids"] = pipeline._prepare_latent_image_ids(
            sampling.height // _ALIGNMENT, sampling.width // _ALIGNMENT, pipeline.device, state.prompt_embeds.dtype
        )

    def _encode(
        self, text: str, sampling: Any, embeds: torch.Tensor | None, pooled: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embeddings of tokens (images, T, D) and of the whole text (images, D), positions (T, 3)."""
        return self.pipeline.encode_prompt(
            prompt=[text] if embeds is None else None,
            prompt_2=None,
            prompt_embeds=embeds,
            pooled_prompt_embeds=pooled,
            num_images_per_prompt=num_images(sampling),
            max_sequence_length=sampling.max_sequence_length or _MAX_TEXT_TOKENS,
        )

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
        num_steps = sampling.num_inference_steps or self.default_num_steps
        state.timesteps, _ = pipeline.prepare_timesteps(num_steps, sampling.sigmas, state.latents.shape[1])
        state.scheduler = self.own_scheduler()

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        pipeline, first = self.pipeline, states[0]
        latents = rows([state.latents for state in states], [state.latents for state in states])
        guidance = None
        if pipeline.transformer.guidance_embeds:
            guidance = torch.full([1], first.sampling.guidance_scale, dtype=torch.float32).expand(latents.shape[0])
        common = {
            "hidden_states": latents,
            "timestep": timestep_rows(states).to(device=latents.device, dtype=latents.dtype) / 1000,
            "guidance": guidance,
            "img_ids": first.extra["image_ids"],
            "joint_attention_kwargs": pipeline.joint_attention_kwargs,
            "return_dict": False,
        }
        return pipeline.predict_noise_maybe_with_cfg(
            first.do_true_cfg,
            first.sampling.true_cfg_scale or 1.0,
            {**common, **_text(states, "")},
            {**common, **_text(states, "negative_")} if first.do_true_cfg else None,
            False,
        )

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        pipeline, sampling = self.pipeline, state.sampling
        if sampling.output_type == "latent":
            return DiffusionOutput(output=state.latents)
        vae = pipeline.vae
        latents = pipeline._unpack_latents(
            state.latents, sampling.height, sampling.width, pipeline.vae_scale_factor
        )
        latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
        return DiffusionOutput(output=vae.decode(latents, return_dict=False)[0])


def _text(states: Sequence[StepRequestState], sign: str) -> dict[str, torch.Tensor]:
    """Text arguments of the transformer for one branch of guidance; ``sign`` is "" or "negative_"."""
    latents = [state.latents for state in states]
    return {
        "encoder_hidden_states": rows([getattr(state, f"{sign}prompt_embeds") for state in states], latents),
        "pooled_projections": rows([state.extra[f"{sign}pooled"] for state in states], latents),
        "txt_ids": states[0].extra[f"{sign}text_ids"],
    }


def _guided(prompt: Any, sampling: Any) -> bool:
    """Whether both branches of guidance run."""
    if (sampling.true_cfg_scale or 1.0) <= 1:
        return False
    return negative_text(prompt) is not None or given_embeddings(prompt)["negative_prompt_embeds"] is not None
