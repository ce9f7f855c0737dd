"""Image VAEs: that of FLUX and many others, and that of FLUX.2. A side of 8 pixels is one latent."""

from typing import Any

from diffusers import AutoencoderKL, AutoencoderKLFlux2

LATENT_CHANNELS = 16
FLUX2_LATENT_CHANNELS = 32
_WIDTHS = (16, 16, 32, 32)


def autoencoder_kl(
    scaling_factor: float,
    shift_factor: float | None,
    latent_channels: int = LATENT_CHANNELS,
    num_blocks: int = len(_WIDTHS),
    **fields: Any,
) -> AutoencoderKL:
    """Every block but the last halves a side; ``fields`` are further ones of its configuration."""
    return AutoencoderKL(
        **_sizes(num_blocks),
        latent_channels=latent_channels,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **fields,
    )


def autoencoder_kl_flux2() -> AutoencoderKLFlux2:
    """It normalizes latents by running averages, here those of a new layer: 0 and 1."""
    return AutoencoderKLFlux2(**_sizes(len(_WIDTHS)), latent_channels=FLUX2_LATENT_CHANNELS)


def _sizes(num_blocks: int) -> dict[str, Any]:
    return {
        "block_out_channels": _WIDTHS[:num_blocks],
        "down_block_types": ("DownEncoderBlock2D",) * num_blocks,
        "up_block_types": ("UpDecoderBlock2D",) * num_blocks,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 128,
    }
