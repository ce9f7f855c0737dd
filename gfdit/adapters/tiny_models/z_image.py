"""Z-Image: text encoder Qwen3, an image VAE, a single stream of image and caption tokens.

vLLM-Omni's pipeline class does not read the transformer's dimensions: gfdit loads this checkpoint with a class of
its own (`gfdit.adapters.tiny_models.own_dimensions`), the stock server cannot load it.
"""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.rope import rope_axes

# Rotary positions of captions, rows and columns of patches: sides of up to 2048 pixels.
AXES_LENGTHS = (1024, 128, 128)


def write(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = qwen3.write_tokenizer(directory / "tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    qwen3.text_encoder(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    autoencoder_kl(0.3611, 0.1159).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0).save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _transformer(spec: TinyModelSpec) -> ZImageTransformer2DModel:
    transformer = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=spec.num_heads * spec.head_dim,
        n_layers=spec.num_layers,
        n_refiner_layers=1,
        n_heads=spec.num_heads,
        n_kv_heads=spec.num_heads,
        cap_feat_dim=qwen3.WIDTH,
        axes_dims=list(rope_axes(spec.head_dim)),
        axes_lens=list(AXES_LENGTHS),
    )
    # The library leaves the tokens that pad empty.
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token, std=0.02)
    return transformer


_MODEL_INDEX = {
    "_class_name": "ZImagePipeline",
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ZImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
