"""ERNIE-Image: text encoder Mistral 3, the VAE of FLUX.2, one stream of image and text, shared modulation."""

import json
from pathlib import Path

import torch
from diffusers import ErnieImageTransformer2DModel, FlowMatchEulerDiscreteScheduler

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3
from gfdit.adapters.tiny_models.autoencoder_kl import FLUX2_LATENT_CHANNELS, autoencoder_kl_flux2
from gfdit.adapters.tiny_models.flux2 import mistral, write_mistral_tokenizer
from gfdit.adapters.tiny_models.rope import rope_axes
from gfdit.adapters.tiny_models.zeros import fill_zeros


def write(directory: Path, spec: TinyModelSpec) -> None:
    """Without the language model that rewrites prompts, which a checkpoint may leave out."""
    num_tokens = write_mistral_tokenizer(directory / "tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    mistral(num_tokens).model.save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    autoencoder_kl_flux2().save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _transformer(spec: TinyModelSpec) -> ErnieImageTransformer2DModel:
    width = spec.num_heads * spec.head_dim
    transformer = ErnieImageTransformer2DModel(
        hidden_size=width,
        num_attention_heads=spec.num_heads,
        num_layers=spec.num_layers,
        ffn_hidden_size=2 * width,
        in_channels=4 * FLUX2_LATENT_CHANNELS,
        out_channels=4 * FLUX2_LATENT_CHANNELS,
        text_in_dim=qwen3.WIDTH,
        rope_axes_dim=rope_axes(spec.head_dim),
    )
    return fill_zeros(transformer)


_MODEL_INDEX = {
    "_class_name": "ErnieImagePipeline",
    "_diffusers_version": "0.38.0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Mistral3Model"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ErnieImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}
