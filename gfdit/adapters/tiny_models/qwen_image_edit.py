"""Qwen-Image-Edit and -Layered: Qwen-Image with a text encoder that sees, and a VAE that shortens sides further.

Editing scales every input image to about 1024 x 1024 pixels, whatever is asked for: with the usual VAE, which
halves a side three times and not four, a step would mostly be busy with the 4096 tokens of the input image.
Layers are of 640 x 640 pixels at least, each with as many tokens as the input image: there the VAE halves five
times.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, ModelMixin

from gfdit.adapters.tiny_models import TinyModelSpec
from gfdit.adapters.tiny_models.byte_tokenizer import write_byte_tokenizer
from gfdit.adapters.tiny_models.qwen_image import LATENT_CHANNELS, scheduler, text_encoder, transformer
from gfdit.adapters.tiny_models.zeros import zero_biases

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


def write(directory: Path, spec: TinyModelSpec) -> None:
    _write(directory, spec, "QwenImageEditPipeline", vae, transformer)


def write_plus(directory: Path, spec: TinyModelSpec) -> None:
    """The same parts for the pipeline that takes several input images."""
    _write(directory, spec, "QwenImageEditPlusPipeline", vae, transformer)


def write_layered(directory: Path, spec: TinyModelSpec) -> None:
    """It takes a picture apart into layers with transparency."""
    _write(
        directory,
        spec,
        "QwenImageLayeredPipeline",
        lambda: zero_biases(vae(halvings=5, channels=4)),
        partial(transformer, use_additional_t_cond=True, use_layer3d_rope=True),
    )


def _write(
    directory: Path,
    spec: TinyModelSpec,
    pipeline: str,
    make_vae: Callable[[], ModelMixin],
    make_transformer: Callable[[TinyModelSpec], ModelMixin],
) -> None:
    num_tokens = write_byte_tokenizer(directory / "tokenizer", SPECIAL_TOKENS)
    write_byte_tokenizer(directory / "processor", SPECIAL_TOKENS)
    (directory / "processor" / "preprocessor_config.json").write_text(json.dumps(IMAGES, indent=2) + "\n")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    text_encoder(num_tokens, **vision_token_ids()).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    make_vae().save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    make_transformer(spec).save_pretrained(directory / "transformer")
    scheduler().save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_model_index(pipeline), indent=2) + "\n")


def vision_token_ids() -> dict[str, int]:
    """Which of the special tokens stand for pictures, for the configuration of the text encoder."""
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: SPECIAL_TOKENS.index(token) for name, token in names.items()}


def vae(halvings: int = 4, channels: int = 3) -> AutoencoderKLQwenImage:
    """A side of ``2**halvings`` pixels is one latent; ``channels`` is 4 for pictures with transparency."""
    return AutoencoderKLQwenImage(
        base_dim=2,  # the first layers see whole input images
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1] + [2] * (halvings - 1),
        num_res_blocks=1,
        temperal_downsample=[False] + [True] * (halvings - 1),
        input_channels=channels,
    )


# At most 16 x 16 patches, 64 tokens once 2 x 2 of them are merged.
IMAGES = {
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
