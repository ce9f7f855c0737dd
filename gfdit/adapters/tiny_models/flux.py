"""FLUX.1: text encoders CLIP and T5, an image VAE, two-stream and single-stream blocks, distilled guidance.

Kontext, which edits an image, is another pipeline over the same parts.
"""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from gfdit.adapters.tiny_models import TinyModelSpec, clip, t5_encoder
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.rope import rope_axes
from gfdit.adapters.tiny_models.t5_tokenizer import write_t5_tokenizer


def write(directory: Path, spec: TinyModelSpec, pipeline: str = "FluxPipeline") -> None:
    """`--layers` counts the blocks of each kind."""
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    clip.write_clip(directory / "tokenizer", directory / "text_encoder")
    num_tokens = write_t5_tokenizer(directory / "tokenizer_2")
    torch.manual_seed(spec.seed + 1)
    t5_encoder.t5_encoder(num_tokens).save_pretrained(directory / "text_encoder_2")
    torch.manual_seed(spec.seed + 2)
    autoencoder_kl(0.3611, 0.1159).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 3)
    _transformer(spec).save_pretrained(directory / "transformer")
    scheduler().save_pretrained(directory / "scheduler")
    index = {"_class_name": pipeline} | _COMPONENTS
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_kontext(directory: Path, spec: TinyModelSpec) -> None:
    write(directory, spec, pipeline="FluxKontextPipeline")


def _transformer(spec: TinyModelSpec) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=spec.num_layers,
        num_single_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        joint_attention_dim=t5_encoder.WIDTH,
        pooled_projection_dim=clip.WIDTH,
        guidance_embeds=True,
        axes_dims_rope=rope_axes(spec.head_dim),
    )


def scheduler(*, use_dynamic_shifting: bool = True) -> FlowMatchEulerDiscreteScheduler:
    """Dynamic shifting adapts the time steps to the size of the image."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=use_dynamic_shifting,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


_COMPONENTS = {
    "_diffusers_version": "0.30.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
