"""A written checkpoint in another floating-point type, as the published ones are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def round_weights(checkpoint: Path, dtype: str) -> None:
    """Store all float32 weights in ``checkpoint`` as ``dtype``, and say so in the configurations that do."""
    target: torch.dtype = getattr(torch, dtype)
    for path in sorted(checkpoint.rglob("*.safetensors")):
        tensors = load_file(path)
        rounded = {name: t.to(target) if t.dtype is torch.float32 else t for name, t in tensors.items()}
        save_file(rounded, path, metadata={"format": "pt"})
    for path in sorted(checkpoint.rglob("config.json")):
        config = json.loads(path.read_text())
        if _say(config, dtype):
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _say(config: dict, dtype: str) -> bool:
    """Change each mention of float32 weights, also in nested configurations; whether there was one."""
    found = False
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and value == "float32":
            config[key], found = dtype, True
        elif isinstance(value, dict):
            found |= _say(value, dtype)
    return found
