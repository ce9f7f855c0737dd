"""Qwen-Image-Edit: the input image is read twice, by the text encoder and by the VAE, in tasks of their own.

Neither needs the other, so both may run at the same time on different ranks. What the VAE makes of the image, the
artifact ``image``, joins the latents at the end of the sequence in every step, and what the transformer
makes of those tokens is cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
from vllm_omni.diffusion.models.qwen_image.rope_utils import txt_seq_lens_from_embeds
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import StepRequestState
from vllm_omni.errors import OmniClientError

from gfdit.adapters.base import TaskCall, TaskOutput, Trajectory
from gfdit.adapters.denoise_loop import DenoiseLoopAdapter
from gfdit.adapters.qwen_image import QwenImageAdapter
from gfdit.core.tasks import TaskKind, artifact_kind, with_encoder

IMAGE = "image"
_GUIDANCE_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class InputImages:
    """What vLLM-Omni's preprocessing has made of the input images.

    ``for_text``: PIL images, as the text encoder's processor takes them; ``for_vae``: float32 (1, 3, 1, height,
    width) in [-1, 1] each.
    """

    for_text: Any
    for_vae: list[torch.Tensor]


class QwenImageEditAdapter(DenoiseLoopAdapter, QwenImageAdapter):
    """Adapter for ``QwenImageEditPipeline``, which takes one input image."""

    pipeline_class = "QwenImageEditPipeline"
    batches = True

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        if self.input_images(request.prompt) is None:
            raise ValueError("image is missing: this model edits an image, send one with the prompt")
        trajectory = super().convert(request, max_sp)
        return replace(trajectory, graph=with_encoder(trajectory.graph, IMAGE, {TaskKind.DENOISE}))

    def input_images(self, prompt: Any) -> InputImages | None:
        """Of a preprocessed prompt; None without an image, or with one that is latents already."""
        made = _preprocessed(prompt)
        if "preprocessed_image" not in made:
            return None
        return InputImages(made["prompt_image"], [made["preprocessed_image"]])

    # Tasks

    def encode(self, call: TaskCall) -> TaskOutput:
        if artifact_kind(call.task.request_id, call.task.outputs[0]) == IMAGE:
            return self.encode_image(call)
        return super().encode(call)

    def encode_image(self, call: TaskCall) -> TaskOutput:
        """The VAE's latents of all input images as one sequence, (1, tokens, channels)."""
        state = self.new_state(call)
        images = self._images(state).for_vae
        _, latents = self.pipeline.prepare_latents(
            images if len(images) > 1 else images[0],
            1,
            self._num_channels,
            state.sampling.height,
            state.sampling.width,
            self.pipeline.text_encoder.dtype,  # as embeddings and latents are
            self.device,
            None,  # the most likely latents are taken, nothing is drawn
            torch.empty(0),  # given noise is not drawn either; the prepare task does
        )
        return TaskOutput(({"extra": {"image_latents": latents}},))

    def encode_state(self, state: StepRequestState) -> None:
        pipeline, sampling = self.pipeline, state.sampling
        images = self._images(state)
        patch = 2 * pipeline.vae_scale_factor
        if min(sampling.height, sampling.width) < patch:
            raise OmniClientError(
                f"height and width must be at least {patch} pixels, got {sampling.height}x{sampling.width}"
            )
        common = {
            "image": images.for_text,
            "num_images_per_prompt": max(1, sampling.num_outputs_per_prompt),
            "max_sequence_length": self._max_sequence_length(state),
        }
        text, negative = state.prompt.get("prompt") or "", state.prompt.get("negative_prompt")
        state.prompt_embeds, state.prompt_embeds_mask = pipeline.encode_prompt(text, **common)
        state.do_true_cfg = self.has_guidance(state.prompt, sampling)
        if state.do_true_cfg:
            state.negative_prompt_embeds, state.negative_prompt_embeds_mask = pipeline.encode_prompt(
                negative, prompt_name="negative_prompt", **common
            )
        # (frames, height, width) in tokens: of what is generated, then of each input image.
        sides = [(sampling.height, sampling.width), *(image.shape[-2:] for image in images.for_vae)]
        state.extra["img_shapes"] = [[(1, height // patch, width // patch) for height, width in sides]]
        state.prompt = text  # the images have been read

    def prepare_state(self, state: StepRequestState) -> None:
        pipeline, sampling = self.pipeline, state.sampling
        assert state.prompt_embeds is not None
        num_rows = state.prompt_embeds.shape[0]
        state.latents, _ = pipeline.prepare_latents(
            None,
            num_rows,
            self._num_channels,
            sampling.height,
            sampling.width,
            state.prompt_embeds.dtype,
            self.device,
            sampling.generator,
            sampling.latents,
        )
        assert state.latents is not None
        state.timesteps, _ = pipeline.prepare_timesteps(
            sampling.num_inference_steps or 50, sampling.sigmas, state.latents.shape[1]
        )
        state.scheduler = self.own_scheduler()
        state.img_shapes = state.extra["img_shapes"]
        state.txt_seq_lens = txt_seq_lens_from_embeds(state.prompt_embeds)
        state.negative_txt_seq_lens = txt_seq_lens_from_embeds(state.negative_prompt_embeds)
        if pipeline.transformer.guidance_embeds:
            scale = sampling.guidance_scale if sampling.guidance_scale_provided else _GUIDANCE_SCALE
            state.guidance = torch.full([num_rows], scale, dtype=torch.float32, device=self.device)

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        batch = self.make_batch(states)
        pipeline = self.pipeline
        pipeline.transformer.do_true_cfg = batch.do_true_cfg
        positive, negative, output_slice = QwenImagePipeline._build_denoise_kwargs(
            pipeline,
            latents=batch.latents,
            timestep=batch.timesteps,
            guidance=batch.guidance,
            prompt_embeds=batch.prompt_embeds,
            prompt_embeds_mask=batch.prompt_embeds_mask,
            img_shapes=batch.img_shapes,
            txt_seq_lens=batch.txt_seq_lens,
            do_true_cfg=batch.do_true_cfg,
            negative_prompt_embeds=batch.negative_prompt_embeds,
            negative_prompt_embeds_mask=batch.negative_prompt_embeds_mask,
            negative_txt_seq_lens=batch.negative_txt_seq_lens,
            image_latents=batch.image_latents,
            extra_transformer_kwargs={"attention_kwargs": pipeline.attention_kwargs, "return_dict": False},
        )
        return pipeline.predict_noise_maybe_with_cfg(
            batch.do_true_cfg, batch.true_cfg_scale, positive, negative, batch.cfg_normalize, output_slice
        )

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        sampling = state.sampling
        return QwenImagePipeline._decode_latents(
            self.pipeline, state.latents, sampling.height, sampling.width, sampling.output_type or "pil"
        )

    def compatible(self, states: Sequence[StepRequestState]) -> bool:
        """Positions are those of the first request, so all images must agree in shape; text is padded."""
        first = states[0]
        return all((s.img_shapes, s.do_true_cfg) == (first.img_shapes, first.do_true_cfg) for s in states)

    def resume(self, call: TaskCall) -> StepRequestState:
        state = super().resume(call)
        if call.task.kind is TaskKind.DENOISE:
            assert state.latents is not None
            # Where vLLM-Omni looks for them when it makes a batch.
            state.sampling.image_latent = state.extra["image_latents"].expand(state.latents.shape[0], -1, -1)
        return state

    @property
    def _num_channels(self) -> int:
        return self.pipeline.transformer.in_channels // 4

    def _images(self, state: StepRequestState) -> InputImages:
        images = self.input_images(state.prompt)
        assert images is not None, "convert has seen them"
        return images


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    """Adapter for ``QwenImageEditPlusPipeline``, which takes several input images."""

    pipeline_class = "QwenImageEditPlusPipeline"

    def input_images(self, prompt: Any) -> InputImages | None:
        made = _preprocessed(prompt)
        if not made.get("vae_images"):
            return None
        return InputImages(made["condition_images"], made["vae_images"])


def _preprocessed(prompt: Any) -> dict[str, Any]:
    return {} if isinstance(prompt, str) else prompt.get("additional_information") or {}
