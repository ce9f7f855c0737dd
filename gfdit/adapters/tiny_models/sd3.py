"""Stable Diffusion 3.5: text encoders CLIP (two) and T5, an image VAE, two streams, one image-only attention."""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

from gfdit.adapters.tiny_models import TinyModelSpec, clip, t5_encoder
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.t5_tokenizer import write_t5_tokenizer

# Sides of up to 64 patches, 1024 pixels: what a request without a size asks for.
MAX_PATCHES = 64


def write(directory: Path, spec: TinyModelSpec) -> None:
    # A generator per component: the seed of one does not depend on the size of another.
    for index, suffix in enumerate(("", "_2")):
        torch.manual_seed(spec.seed + index)
        clip.write_clip(directory / f"tokenizer{suffix}", directory / f"text_encoder{suffix}", projection=True)
    num_tokens = write_t5_tokenizer(directory / "tokenizer_3")
    torch.manual_seed(spec.seed + 2)
    t5_encoder.t5_encoder(num_tokens).save_pretrained(directory / "text_encoder_3")
    torch.manual_seed(spec.seed + 3)
    autoencoder_kl(1.5305, 0.0609).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 4)
    _transformer(spec).save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0).save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _transformer(spec: TinyModelSpec) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        joint_attention_dim=t5_encoder.WIDTH,
        caption_projection_dim=spec.num_heads * spec.head_dim,
        pooled_projection_dim=2 * clip.WIDTH,
        pos_embed_max_size=MAX_PATCHES,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


_MODEL_INDEX = {
    "_class_name": "StableDiffusion3Pipeline",
    "_diffusers_version": "0.32.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
