"""Random PEFT adapters for the tiny Qwen-Image, as files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

TARGETS = ("to_q", "to_k", "to_v", "to_out")


def write_adapter(folder: Path, seed: int, *, width: int, rank: int = 8, num_layers: int = 2) -> Path:
    """An adapter of the attention projections (``width``, ``width``); strong enough to change the image."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(num_layers):
        for target in TARGETS:
            name = f"base_model.model.transformer.transformer_blocks.{layer}.attn.{target}"
            weights[f"{name}.lora_A.weight"] = torch.randn((rank, width), generator=generator) * 0.2
            weights[f"{name}.lora_B.weight"] = torch.randn((width, rank), generator=generator) * 0.2
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
