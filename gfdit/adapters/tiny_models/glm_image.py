"""GLM-Image: tokens of a language model say what to draw, ByT5 reads what is to be written in the picture.

This is the part that denoises. The language model is a stage of its own: requests bring its tokens.
"""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel

from gfdit.adapters.tiny_models import TinyModelSpec
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.t5_encoder import WIDTH as BYT5_WIDTH
from gfdit.adapters.tiny_models.t5_encoder import write_byt5

NUM_PRIOR_TOKENS = 64


def write(directory: Path, spec: TinyModelSpec) -> None:
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    write_byt5(directory / "tokenizer", directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    mean, std = [0.0] * LATENT_CHANNELS, [1.0] * LATENT_CHANNELS
    autoencoder_kl(1.0, None, latents_mean=mean, latents_std=std).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    ).save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _transformer(spec: TinyModelSpec) -> GlmImageTransformer2DModel:
    return GlmImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        text_embed_dim=BYT5_WIDTH,
        time_embed_dim=64,
        condition_dim=32,
        prior_vq_quantizer_codebook_size=NUM_PRIOR_TOKENS,
    )


_MODEL_INDEX = {
    "_class_name": "GlmImagePipeline",
    "_diffusers_version": "0.37.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "ByT5Tokenizer"],
    "transformer": ["diffusers", "GlmImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
