"""Stable Diffusion XL: text encoders CLIP (two), an image VAE, a UNet with attention at its two lower levels.

vLLM-Omni's UNet has its widths in its code: gfdit loads this checkpoint with other ones
(`gfdit.adapters.tiny_models.own_dimensions`), the stock server cannot load it.
"""

import json
from pathlib import Path

import torch
from diffusers import EulerDiscreteScheduler, UNet2DConditionModel

from gfdit.adapters.tiny_models import TinyModelSpec, clip
from gfdit.adapters.tiny_models.autoencoder_kl import autoencoder_kl

LATENT_CHANNELS = 4
# Of the first level; the others have two and four times as many. Norms are over 32 groups.
WIDTH = 32
# Six numbers say the size that was asked for and how it is cropped.
_SIZE_CHANNELS = 256


def write(directory: Path, spec: TinyModelSpec) -> None:
    """`--layers` are the middle level's, `--head-dim` is at most 64, and the numbers of heads follow from it."""
    if 2 * WIDTH % spec.head_dim:
        raise ValueError(f"--head-dim of sdxl must be 16, 32 or 64, got {spec.head_dim}")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    clip.write_clip(directory / "tokenizer", directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    clip.write_clip(
        directory / "tokenizer_2", directory / "text_encoder_2", projection=True, projection_width=4 * WIDTH
    )
    torch.manual_seed(spec.seed + 2)
    autoencoder_kl(0.13025, None, LATENT_CHANNELS).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 3)
    _unet(spec).save_pretrained(directory / "unet")
    EulerDiscreteScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        timestep_spacing="leading",
        steps_offset=1,
    ).save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _unet(spec: TinyModelSpec) -> UNet2DConditionModel:
    widths = (WIDTH, 2 * WIDTH, 4 * WIDTH)
    return UNet2DConditionModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=widths,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        transformer_layers_per_block=(1, spec.num_layers, 1),
        # The number of heads, by the name that the configuration has for it.
        attention_head_dim=tuple(width // spec.head_dim for width in widths),
        cross_attention_dim=2 * clip.WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=_SIZE_CHANNELS,
        projection_class_embeddings_input_dim=4 * WIDTH + 6 * _SIZE_CHANNELS,
    )


_MODEL_INDEX = {
    "_class_name": "StableDiffusionXLPipeline",
    "_diffusers_version": "0.19.0.dev0",
    "force_zeros_for_empty_prompt": True,
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
