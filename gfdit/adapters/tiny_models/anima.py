"""Anima: text encoder Qwen3, read at the tokens of T5, the VAE of Qwen-Image, cross-attention to text.

vLLM-Omni takes the transformer as a single file: the model to load is :data:`FILE` in the checkpoint's folder, and
its class is to be named, ``AnimaPipeline``. The other parts are found beside it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AnimaTextConditioner, CosmosTransformer3DModel
from safetensors.torch import save_file

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3
from gfdit.adapters.tiny_models.flux import scheduler
from gfdit.adapters.tiny_models.qwen_image import LATENT_CHANNELS
from gfdit.adapters.tiny_models.qwen_image_edit import vae
from gfdit.adapters.tiny_models.t5_tokenizer import write_t5_tokenizer
from gfdit.adapters.tiny_models.zeros import zero_biases

FILE = "anima.safetensors"


def write(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = qwen3.write_tokenizer(directory / "tokenizer")
    num_t5_tokens = write_t5_tokenizer(directory / "t5_tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    qwen3.text_encoder(num_tokens).model.save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    zero_biases(vae(halvings=3)).save_pretrained(directory / "vae")
    fields = {"transformer": _transformer_fields(spec), "text_conditioner": _conditioner_fields(num_t5_tokens)}
    torch.manual_seed(spec.seed + 2)
    transformer = CosmosTransformer3DModel(**fields["transformer"])
    torch.manual_seed(spec.seed + 3)
    conditioner = AnimaTextConditioner(**fields["text_conditioner"])
    weights = {
        f"{part}.{name}": tensor
        for part, module in (("transformer", transformer), ("text_conditioner", conditioner))
        for name, tensor in module.state_dict().items()
    }
    save_file(weights, directory / FILE)
    (directory / FILE).with_suffix(".json").write_text(json.dumps(fields, indent=2) + "\n")
    scheduler(use_dynamic_shifting=False).save_pretrained(directory / "scheduler")


def _transformer_fields(spec: TinyModelSpec) -> dict[str, Any]:
    return {
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_attention_heads": spec.num_heads,
        "attention_head_dim": spec.head_dim,
        "num_layers": spec.num_layers,
        "mlp_ratio": 2.0,
        "text_embed_dim": qwen3.WIDTH,
        "adaln_lora_dim": 32,
        "patch_size": [1, 2, 2],
        "rope_scale": [1.0, 4.0, 4.0],
        "concat_padding_mask": True,
        "extra_pos_embed_type": None,
    }


def _conditioner_fields(num_t5_tokens: int) -> dict[str, Any]:
    return {
        "source_dim": qwen3.WIDTH,
        "target_dim": qwen3.WIDTH,
        "model_dim": qwen3.WIDTH,
        "num_layers": 1,
        "num_attention_heads": 4,
        "mlp_ratio": 2.0,
        "target_vocab_size": num_t5_tokens,
        "min_sequence_length": 64,
    }
