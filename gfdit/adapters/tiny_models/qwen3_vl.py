"""Qwen3-VL as an encoder of prompts and images: of LingBot-Video and Boogu-Image."""

import json
from pathlib import Path

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from gfdit.adapters.tiny_models.byte_tokenizer import write_byte_tokenizer
from gfdit.adapters.tiny_models.qwen_image_edit import SPECIAL_TOKENS

WIDTH = 64
_PATCH = 16
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)


def write_processor(directory: Path) -> int:
    """Write the tokenizer and what prepares images. Returns the number of tokens."""
    num_tokens = write_byte_tokenizer(directory, SPECIAL_TOKENS)
    (directory / "chat_template.jinja").write_text(_CHAT)
    (directory / "preprocessor_config.json").write_text(json.dumps(_IMAGES, indent=2) + "\n")
    (directory / "video_preprocessor_config.json").write_text(json.dumps(_VIDEOS, indent=2) + "\n")
    return num_tokens


def text_encoder(num_tokens: int) -> Qwen3VLForConditionalGeneration:
    text = {
        "vocab_size": num_tokens,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "patch_size": _PATCH,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    token_ids = {
        "image_token_id": SPECIAL_TOKENS.index("<|image_pad|>"),
        "video_token_id": SPECIAL_TOKENS.index("<|video_pad|>"),
        "vision_start_token_id": SPECIAL_TOKENS.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL_TOKENS.index("<|vision_end|>"),
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **token_ids)
    return Qwen3VLForConditionalGeneration(config)


_SIZES = {"processor_class": "Qwen3VLProcessor", "patch_size": _PATCH, "temporal_patch_size": 2, "merge_size": 2}
_IMAGES = {
    **_SIZES,
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": (2 * _PATCH) ** 2,
    "max_pixels": (16 * _PATCH) ** 2,
}
_VIDEOS = {**_SIZES, "video_processor_type": "Qwen3VLVideoProcessor"}
