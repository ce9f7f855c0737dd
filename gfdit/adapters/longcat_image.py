"""LongCat-Image: a language model rewrites the prompt, and guidance is renormalized. The example of the manual."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.longcat_image.pipeline_longcat_image import calculate_shift, retrieve_timesteps
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.denoise_loop import DenoiseLoopAdapter, rows, timestep_rows
from gfdit.adapters.image_vae import decode_image
from gfdit.adapters.prompts import negative_text, positive_text
from gfdit.adapters.sampling import rounded_size
from gfdit.adapters.sequence_plan import SequencePlan, Split
from gfdit.core.tasks import Shape

_ALIGNMENT = 16  # the VAE halves each side three times and latents are packed 2 x 2
_LATENT_CHANNELS = 16


class LongCatImageAdapter(DenoiseLoopAdapter):
    """Adapter for ``LongCatImagePipeline``."""

    captures_steps = True
    pipeline_class = "LongCatImagePipeline"
    step_extra = frozenset({"image_ids"})
    batches = True
    # The model's own plan takes only lengths that divide by the degree. Positions make the rotary embeddings.
    sequence_plan = SequencePlan({"": {"hidden_states": Split(1, 3), "img_ids": Split(0, 2)}}, gather="proj_out")

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        return Shape(*rounded_size(request.sampling_params, _ALIGNMENT))

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        return request.sampling_params.guidance_scale > 1  # without a negative prompt, too

    def new_state(self, call: Any) -> StepRequestState:
        state = super().new_state(call)
        state.sampling.height, state.sampling.width = rounded_size(state.sampling, _ALIGNMENT)
        return state

    def restore_pipeline(self, state: StepRequestState) -> None:
        super().restore_pipeline(state)
        # forward puts another one of these around the last, on the pipeline, for every request
        renormalize = partial(type(self.pipeline).cfg_normalize_function, self.pipeline)
        minimum = state.sampling.extra_args.get("cfg_renorm_min", 0.0)
        self.pipeline.cfg_normalize_function = partial(renormalize, cfg_renorm_min=minimum)

    def encode_state(self, state: StepRequestState) -> None:
        pipeline, sampling = self.pipeline, state.sampling
        prompt = [positive_text(state.prompt)]
        if sampling.extra_args.get("enable_prompt_rewrite", True):
            prompt = pipeline.rewire_prompt(prompt, pipeline.device)
        num_images = max(1, sampling.num_outputs_per_prompt)
        state.do_true_cfg = sampling.guidance_scale > 1
        state.prompt_embeds, state.extra["text_ids"] = pipeline.encode_prompt(prompt, num_images)
        if state.do_true_cfg:
            negative = [negative_text(state.prompt) or ""]
            state.negative_prompt_embeds, state.extra["negative_text_ids"] = pipeline.encode_prompt(
                negative, num_images
            )

    def prepare_state(self, state: StepRequestState) -> None:
        pipeline, sampling, embeds = self.pipeline, state.sampling, state.prompt_embeds
        size = (embeds.shape[0], _LATENT_CHANNELS, sampling.height, sampling.width)
        state.latents, state.extra["image_ids"] = pipeline.prepare_latents(
            *size, embeds.dtype, pipeline.device, sampling.generator, sampling.latents
        )
        num_steps, sigmas = sampling.num_inference_steps or 50, sampling.sigmas
        if sigmas is None:
            sigmas = np.linspace(1.0, 1.0 / num_steps, num_steps)
        limits = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
        config = pipeline.scheduler.config
        shift = calculate_shift(state.latents.shape[1], *(config.get(*limit) for limit in limits.items()))
        state.timesteps, _ = retrieve_timesteps(
            pipeline.scheduler, num_steps, pipeline.device, sigmas=sigmas, mu=shift
        )
        state.scheduler = self.own_scheduler()

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        first, all_latents = states[0], [state.latents for state in states]
        latents = rows(all_latents, all_latents)

        def branch(sign: str) -> dict[str, Any]:
            return {
                "hidden_states": latents,
                "timestep": timestep_rows(states, latents.device).to(latents.dtype) / 1000,
                "guidance": None,
                "encoder_hidden_states": rows([getattr(s, f"{sign}prompt_embeds") for s in states], all_latents),
                "txt_ids": first.extra[f"{sign}text_ids"],
                "img_ids": first.extra["image_ids"],
                "return_dict": False,
            }

        return self.pipeline.predict_noise_maybe_with_cfg(
            first.do_true_cfg,
            first.sampling.guidance_scale,
            branch(""),
            branch("negative_") if first.do_true_cfg else None,
            first.sampling.extra_args.get("enable_cfg_renorm", True),
        )

    def compatible(self, states: Sequence[StepRequestState]) -> bool:
        same = all(state.sampling.extra_args == states[0].sampling.extra_args for state in states)
        return same and super().compatible(states)

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        pipeline, sampling = self.pipeline, state.sampling
        if sampling.output_type == "latent":
            return DiffusionOutput(output=state.latents)
        size = (sampling.height, sampling.width, pipeline.vae_scale_factor)
        return decode_image(pipeline.vae, pipeline._unpack_latents(state.latents, *size))
