"""Wan's VAE: a frame to normalised latents, latents to a video in the form that was asked for."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.media import (
    DiffusionMediaOutput,
    VideoMediaOutput,
    VideoTensorEncoding,
    VideoTensorLayout,
    VideoTensorSpec,
    VideoValueRange,
)
from vllm_omni.diffusion.models.wan2_2.chunked_mp4 import (
    resolve_wan_output_fps,
    resolve_wan_preencode_batch_frames,
    resolve_wan_preencode_mp4,
    resolve_wan_video_codec_options,
)
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import retrieve_latents
from vllm_omni.diffusion.utils.chunked_video import decode_to_mp4


def encode_frame(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """``pixels`` (videos, 3, height, width) as latents (videos, channels, 1, height, width), float32."""
    encoded = vae.encode(pixels.unsqueeze(2).to(vae.dtype))
    latents = retrieve_latents(encoded, sample_mode="argmax")
    mean, inverse_std = _statistics(vae, latents)
    return ((latents - mean) * inverse_std).to(torch.float32)


def decode_video(
    vae: Any, latents: torch.Tensor, sampling: Any, output_type: str
) -> torch.Tensor | DiffusionOutput:
    """The video (videos, 3, frames, height, width) in [-1, 1], or its file where that is what was asked for."""
    latents = latents.to(vae.dtype)
    mean, inverse_std = _statistics(vae, latents)
    latents = latents / inverse_std + mean
    if not resolve_wan_preencode_mp4(sampling, output_type=output_type):
        return vae.decode(latents, return_dict=False)[0]
    videos = decode_to_mp4(
        vae,
        latents,
        fps=resolve_wan_output_fps(sampling),
        batch_frames=resolve_wan_preencode_batch_frames(sampling),
        video_codec_options=resolve_wan_video_codec_options(sampling),
    )
    return DiffusionOutput(output=videos)


def as_media(video: torch.Tensor) -> DiffusionOutput:
    """``video`` (videos, 3, frames, height, width) in [-1, 1], with a description of its numbers."""
    spec = VideoTensorSpec(
        layout=VideoTensorLayout.BCTHW,
        encoding=VideoTensorEncoding.NORMALIZED_FLOAT,
        value_range=VideoValueRange.NEGATIVE_ONE_TO_ONE,
    )
    return DiffusionOutput(media=DiffusionMediaOutput(video=VideoMediaOutput(tensor=video, spec=spec)))


def _statistics(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The VAE's mean and inverse standard deviation, (1, channels, 1, 1, 1), of the type of ``latents``."""
    mean, std = (
        torch.tensor(values).view(1, vae.config.z_dim, 1, 1, 1).to(latents)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, 1.0 / std
