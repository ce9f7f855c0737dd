"""Lumina 2: text encoder Gemma 2 and a transformer of one stream, which vLLM-Omni leaves to diffusers.

It is one of those that are served with ``diffusion_load_format="diffusers"``, none of them with eager execution.
"""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Transformer2DModel

from gfdit.adapters.tiny_models import TinyModelSpec, gemma
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.rope import rope_axes

_MAX_TOKENS = 512


def write(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = gemma.write_gemma_tokenizer(directory / "tokenizer", _MAX_TOKENS)
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    gemma.gemma2(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    autoencoder_kl(0.3611, 0.1159).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=6.0).save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _transformer(spec: TinyModelSpec) -> Lumina2Transformer2DModel:
    return Lumina2Transformer2DModel(
        in_channels=LATENT_CHANNELS,
        hidden_size=spec.num_heads * spec.head_dim,
        num_layers=spec.num_layers,
        num_refiner_layers=1,
        num_attention_heads=spec.num_heads,
        num_kv_heads=max(spec.num_heads // 2, 1),
        multiple_of=32,
        axes_dim_rope=rope_axes(spec.head_dim),
        axes_lens=(_MAX_TOKENS,) * 3,
        cap_feat_dim=gemma.WIDTH,
    )


_MODEL_INDEX = {
    "_class_name": "Lumina2Pipeline",
    "_diffusers_version": "0.33.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Gemma2Model"],
    "tokenizer": ["transformers", "GemmaTokenizer"],
    "transformer": ["diffusers", "Lumina2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
