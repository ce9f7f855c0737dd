"""Ovis-Image: text encoder Qwen3, an image VAE, two-stream and single-stream blocks.

vLLM-Omni's pipeline class does not read the transformer's dimensions: gfdit loads this checkpoint with a class of
its own (`gfdit.adapters.tiny_models.own_dimensions`), the stock server cannot load it.
"""

import json
from pathlib import Path

import torch
from diffusers import OvisImageTransformer2DModel

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.flux import scheduler
from gfdit.adapters.tiny_models.rope import rope_axes


def write(directory: Path, spec: TinyModelSpec) -> None:
    """`--layers` counts the blocks of each kind."""
    num_tokens = qwen3.write_tokenizer(directory / "tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    qwen3.text_encoder(num_tokens).model.save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    autoencoder_kl(0.3611, 0.1159).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    scheduler().save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _transformer(spec: TinyModelSpec) -> OvisImageTransformer2DModel:
    return OvisImageTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        out_channels=4 * LATENT_CHANNELS,
        num_layers=spec.num_layers,
        num_single_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        joint_attention_dim=qwen3.WIDTH,
        axes_dims_rope=rope_axes(spec.head_dim),
    )


_MODEL_INDEX = {
    "_class_name": "OvisImagePipeline",
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3Model"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", "OvisImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
