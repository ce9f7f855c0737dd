"""The last part of image pipelines: latents to pixels."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput


def decode_image(vae: Any, latents: torch.Tensor) -> DiffusionOutput:
    """(N, C, h, w), as the denoising loop leaves them, to pixels (N, 3, H, W) between -1 and 1.

    They are scaled in their own type and decoded in the VAE's.
    """
    latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
    return DiffusionOutput(output=vae.decode(latents.to(vae.dtype), return_dict=False)[0])
