"""LingBot-Video: Qwen3-VL reads prompt and first frame, the VAE of Wan, one stream of video and text tokens."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.embeddings import TimestepEmbedding
from torch import nn

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3_vl
from gfdit.adapters.tiny_models.plain import Plain, modulation, save_transformer
from gfdit.adapters.tiny_models.rope import rope_axes

LATENT_CHANNELS = 16
_PATCH_SIZE = (1, 2, 2)
_TOKEN_CHANNELS = 4 * LATENT_CHANNELS
_TIME_WIDTH = 64


def write(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = qwen3_vl.write_processor(directory / "processor")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    qwen3_vl.text_encoder(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    AutoencoderKLWan(base_dim=4, z_dim=LATENT_CHANNELS, num_res_blocks=1).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _write_transformer(directory / "transformer", spec)
    (directory / "scheduler").mkdir()
    (directory / "scheduler" / "scheduler_config.json").write_text(json.dumps(_SCHEDULER, indent=2) + "\n")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _write_transformer(directory: Path, spec: TinyModelSpec) -> None:
    """The dense kind; others mix experts."""
    width = spec.num_heads * spec.head_dim
    model = Plain(
        patch_embedder=nn.Linear(_TOKEN_CHANNELS, width),
        time_embedder=TimestepEmbedding(_TIME_WIDTH, width),
        time_modulation=modulation(width, 6 * width),
        text_embedder=Plain(
            norm=nn.RMSNorm(qwen3_vl.WIDTH),
            linear_1=nn.Linear(qwen3_vl.WIDTH, width),
            linear_2=nn.Linear(width, width),
        ),
        blocks=nn.ModuleList([_block(width, spec.head_dim) for _ in range(spec.num_layers)]),
        norm_out_modulation=modulation(width, 2 * width),
        proj_out=nn.Linear(width, _TOKEN_CHANNELS),
    )
    config = {
        "_class_name": "LingBotVideoTransformer3DModel",
        "patch_size": _PATCH_SIZE,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "hidden_size": width,
        "num_attention_heads": spec.num_heads,
        "depth": spec.num_layers,
        "intermediate_size": 2 * width,
        "text_dim": qwen3_vl.WIDTH,
        "freq_dim": _TIME_WIDTH,
        "axes_dims": rope_axes(spec.head_dim),
        "axes_lens": (8192, 256, 256),
    }
    save_transformer(model, directory, config)


def _block(width: int, head_dim: int) -> Plain:
    attention = {name: nn.Linear(width, width, bias=False) for name in ("to_q", "to_k", "to_v")}
    mlp = {name: nn.Linear(width, 2 * width, bias=False) for name in ("gate_proj", "up_proj")}
    return Plain(
        scale_shift_table=nn.Parameter(torch.randn(1, 6 * width) * 0.02),
        norm1=nn.RMSNorm(width),
        attn=Plain(
            **attention,
            norm_q=nn.RMSNorm(head_dim),
            norm_k=nn.RMSNorm(head_dim),
            to_out=nn.Linear(width, width),
        ),
        norm_post_attn=nn.RMSNorm(width),
        norm2=nn.RMSNorm(width),
        ffn=Plain(**mlp, down_proj=nn.Linear(2 * width, width, bias=False)),
        norm_post_ffn=nn.RMSNorm(width),
    )


_SCHEDULER = {"_class_name": "FlowUniPCMultistepScheduler", "num_train_timesteps": 1000, "shift": 1.0}
_MODEL_INDEX = {
    "_class_name": "LingBotVideoPipeline",
    "_diffusers_version": "0.36.0",
    "processor": ["transformers", "Qwen3VLProcessor"],
    "scheduler": ["diffusers", "FlowUniPCMultistepScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "transformer": ["diffusers", "LingBotVideoTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
