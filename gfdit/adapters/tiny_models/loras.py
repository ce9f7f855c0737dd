"""LoRAs in PEFT's format for the tiny base models, of their attention projections in every block.

A LoRA is for a base of the same heads, width and number of layers.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from gfdit.adapters.tiny_models import TinyModelSpec

RANK = 4
_ALPHA = 8
_IMAGE = ("to_q", "to_k", "to_v")
_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")


def write_flux(directory: Path, spec: TinyModelSpec) -> None:
    _write(directory, spec, ("transformer_blocks", "single_transformer_blocks"))


def write_two_streams(directory: Path, spec: TinyModelSpec) -> None:
    """Of Stable Diffusion 3 or Qwen-Image."""
    _write(directory, spec, ("transformer_blocks",))


def _write(directory: Path, spec: TinyModelSpec, groups: tuple[str, ...]) -> None:
    torch.manual_seed(spec.seed)
    width = spec.num_heads * spec.head_dim
    weights = {}
    for module in _modules(spec.num_layers, groups):
        for name, shape in (("lora_A", (RANK, width)), ("lora_B", (width, RANK))):
            weights[f"base_model.model.{module}.{name}.weight"] = 0.1 * torch.randn(shape)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": _ALPHA, "target_modules": [*_IMAGE, *_TEXT]}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _modules(num_layers: int, groups: tuple[str, ...]) -> Iterator[str]:
    for group in groups:
        projections = _IMAGE if group.startswith("single") else _IMAGE + _TEXT
        for block in range(num_layers):
            yield from (f"{group}.{block}.attn.{projection}" for projection in projections)
