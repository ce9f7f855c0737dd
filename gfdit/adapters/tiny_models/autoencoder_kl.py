"""The image VAE of FLUX, LongCat-Image, Stable Diffusion 3 and Z-Image: a side of 8 pixels is one latent."""

from diffusers import AutoencoderKL

LATENT_CHANNELS = 16
_BLOCKS = 4


def autoencoder_kl(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * _BLOCKS,
        up_block_types=("UpDecoderBlock2D",) * _BLOCKS,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=128,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
