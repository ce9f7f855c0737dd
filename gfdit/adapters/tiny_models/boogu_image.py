"""Boogu-Image: Qwen3-VL reads prompt and image; blocks of two streams, then those of Lumina 2."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import Lumina2Transformer2DModel
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock, LuminaRMSNormZero
from torch import nn

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3_vl
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.plain import Plain, save_transformer
from gfdit.adapters.tiny_models.rope import rope_axes

PATCH_SIZE = 2
_MAX_IMAGES = 5


def write(directory: Path, spec: TinyModelSpec, pipeline: str = "BooguImagePipeline") -> None:
    """`--layers` counts the blocks of each kind."""
    num_tokens = qwen3_vl.write_processor(directory / "processor")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    qwen3_vl.text_encoder(num_tokens).save_pretrained(directory / "mllm")
    torch.manual_seed(spec.seed + 1)
    autoencoder_kl(0.3611, 0.1159).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _write_transformer(directory / "transformer", spec)
    (directory / "scheduler").mkdir()
    (directory / "scheduler" / "scheduler_config.json").write_text(json.dumps(_SCHEDULER, indent=2) + "\n")
    index = {"_class_name": pipeline, **_MODEL_INDEX}
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_turbo(directory: Path, spec: TinyModelSpec) -> None:
    """The same parts for the pipeline of few steps, with fresh noise between them."""
    write(directory, spec, pipeline="BooguImageTurboPipeline")


def _write_transformer(directory: Path, spec: TinyModelSpec) -> None:
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
    model = Lumina2Transformer2DModel(**sizes, cap_feat_dim=qwen3_vl.WIDTH)
    model.single_stream_layers = model.layers
    del model.layers

    def block() -> Lumina2TransformerBlock:
        kv_heads, eps = sizes["num_kv_heads"], sizes["norm_eps"]
        return Lumina2TransformerBlock(width, spec.num_heads, kv_heads, sizes["multiple_of"], None, eps)

    model.ref_image_patch_embedder = nn.Linear(PATCH_SIZE**2 * LATENT_CHANNELS, width)
    model.ref_image_refiner = nn.ModuleList([block()])
    model.double_stream_layers = nn.ModuleList(
        [_double_stream(block(), block(), block(), width) for _ in range(spec.num_layers)]
    )
    model.image_index_embedding = nn.Parameter(torch.randn(_MAX_IMAGES, width))
    config = {
        "_class_name": "BooguImageTransformer2DModel",
        **sizes,
        "num_layers": 2 * spec.num_layers,
        "num_double_stream_layers": spec.num_layers,
        "instruction_feature_configs": {
            "instruction_feat_dim": qwen3_vl.WIDTH,
            "num_instruction_feature_layers": 1,
            "reduce_type": "mean",
        },
        "timestep_scale": 1000.0,
    }
    save_transformer(model, directory, config)


def _double_stream(
    image: Lumina2TransformerBlock, instruction: Lumina2TransformerBlock, own: Lumina2TransformerBlock, width: int
) -> Plain:
    """Both streams attend to both, then the image to itself."""
    joint = Plain(to_out=image.attn.to_out, norm_q=image.attn.norm_q, norm_k=image.attn.norm_k)
    streams: dict[str, nn.Module] = {}
    for stream, attention in (("img", image.attn), ("instruct", instruction.attn)):
        streams |= {f"{stream}_to_{part}": getattr(attention, f"to_{part}") for part in "qkv"}
        streams[f"{stream}_out"] = nn.Linear(width, width, bias=False)
    joint.processor = Plain(**streams)
    return Plain(
        img_instruct_attn=joint,
        img_self_attn=own.attn,
        img_feed_forward=image.feed_forward,
        img_norm1=image.norm1,
        img_norm2=LuminaRMSNormZero(width, 1e-5, True),
        img_norm3=own.norm1,
        img_ffn_norm1=image.ffn_norm1,
        img_attn_norm=image.norm2,
        img_self_attn_norm=own.norm2,
        img_ffn_norm2=image.ffn_norm2,
        instruct_feed_forward=instruction.feed_forward,
        instruct_norm1=instruction.norm1,
        instruct_norm2=LuminaRMSNormZero(width, 1e-5, True),
        instruct_ffn_norm1=instruction.ffn_norm1,
        instruct_attn_norm=instruction.norm2,
        instruct_ffn_norm2=instruction.ffn_norm2,
    )


_SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "dynamic_time_shift": True}
_MODEL_INDEX = {
    "_diffusers_version": "0.35.0",
    "mllm": ["transformers", "Qwen3VLForConditionalGeneration"],
    "processor": ["transformers", "Qwen3VLProcessor"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "transformer": ["diffusers", "BooguImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
