"""HunyuanVideo-1.5: Qwen2.5-VL reads the prompt, ByT5 what is to be written in the picture; a VAE that shortens
each side 16 times.

What a checkpoint cannot make smaller: the projection of ByT5's output is 2048 wide, and without an image a
transformer gets zeros for the 1152 numbers of each of 729 patches.
"""

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Transformer3DModel,
)
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3
from gfdit.adapters.tiny_models.qwen_image import TEXT_WIDTH, text_encoder
from gfdit.adapters.tiny_models.rope import rope_axes
from gfdit.adapters.tiny_models.t5_encoder import WIDTH as BYT5_WIDTH
from gfdit.adapters.tiny_models.t5_encoder import write_byt5

LATENT_CHANNELS = 16
_IMAGE_WIDTH, _NO_IMAGE_WIDTH = 32, 1152


def write(directory: Path, spec: TinyModelSpec) -> None:
    """From text."""
    _write(directory, spec, "HunyuanVideo15Pipeline", _NO_IMAGE_WIDTH, {})


def write_i2v(directory: Path, spec: TinyModelSpec) -> None:
    """From text and a first frame, which SigLIP sees too."""
    torch.manual_seed(spec.seed + 4)
    sizes = {
        "hidden_size": _IMAGE_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=64)).save_pretrained(directory / "image_encoder")
    SiglipImageProcessor(size={"height": 64, "width": 64}).save_pretrained(directory / "feature_extractor")
    seeing = {
        "feature_extractor": ["transformers", "SiglipImageProcessor"],
        "image_encoder": ["transformers", "SiglipVisionModel"],
    }
    _write(directory, spec, "HunyuanVideo15ImageToVideoPipeline", _IMAGE_WIDTH, seeing)


def _write(
    directory: Path, spec: TinyModelSpec, pipeline: str, image_width: int, more: dict[str, list[str]]
) -> None:
    num_tokens = qwen3.write_tokenizer(directory / "tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    text_encoder(num_tokens).model.language_model.save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    write_byt5(directory / "tokenizer_2", directory / "text_encoder_2")
    torch.manual_seed(spec.seed + 2)
    widths = (8, 16, 32, 32, 32)
    AutoencoderKLHunyuanVideo15(
        latent_channels=LATENT_CHANNELS, block_out_channels=widths, layers_per_block=1
    ).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 3)
    _transformer(spec, image_width).save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=5.0).save_pretrained(directory / "scheduler")
    index = {"_class_name": pipeline, **_MODEL_INDEX, **more}
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _transformer(spec: TinyModelSpec, image_width: int) -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel(
        in_channels=2 * LATENT_CHANNELS + 1,  # noise, the encoded first frame and a mask
        out_channels=LATENT_CHANNELS,
        num_attention_heads=spec.num_heads,
        attention_head_dim=spec.head_dim,
        num_layers=spec.num_layers,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=TEXT_WIDTH,
        text_embed_2_dim=BYT5_WIDTH,
        image_embed_dim=image_width,
        rope_axes_dim=rope_axes(spec.head_dim),
    )


_MODEL_INDEX = {
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "tokenizer_2": ["transformers", "ByT5Tokenizer"],
    "transformer": ["diffusers", "HunyuanVideo15Transformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLHunyuanVideo15"],
}
