"""Wan2.2: text encoder UMT5, a causal 3D VAE, one transformer or two experts with cross-attention to text."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)

from gfdit.adapters.tiny_models import TinyModelSpec
from gfdit.adapters.tiny_models.t5_encoder import WIDTH as UMT5_WIDTH
from gfdit.adapters.tiny_models.t5_encoder import umt5_encoder
from gfdit.adapters.tiny_models.t5_tokenizer import write_t5_tokenizer

# Of the VAE of Wan2.1, which the A14B models share, and of the one that came with the 5B model.
LATENT_CHANNELS, LATENT_CHANNELS_5B = 16, 48
# The A14B image model takes noise, the encoded image and a mask of four frames per latent frame.
IMAGE_INPUT_CHANNELS = 2 * LATENT_CHANNELS + 4
# VACE's condition: what to keep and what to make anew, and a mask of the 8 x 8 pixels of a latent.
_VACE_CHANNELS = 2 * LATENT_CHANNELS + 8 * 8


def write_ti2v(directory: Path, spec: TinyModelSpec) -> None:
    """Like Wan2.2-TI2V-5B: one transformer, from text and, with timesteps per token, from a first frame."""
    index = {"_class_name": "WanPipeline", "boundary_ratio": None, "expand_timesteps": True}
    experts = {"transformer": LATENT_CHANNELS_5B}
    _write(directory, spec, index, _vae_5b, experts, LATENT_CHANNELS_5B)


def write_dmd(directory: Path, spec: TinyModelSpec) -> None:
    """Like FastWan2.2-TI2V-5B: that model distilled to three steps, with fresh noise between them."""
    index = {"_class_name": "WanDMDPipeline", "boundary_ratio": None, "expand_timesteps": True}
    experts = {"transformer": LATENT_CHANNELS_5B}
    _write(directory, spec, index, _vae_5b, experts, LATENT_CHANNELS_5B)


def write_t2v(directory: Path, spec: TinyModelSpec) -> None:
    """Like Wan2.2-T2V-A14B: two experts, from text."""
    index = {"_class_name": "WanPipeline", "boundary_ratio": 0.875}
    experts = {"transformer": LATENT_CHANNELS, "transformer_2": LATENT_CHANNELS}
    _write(directory, spec, index, _vae, experts, LATENT_CHANNELS)


def write_i2v(directory: Path, spec: TinyModelSpec) -> None:
    """Like Wan2.2-I2V-A14B: two experts, from text and a first frame."""
    index = {
        "_class_name": "WanImageToVideoPipeline",
        "boundary_ratio": 0.9,
        "image_encoder": [None, None],
        "image_processor": [None, None],
    }
    experts = {"transformer": IMAGE_INPUT_CHANNELS, "transformer_2": IMAGE_INPUT_CHANNELS}
    _write(directory, spec, index, _vae, experts, LATENT_CHANNELS)


def write_vace(directory: Path, spec: TinyModelSpec) -> None:
    """Like Wan2.1-VACE-1.3B: blocks beside every second one carry a video, a mask and reference images."""
    index = {"_class_name": "WanVACEPipeline", "boundary_ratio": None}
    vace = {"vace_layers": list(range(0, spec.num_layers, 2)), "vace_in_channels": _VACE_CHANNELS}
    experts = {"transformer": LATENT_CHANNELS}
    _write(directory, spec, index, _vae, experts, LATENT_CHANNELS, WanVACETransformer3DModel, **vace)


def _write(
    directory: Path,
    spec: TinyModelSpec,
    index: dict[str, Any],
    make_vae: Any,
    experts: dict[str, int],
    out_channels: int,
    transformer: Any = WanTransformer3DModel,
    **more: Any,
) -> None:
    """``experts`` gives the input channels of each transformer by its folder, ``more`` what else they take."""
    num_tokens = write_t5_tokenizer(directory / "tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    umt5_encoder(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    make_vae().save_pretrained(directory / "vae")
    for offset, (folder, in_channels) in enumerate(experts.items()):
        torch.manual_seed(spec.seed + 2 + offset)
        sizes = _transformer(spec, in_channels, out_channels)
        transformer(**sizes, **more).save_pretrained(directory / folder)
    # The pipeline makes a scheduler of its own; the folder only has to exist.
    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    ).save_pretrained(directory / "scheduler")
    # vLLM-Omni looks for a second expert by its folder in one pipeline and by its key in the other.
    index |= {folder: ["diffusers", transformer.__name__] for folder in experts}
    (directory / "model_index.json").write_text(json.dumps(index | _COMMON_INDEX, indent=2) + "\n")


def _vae() -> AutoencoderKLWan:
    """8 x 8 pixels and four frames a latent."""
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


def _vae_5b() -> AutoencoderKLWan:
    """16 x 16 pixels and four frames a latent."""
    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=LATENT_CHANNELS_5B,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT_CHANNELS_5B,
        latents_std=[1.0] * LATENT_CHANNELS_5B,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
    )


def _transformer(spec: TinyModelSpec, in_channels: int, out_channels: int) -> dict[str, Any]:
    width = spec.num_heads * spec.head_dim
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": spec.num_heads,
        "attention_head_dim": spec.head_dim,
        "in_channels": in_channels,
        "out_channels": out_channels,
        "text_dim": UMT5_WIDTH,
        "freq_dim": 64,
        "ffn_dim": 2 * width,
        "num_layers": spec.num_layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
    }


_COMMON_INDEX = {
    "_diffusers_version": "0.35.0.dev0",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
