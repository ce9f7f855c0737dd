"""LTX-2: video and sound at once. Text encoder Gemma 3 with connectors, two VAEs, a vocoder, coupled streams."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from gfdit.adapters.tiny_models import TinyModelSpec, gemma
from gfdit.adapters.tiny_models.zeros import zero_biases

LATENT_CHANNELS = 16
# A sound of 16 mel bins becomes 4 latent bins of 4 channels.
_MEL_BINS, _AUDIO_LATENT_CHANNELS, _AUDIO_TOKEN_CHANNELS = 16, 4, 16
_STEREO = 2
_MAX_TOKENS = 1024
_REGISTERS = 8  # stand for padding; `max_sequence_length` must be a multiple
_SHIFT: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "shift_terminal": 0.1,
    "base_shift": 0.95,
    "max_shift": 2.05,
}


def write(directory: Path, spec: TinyModelSpec, pipeline: str = "LTX2Pipeline", **shift: Any) -> None:
    """``shift`` is that of the scheduler's times."""
    num_tokens = gemma.write_gemma_tokenizer(directory / "tokenizer", _MAX_TOKENS)
    parts = {
        "text_encoder": lambda: gemma.gemma3(num_tokens),
        "connectors": _connectors,
        "vae": _video_vae,
        "audio_vae": _audio_vae,
        "vocoder": _vocoder,
        "transformer": lambda: _transformer(spec),
    }
    # A generator per component: the seed of one does not depend on the size of another.
    for offset, (folder, make) in enumerate(parts.items()):
        torch.manual_seed(spec.seed + offset)
        make().save_pretrained(directory / folder)
    FlowMatchEulerDiscreteScheduler(**(shift or _SHIFT)).save_pretrained(directory / "scheduler")
    index = {"_class_name": pipeline, **_MODEL_INDEX}
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_distilled(directory: Path, spec: TinyModelSpec) -> None:
    """The same parts for the pipeline of eight given steps; it knows such a checkpoint by its scheduler."""
    write(directory, spec, pipeline="LTX2DistilledOneStagePipeline", use_dynamic_shifting=False)


def write_dmd2(directory: Path, spec: TinyModelSpec) -> None:
    """The same parts for the pipeline of four steps."""
    write(directory, spec, pipeline="LTX2T2VDMD2Pipeline")


def _connectors() -> LTX2TextConnectors:
    sizes = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_learnable_registers": _REGISTERS,
    }
    streams = {f"{stream}_connector_{name}": size for stream in ("video", "audio") for name, size in sizes.items()}
    return LTX2TextConnectors(
        caption_channels=gemma.WIDTH, text_proj_in_factor=gemma.NUM_LAYERS + 1, rope_type="split", **streams
    )


def _video_vae() -> AutoencoderKLLTX2Video:
    """32 x 32 pixels and eight frames a latent."""
    return AutoencoderKLLTX2Video(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )


def _audio_vae() -> AutoencoderKLLTX2Audio:
    return AutoencoderKLLTX2Audio(
        base_channels=_AUDIO_TOKEN_CHANNELS,
        latent_channels=_AUDIO_LATENT_CHANNELS,
        num_res_blocks=1,
        mel_bins=_MEL_BINS,
    )


def _vocoder() -> LTX2Vocoder:
    vocoder = LTX2Vocoder(
        in_channels=_STEREO * _MEL_BINS, hidden_channels=64, resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]]
    )
    for layer in vocoder.upsamplers:
        layer.weight.data.mul_(3.0)  # or a sound becomes a thousandth of itself
    return zero_biases(vocoder)


def _transformer(spec: TinyModelSpec) -> LTX2VideoTransformer3DModel:
    width, audio_head_dim = spec.num_heads * spec.head_dim, spec.head_dim // 2
    return LTX2VideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=spec.num_heads,
        attention_head_dim=spec.head_dim,
        cross_attention_dim=width,
        audio_in_channels=_AUDIO_TOKEN_CHANNELS,
        audio_out_channels=_AUDIO_TOKEN_CHANNELS,
        audio_num_attention_heads=spec.num_heads,
        audio_attention_head_dim=audio_head_dim,
        audio_cross_attention_dim=spec.num_heads * audio_head_dim,
        num_layers=spec.num_layers,
        caption_channels=gemma.WIDTH,
        rope_type="split",
    )


_MODEL_INDEX = {
    "_diffusers_version": "0.37.0.dev0",
    "audio_vae": ["diffusers", "AutoencoderKLLTX2Audio"],
    "connectors": ["ltx2", "LTX2TextConnectors"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Gemma3ForConditionalGeneration"],
    "tokenizer": ["transformers", "GemmaTokenizer"],
    "transformer": ["diffusers", "LTX2VideoTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLLTX2Video"],
    "vocoder": ["ltx2", "LTX2Vocoder"],
}
