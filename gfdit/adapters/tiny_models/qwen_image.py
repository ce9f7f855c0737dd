"""Qwen-Image: text encoder Qwen2.5-VL, a causal 3D VAE, a two-stream transformer with joint attention."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from gfdit.adapters.tiny_models import TinyModelSpec
from gfdit.adapters.tiny_models.byte_tokenizer import write_byte_tokenizer
from gfdit.adapters.tiny_models.rope import rope_axes

TEXT_WIDTH = 64
LATENT_CHANNELS = 16
PATCH_SIZE = 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = write_byte_tokenizer(directory / "tokenizer", SPECIAL_TOKENS)
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    text_encoder(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    AutoencoderKLQwenImage(base_dim=4, z_dim=LATENT_CHANNELS, num_res_blocks=1).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    transformer(spec).save_pretrained(directory / "transformer")
    scheduler().save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def text_encoder(num_tokens: int, **token_ids: int) -> Qwen2_5_VLForConditionalGeneration:
    """``token_ids`` are those that stand for images; without them it only reads text."""
    text: dict[str, Any] = {
        "vocab_size": num_tokens,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    # Qwen-Image drops the vision tower when it loads the encoder; only editing uses it.
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": 14,
        "fullatt_block_indexes": [0],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **token_ids)
    )


def transformer(spec: TinyModelSpec, **fields: Any) -> QwenImageTransformer2DModel:
    """``fields`` are further ones of its configuration."""
    return QwenImageTransformer2DModel(
        patch_size=PATCH_SIZE,
        in_channels=LATENT_CHANNELS * PATCH_SIZE**2,
        out_channels=LATENT_CHANNELS,
        num_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=rope_axes(spec.head_dim),
        **fields,
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


_MODEL_INDEX = {
    "_class_name": "QwenImagePipeline",
    "_diffusers_version": "0.34.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}
