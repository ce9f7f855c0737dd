"""Krea 2: text encoder Qwen3-VL read at several layers, the VAE of Qwen-Image, one stream with grouped heads."""

import json
from pathlib import Path

import torch
from diffusers import Krea2Transformer2DModel
from transformers import Qwen3VLConfig, Qwen3VLModel

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3
from gfdit.adapters.tiny_models.qwen_image import LATENT_CHANNELS, PATCH_SIZE, scheduler
from gfdit.adapters.tiny_models.qwen_image_edit import vae
from gfdit.adapters.tiny_models.rope import rope_axes
from gfdit.adapters.tiny_models.zeros import fill_zeros, zero_biases

# Hidden states of the text encoder that the transformer fuses. The published model takes twelve.
TEXT_LAYERS = (1, 2)


def write(directory: Path, spec: TinyModelSpec, *, distilled: bool = False) -> None:
    num_tokens = qwen3.write_tokenizer(directory / "tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    _text_encoder(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    zero_biases(vae(halvings=3)).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    scheduler().save_pretrained(directory / "scheduler")
    index = {"is_distilled": distilled} | _MODEL_INDEX
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_distilled(directory: Path, spec: TinyModelSpec) -> None:
    """The same parts, which the pipeline runs without guidance unless a request asks for it."""
    write(directory, spec, distilled=True)


def _text_encoder(num_tokens: int) -> Qwen3VLModel:
    text = {
        "vocab_size": num_tokens,
        "hidden_size": qwen3.WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": qwen3.NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    }
    # The pipeline drops the vision tower when it loads the encoder.
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": qwen3.WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision))


def _transformer(spec: TinyModelSpec) -> Krea2Transformer2DModel:
    width = spec.num_heads * spec.head_dim
    transformer = Krea2Transformer2DModel(
        in_channels=LATENT_CHANNELS * PATCH_SIZE**2,
        num_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_heads // 2 if spec.num_heads % 2 == 0 else spec.num_heads,
        intermediate_size=2 * width,
        timestep_embed_dim=64,
        text_hidden_dim=qwen3.WIDTH,
        num_text_layers=len(TEXT_LAYERS),
        text_num_attention_heads=4,
        text_num_key_value_heads=4,
        text_intermediate_size=128,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=rope_axes(spec.head_dim),
    )
    return fill_zeros(transformer)


_MODEL_INDEX = {
    "_class_name": "Krea2Pipeline",
    "_diffusers_version": "0.40.0",
    "patch_size": PATCH_SIZE,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLModel"],
    "text_encoder_select_layers": list(TEXT_LAYERS),
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "Krea2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}
