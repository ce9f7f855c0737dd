"""Qwen-Image-Edit: Qwen-Image with a text encoder that sees, and a VAE that shortens each side 16 times.

The pipeline scales every input image to about 1024 x 1024 pixels, whatever is asked for: with the usual VAE, which
halves a side three times and not four, a step would mostly be busy with the 4096 tokens of the input image.
"""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage

from gfdit.adapters.tiny_models import TinyModelSpec
from gfdit.adapters.tiny_models.byte_tokenizer import write_byte_tokenizer
from gfdit.adapters.tiny_models.qwen_image import LATENT_CHANNELS, scheduler, text_encoder, transformer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|im_end|>",
)
_VISION_PATCH = 14


def write(directory: Path, spec: TinyModelSpec, pipeline: str = "QwenImageEditPipeline") -> None:
    num_tokens = write_byte_tokenizer(directory / "tokenizer", SPECIAL_TOKENS)
    write_byte_tokenizer(directory / "processor", SPECIAL_TOKENS)
    (directory / "processor" / "preprocessor_config.json").write_text(json.dumps(_IMAGES, indent=2) + "\n")
    token_ids = {
        "image_token_id": SPECIAL_TOKENS.index("<|image_pad|>"),
        "video_token_id": SPECIAL_TOKENS.index("<|video_pad|>"),
        "vision_start_token_id": SPECIAL_TOKENS.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL_TOKENS.index("<|vision_end|>"),
    }
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    text_encoder(num_tokens, **token_ids).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    _vae().save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    transformer(spec).save_pretrained(directory / "transformer")
    scheduler().save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_model_index(pipeline), indent=2) + "\n")


def write_plus(directory: Path, spec: TinyModelSpec) -> None:
    """The same parts for the pipeline that takes several input images."""
    write(directory, spec, pipeline="QwenImageEditPlusPipeline")


def _vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=2,  # the first layers see whole input images
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True, True],
    )


# At most 16 x 16 patches, 64 tokens once 2 x 2 of them are merged.
_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "patch_size": _VISION_PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": (4 * _VISION_PATCH) ** 2,
    "max_pixels": (16 * _VISION_PATCH) ** 2,
}


def _model_index(pipeline: str) -> dict[str, object]:
    return {
        "_class_name": pipeline,
        "_diffusers_version": "0.36.0.dev0",
        "processor": ["transformers", "Qwen2VLProcessor"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
