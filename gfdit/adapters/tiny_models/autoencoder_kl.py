"""Image VAEs: that of FLUX, LongCat-Image, Ovis-Image, Stable Diffusion and Z-Image, and that of FLUX.2.

A side of 8 pixels is one latent.
"""

from typing import Any

from diffusers import AutoencoderKL, AutoencoderKLFlux2

LATENT_CHANNELS = 16
FLUX2_LATENT_CHANNELS = 32
_BLOCKS = 4
_SIZES: dict[str, Any] = {
    "block_out_channels": (16, 16, 32, 32),
    "down_block_types": ("DownEncoderBlock2D",) * _BLOCKS,
    "up_block_types": ("UpDecoderBlock2D",) * _BLOCKS,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 128,
}


def autoencoder_kl(
    scaling_factor: float, shift_factor: float | None, latent_channels: int = LATENT_CHANNELS
) -> AutoencoderKL:
    return AutoencoderKL(
        **_SIZES,
        latent_channels=latent_channels,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def autoencoder_kl_flux2() -> AutoencoderKLFlux2:
    """It normalizes latents by running averages, here those of a new layer: 0 and 1."""
    return AutoencoderKLFlux2(**_SIZES, latent_channels=FLUX2_LATENT_CHANNELS)
