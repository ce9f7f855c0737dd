"""LongCat-Image: text encoder Qwen2.5-VL, which also rewrites prompts, and a transformer like that of FLUX.

LongCat-Image-Edit has a text encoder that sees the picture at half its size.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LongCatImageTransformer2DModel

from gfdit.adapters.tiny_models import TinyModelSpec
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.byte_tokenizer import write_byte_tokenizer
from gfdit.adapters.tiny_models.qwen_image import SPECIAL_TOKENS, TEXT_WIDTH, text_encoder
from gfdit.adapters.tiny_models.qwen_image_edit import IMAGES as VISION_IMAGES
from gfdit.adapters.tiny_models.qwen_image_edit import SPECIAL_TOKENS as VISION_TOKENS
from gfdit.adapters.tiny_models.qwen_image_edit import vision_token_ids
from gfdit.adapters.tiny_models.rope import rope_axes

_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{{ c.text }}{% endfor %}<|im_end|>\n"
)


def write(directory: Path, spec: TinyModelSpec) -> None:
    _write(directory, spec, "LongCatImagePipeline", SPECIAL_TOKENS, _IMAGES, {})


def write_edit(directory: Path, spec: TinyModelSpec) -> None:
    _write(directory, spec, "LongCatImageEditPipeline", VISION_TOKENS, VISION_IMAGES, vision_token_ids())


def _write(
    directory: Path,
    spec: TinyModelSpec,
    pipeline: str,
    special_tokens: Sequence[str],
    images: dict[str, Any],
    token_ids: dict[str, int],
) -> None:
    num_tokens = write_byte_tokenizer(directory / "tokenizer", special_tokens)
    processor = directory / "text_processor"
    write_byte_tokenizer(processor, special_tokens)
    (processor / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
    (processor / "chat_template.jinja").write_text(_CHAT + "{% endfor %}<|im_start|>assistant\n")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    text_encoder(num_tokens, **token_ids).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    autoencoder_kl(0.3611, 0.1159).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=4096)
    scheduler.save_pretrained(directory / "scheduler")
    index = {"_class_name": pipeline} | _COMPONENTS
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _transformer(spec: TinyModelSpec) -> LongCatImageTransformer2DModel:
    return LongCatImageTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=spec.num_layers,
        num_single_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=list(rope_axes(spec.head_dim)),
    )


_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
_COMPONENTS = {
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "text_processor": ["transformers", "Qwen2VLProcessor"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "LongCatImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
