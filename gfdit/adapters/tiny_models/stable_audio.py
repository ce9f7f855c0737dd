"""Stable Audio Open: text encoder T5, a VAE of waveforms, cross-attention to text and duration."""

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderOobleck,
    CosineDPMSolverMultistepScheduler,
    StableAudioDiTModel,
    StableAudioProjectionModel,
)

from gfdit.adapters.tiny_models import TinyModelSpec, t5_encoder
from gfdit.adapters.tiny_models.t5_tokenizer import write_t5_tokenizer
from gfdit.adapters.tiny_models.zeros import zero_biases

LATENT_CHANNELS = 16
# Of a request without a length: 64 latents of 32 samples are 46 ms.
MAX_LATENTS = 64


def write(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = write_t5_tokenizer(directory / "tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    t5_encoder.t5_encoder(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    zero_biases(_vae()).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    projection = StableAudioProjectionModel(t5_encoder.WIDTH, t5_encoder.WIDTH, min_value=0, max_value=512)
    projection.save_pretrained(directory / "projection_model")
    torch.manual_seed(spec.seed + 3)
    _transformer(spec).save_pretrained(directory / "transformer")
    scheduler = CosineDPMSolverMultistepScheduler(sigma_min=0.3, sigma_max=500.0, sigma_data=1.0)
    scheduler.save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _vae() -> AutoencoderOobleck:
    return AutoencoderOobleck(
        encoder_hidden_size=16,
        downsampling_ratios=[2, 4, 4],
        channel_multiples=[1, 2, 4],
        decoder_channels=16,
        decoder_input_channels=LATENT_CHANNELS,
    )


def _transformer(spec: TinyModelSpec) -> StableAudioDiTModel:
    num_kv_heads = spec.num_heads // 2 if spec.num_heads % 2 == 0 else spec.num_heads
    return StableAudioDiTModel(
        sample_size=MAX_LATENTS,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        num_key_value_attention_heads=num_kv_heads,
        cross_attention_dim=num_kv_heads * spec.head_dim,
        cross_attention_input_dim=t5_encoder.WIDTH,
        global_states_input_dim=2 * t5_encoder.WIDTH,
    )


_MODEL_INDEX = {
    "_class_name": "StableAudioPipeline",
    "_diffusers_version": "0.30.0.dev0",
    "projection_model": ["stable_audio", "StableAudioProjectionModel"],
    "scheduler": ["diffusers", "CosineDPMSolverMultistepScheduler"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "StableAudioDiTModel"],
    "vae": ["diffusers", "AutoencoderOobleck"],
}
