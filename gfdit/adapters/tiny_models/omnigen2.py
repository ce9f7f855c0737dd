"""OmniGen2: text encoder Qwen2.5-VL and a transformer like that of Lumina 2, with reference images refined."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, Lumina2Transformer2DModel
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.plain import save_transformer
from gfdit.adapters.tiny_models.qwen_image import TEXT_WIDTH, text_encoder
from gfdit.adapters.tiny_models.rope import rope_axes

PATCH_SIZE = 2
_MAX_IMAGES = 5


def write(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = qwen3.write_tokenizer(directory / "processor")
    (directory / "processor" / "preprocessor_config.json").write_text(json.dumps(_IMAGES, indent=2) + "\n")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    text_encoder(num_tokens).save_pretrained(directory / "mllm")
    torch.manual_seed(spec.seed + 1)
    _vae().save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _write_transformer(directory / "transformer", spec)
    (directory / "scheduler").mkdir()
    (directory / "scheduler" / "scheduler_config.json").write_text(json.dumps(_SCHEDULER, indent=2) + "\n")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _vae() -> AutoencoderKL:
    """The pipeline samples what it encodes by a generator that no request seeds: here, at next to no variance."""
    vae = autoencoder_kl(0.3611, 0.1159)
    torch.nn.init.constant_(vae.encoder.conv_out.bias[LATENT_CHANNELS:], -30.0)  # logarithms of variances
    return vae


def _write_transformer(directory: Path, spec: TinyModelSpec) -> None:
    """diffusers lacks this transformer; what it adds to Lumina 2's are parts of the same kinds."""
    width = spec.num_heads * spec.head_dim
    sizes: dict[str, Any] = {
        "patch_size": PATCH_SIZE,
        "in_channels": LATENT_CHANNELS,
        "hidden_size": width,
        "num_layers": spec.num_layers,
        "num_refiner_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_kv_heads": max(spec.num_heads // 2, 1),
        "multiple_of": 32,
        "norm_eps": 1e-5,
        "axes_dim_rope": rope_axes(spec.head_dim),
        "axes_lens": (2048, 2048, 2048),
    }
    model = Lumina2Transformer2DModel(**sizes, cap_feat_dim=TEXT_WIDTH)
    block = (width, spec.num_heads, sizes["num_kv_heads"], sizes["multiple_of"], None, sizes["norm_eps"])
    model.ref_image_patch_embedder = torch.nn.Linear(PATCH_SIZE**2 * LATENT_CHANNELS, width)
    model.ref_image_refiner = torch.nn.ModuleList([Lumina2TransformerBlock(*block)])
    model.image_index_embedding = torch.nn.Parameter(torch.randn(_MAX_IMAGES, width))
    config = {"_class_name": "OmniGen2Transformer2DModel", **sizes, "text_feat_dim": TEXT_WIDTH}
    save_transformer(model, directory, config)


_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
_SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "dynamic_time_shift": True}
_MODEL_INDEX = {
    "_class_name": "OmniGen2Pipeline",
    "_diffusers_version": "0.33.1",
    "mllm": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "processor": ["transformers", "Qwen2_5_VLProcessor"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "transformer": ["diffusers", "OmniGen2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
