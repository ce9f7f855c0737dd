"""Qwen-Image: text encoding and the making of latents as separate tasks, Ulysses and CFG parallelism."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.utils.size_utils import normalize_min_aligned_size
from vllm_omni.diffusion.worker.input_batch import InputBatch
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.base import TaskCall, TaskOutput
from gfdit.adapters.step_execution import StepExecutionAdapter, join_state, split_state
from gfdit.core.tasks import Shape

# The VAE halves each side three times and the transformer takes 2 x 2 patches; both are fixed by the family.
_ALIGNMENT = 16
_DEFAULT_SIDE = 1024
_DEFAULT_TRUE_CFG_SCALE = 4.0
# Rotary embeddings exist for this many positions on either side of the centre (QwenEmbedRope).
_MAX_SIDE = 2 * 4096 * _ALIGNMENT
# What the pipeline's own preparation returns under the name of a state field.
_PREPARED_FIELDS = (
    "latents",
    "timesteps",
    "do_true_cfg",
    "guidance",
    "txt_seq_lens",
    "negative_txt_seq_lens",
)


class QwenImageAdapter(StepExecutionAdapter):
    """Adapter for ``QwenImagePipeline``."""

    captures_steps = True
    separate_prepare = True

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        height = request.sampling_params.height or _DEFAULT_SIDE
        width = request.sampling_params.width or _DEFAULT_SIDE
        for name, side in (("height", height), ("width", width)):
            if not 1 <= side <= _MAX_SIDE:
                raise ValueError(f"{name} must be between 1 and {_MAX_SIDE} pixels, got {side}")
        return Shape(*normalize_min_aligned_size(height, width, _ALIGNMENT))

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        return self.has_guidance(request.prompt, request.sampling_params)

    def has_guidance(self, prompt: Any, sampling: Any) -> bool:
        """Only with a negative prompt, be it empty."""
        negative = None if isinstance(prompt, str) else prompt.get("negative_prompt")
        return negative is not None and (sampling.true_cfg_scale or _DEFAULT_TRUE_CFG_SCALE) > 1

    def new_state(self, call: TaskCall) -> StepRequestState:
        state = super().new_state(call)
        assert call.request is not None
        shape = self.shape(call.request)
        state.sampling.height, state.sampling.width = shape.height, shape.width
        state.sampling.cfg_normalize = True  # as the pipeline does, in request and in step mode
        return state

    def encode(self, call: TaskCall) -> TaskOutput:
        """Text embeddings of the prompt and, with guidance, of the negative prompt."""
        state = self.new_state(call)
        prompts, negatives = self.pipeline._extract_prompts([state.prompt])
        common = {
            "num_images_per_prompt": max(1, state.sampling.num_outputs_per_prompt),
            "max_sequence_length": self._max_sequence_length(state),
        }
        state.prompt_embeds, state.prompt_embeds_mask = self.pipeline.encode_prompt(prompts, **common)
        assert call.request is not None
        if self.uses_cfg(call.request):
            state.negative_prompt_embeds, state.negative_prompt_embeds_mask = self.pipeline.encode_prompt(
                negatives, prompt_name="negative_prompt", **common
            )
        conditioning, latents = split_state(state)
        return TaskOutput(({**conditioning, "generator": latents["generator"]},))

    def prepare(self, call: TaskCall) -> TaskOutput:
        """Latents, timesteps and a scheduler of the request's own, from embeddings made elsewhere."""
        state = join_state(call.inputs)
        pipeline = self.pipeline
        sampling = state.sampling
        sampling.generator = copy.deepcopy(sampling.generator)  # drawn from below; conditioning stays as it is
        context = pipeline._prepare_generation_context(
            prompt=None,
            negative_prompt=None,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps or 50,
            sigmas=sampling.sigmas,
            guidance_scale=sampling.guidance_scale if sampling.guidance_scale_provided else 1.0,
            num_images_per_prompt=1,  # the embeddings already have a row per image
            generator=sampling.generator,
            true_cfg_scale=sampling.true_cfg_scale or _DEFAULT_TRUE_CFG_SCALE,
            max_sequence_length=self._max_sequence_length(state),
            prompt_embeds=state.prompt_embeds,
            prompt_embeds_mask=state.prompt_embeds_mask,
            negative_prompt_embeds=state.negative_prompt_embeds,
            negative_prompt_embeds_mask=state.negative_prompt_embeds_mask,
            latents=sampling.latents,
        )
        for name in _PREPARED_FIELDS:
            setattr(state, name, context[name])
        state.img_shapes = context["img_shapes"][:1]
        state.step_index = 0
        # Preparing timesteps has set the pipeline's own scheduler up for this request: take a copy of it.
        state.scheduler = copy.deepcopy(pipeline.scheduler)
        state.scheduler.set_begin_index(0)
        return TaskOutput(split_state(state)[1:])

    def make_batch(self, states: Sequence[StepRequestState]) -> InputBatch:
        """Texts of one length go without masks, which vLLM-Omni would read back from the device at every step.

        All rows of a request are the same text, so none of its tokens is padding.
        """
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            texts = [getattr(state, name) for state in states]
            if len({None if text is None else text.shape[1] for text in texts}) == 1:
                for state in states:
                    setattr(state, f"{name}_mask", None)
        batch = InputBatch.make_batch(states)
        batch.timesteps = batch.timesteps.to(self.device, non_blocking=True)
        return batch

    def _max_sequence_length(self, state: StepRequestState) -> int:
        return state.sampling.max_sequence_length or self.pipeline.tokenizer_max_length
