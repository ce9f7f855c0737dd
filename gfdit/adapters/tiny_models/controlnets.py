"""ControlNets of diffusers' for the tiny base models: their widths, fewer blocks, and residuals that matter.

They are trained from layers of zeros, which would let nothing through; here those are random.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxControlNetModel, ModelMixin, QwenImageControlNetModel, SD3ControlNetModel

from gfdit.adapters.tiny_models import TinyModelSpec, clip, t5_encoder
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS
from gfdit.adapters.tiny_models.qwen_image import PATCH_SIZE, TEXT_WIDTH
from gfdit.adapters.tiny_models.rope import rope_axes
from gfdit.adapters.tiny_models.sd3 import MAX_PATCHES
from gfdit.adapters.tiny_models.zeros import fill_zeros

#: Kinds of control of the Union net.
NUM_MODES = 3


def write_flux(directory: Path, spec: TinyModelSpec) -> None:
    """`--layers` counts the blocks of each kind."""
    _save(_flux, directory, spec)


def write_flux_union(directory: Path, spec: TinyModelSpec) -> None:
    """One net for several kinds of control, without an embedding of guidance."""
    _save(lambda spec: _flux(spec, num_mode=NUM_MODES, guidance_embeds=False), directory, spec)


def write_flux_pixels(directory: Path, spec: TinyModelSpec) -> None:
    """As XLabs' are: it encodes the control image by itself, and has blocks of the first kind only."""
    sizes: dict[str, Any] = {"conditioning_embedding_channels": 16, "num_single_layers": 0, "patch_size": 2}
    _save(lambda spec: _flux(spec, **sizes), directory, spec)


def write_sd3(directory: Path, spec: TinyModelSpec) -> None:
    _save(_sd3, directory, spec)


def write_sd35(directory: Path, spec: TinyModelSpec) -> None:
    """As those of the large SD3.5: it reads no text, and positions are embedded as its base does."""
    fields = {"joint_attention_dim": None, "use_pos_embed": False, "force_zeros_for_pooled_projection": False}
    _save(lambda spec: _sd3(spec, **fields), directory, spec)


def write_qwen_image(directory: Path, spec: TinyModelSpec) -> None:
    _save(_qwen_image, directory, spec)


def _save(make: Callable[[TinyModelSpec], ModelMixin], directory: Path, spec: TinyModelSpec) -> None:
    torch.manual_seed(spec.seed)
    fill_zeros(make(spec), std=0.05).save_pretrained(directory)


def _flux(spec: TinyModelSpec, **fields: Any) -> FluxControlNetModel:
    sizes: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": 4 * LATENT_CHANNELS,
        "num_layers": spec.num_layers,
        "num_single_layers": spec.num_layers,
        "attention_head_dim": spec.head_dim,
        "num_attention_heads": spec.num_heads,
        "joint_attention_dim": t5_encoder.WIDTH,
        "pooled_projection_dim": clip.WIDTH,
        "guidance_embeds": True,
        "axes_dims_rope": rope_axes(spec.head_dim),
    }
    return FluxControlNetModel(**{**sizes, **fields})


def _sd3(spec: TinyModelSpec, **fields: Any) -> SD3ControlNetModel:
    sizes: dict[str, Any] = {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": LATENT_CHANNELS,
        "num_layers": spec.num_layers,
        "attention_head_dim": spec.head_dim,
        "num_attention_heads": spec.num_heads,
        "joint_attention_dim": t5_encoder.WIDTH,
        "caption_projection_dim": spec.num_heads * spec.head_dim,
        "pooled_projection_dim": 2 * clip.WIDTH,
        "out_channels": LATENT_CHANNELS,
        "pos_embed_max_size": MAX_PATCHES,
        "qk_norm": "rms_norm",
    }
    return SD3ControlNetModel(**{**sizes, **fields})


def _qwen_image(spec: TinyModelSpec) -> QwenImageControlNetModel:
    return QwenImageControlNetModel(
        patch_size=PATCH_SIZE,
        in_channels=LATENT_CHANNELS * PATCH_SIZE**2,
        out_channels=LATENT_CHANNELS,
        num_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=rope_axes(spec.head_dim),
    )
