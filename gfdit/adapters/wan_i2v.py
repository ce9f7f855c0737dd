"""Wan2.2 as an image-to-video pipeline: two experts that take the encoded image as further channels.

What is encoded is a video of the requested length: the image as its first frame and zeros after it. That takes as
long as decoding one would, so it is a task of its own and may run beside the text encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import PIL.Image
import torch
import torchvision.transforms.functional as functional
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.wan import WanAdapter
from gfdit.adapters.wan_request import input_image
from gfdit.core.tasks import Shape, TaskKind


class WanImageToVideoAdapter(WanAdapter):
    """Adapter for ``Wan22I2VPipeline``."""

    pipeline_class = "Wan22I2VPipeline"
    default_guidance_scale = 5.0
    image_readers = frozenset({TaskKind.DENOISE})

    def check_images(self, request: OmniDiffusionRequest) -> None:
        if input_image(request, "image") is None:
            raise ValueError("image is missing: this checkpoint makes videos of an image and text")
        if input_image(request, "last_image") is not None and self.shape(request).num_frames < 2:
            raise ValueError("last_image needs a num_frames of at least 2")

    @property
    def model_config(self) -> Any:
        return self.pipeline.transformer.config

    def encode_image(self, request: OmniDiffusionRequest) -> dict[str, Any]:
        """``condition``: mask and latents (videos, 4 + channels, frames, height, width), float32.

        ``image_embeds`` (images, tokens, width), where the checkpoint has an encoder of images as Wan2.1 has.
        """
        shape, pipeline, config = self.shape(request), self.pipeline, self.model_config
        num_videos = self.num_videos(request.sampling_params)
        images = [input_image(request, name) for name in ("image", "last_image")]
        given = [image for image in images if image is not None]
        first, *last = [self._pixels(image, shape).repeat_interleave(num_videos, dim=0) for image in given]
        _, condition, _ = pipeline.prepare_latents(
            image=first,
            last_image=last[0] if last else None,
            batch_size=num_videos,
            num_channels_latents=config.out_channels,
            height=shape.height,
            width=shape.width,
            num_frames=shape.num_frames,
            dtype=torch.float32,
            device=self.device,
            generator=None,
            latents=torch.empty(0),  # the noise is drawn elsewhere
        )
        if pipeline.image_encoder is None or config.image_dim is None:
            return {"condition": condition}
        embeds = pipeline.encode_image(given, self.device).repeat(num_videos, 1, 1)
        return {"condition": condition, "image_embeds": embeds.to(self.dtype)}

    def _pixels(self, image: PIL.Image.Image, shape: Shape) -> torch.Tensor:
        pixels = self._processor.preprocess(
            functional.to_tensor(image).to(self.device), height=shape.height, width=shape.width
        )
        return pixels.to(self.device, torch.float32)

    def expert(self, state: StepRequestState) -> tuple[Any, float]:
        """The second expert and its scale go together: without one the first scale holds throughout."""
        (first, second), (first_scale, second_scale) = self._experts, state.extra["options"].guidance
        if second is not None and state.step_index >= state.extra["boundary_step"]:
            return second, second_scale
        return first, first_scale

    def model_input(self, state: StepRequestState) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.cat([state.latents, state.extra["condition"]], dim=1).to(self.dtype)
        return latents, state.current_timestep.expand(latents.shape[0])

    def image_kwargs(self, states: Sequence[StepRequestState]) -> dict[str, Any]:
        embeds = [state.extra.get("image_embeds") for state in states]
        return {"encoder_hidden_states_image": None if embeds[0] is None else torch.cat(embeds)}

    def output_of(self, video: torch.Tensor) -> DiffusionOutput:
        return DiffusionOutput(output=video)
