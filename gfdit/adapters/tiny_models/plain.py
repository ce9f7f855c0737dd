"""Transformers that diffusers lacks: modules with a checkpoint's names and without a ``forward``."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn


class Plain(nn.Module):
    """Its submodules and parameters, by name."""

    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def modulation(inputs: int, outputs: int) -> nn.Sequential:
    """The layer after an activation: its name ends in `.1`."""
    return nn.Sequential(nn.SiLU(), nn.Linear(inputs, outputs))


def save_transformer(module: nn.Module, directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    save_file(module.state_dict(), directory / "diffusion_pytorch_model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
