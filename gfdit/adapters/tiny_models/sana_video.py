"""SANA-Video: text encoder Gemma 2, the VAE of Wan, linear attention and convolutions over space and time."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, DPMSolverMultistepScheduler, SanaVideoTransformer3DModel

from gfdit.adapters.tiny_models import TinyModelSpec, gemma

LATENT_CHANNELS = 16
_MAX_TOKENS = 4096  # an instruction of 1600 characters comes before every prompt


def write(directory: Path, spec: TinyModelSpec, pipeline: str = "SanaVideoPipeline") -> None:
    num_tokens = gemma.write_gemma_tokenizer(directory / "tokenizer", _MAX_TOKENS)
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    gemma.gemma2(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    AutoencoderKLWan(base_dim=4, z_dim=LATENT_CHANNELS, num_res_blocks=1).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0, solver_order=2
    ).save_pretrained(directory / "scheduler")
    index = {"_class_name": pipeline, **_MODEL_INDEX}
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_i2v(directory: Path, spec: TinyModelSpec) -> None:
    """The same parts for the pipeline that keeps a first frame."""
    write(directory, spec, pipeline="SanaImageToVideoPipeline")


def _transformer(spec: TinyModelSpec) -> SanaVideoTransformer3DModel:
    return SanaVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=spec.num_heads,
        attention_head_dim=spec.head_dim,
        num_layers=spec.num_layers,
        num_cross_attention_heads=spec.num_heads,
        cross_attention_head_dim=spec.head_dim,
        cross_attention_dim=spec.num_heads * spec.head_dim,
        caption_channels=gemma.WIDTH,
        mlp_ratio=2.0,
        sample_size=30,  # the pipeline knows the 480p model by it
    )


_MODEL_INDEX = {
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "DPMSolverMultistepScheduler"],
    "text_encoder": ["transformers", "Gemma2Model"],
    "tokenizer": ["transformers", "GemmaTokenizer"],
    "transformer": ["diffusers", "SanaVideoTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
