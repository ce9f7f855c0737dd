"""What random weights alone do not give: that outputs depend on inputs, through layers of a few channels."""

from typing import TypeVar

import torch

_Module = TypeVar("_Module", bound=torch.nn.Module)


def fill_zeros(module: _Module, std: float = 0.1) -> _Module:
    """Give every parameter that is all zeros, but for biases, random values; returns ``module``.

    Training starts some layers from zero, often the last one: the image would be the same whatever comes before.
    """
    for name, parameter in module.named_parameters():
        if not name.endswith("bias") and not parameter.any():
            torch.nn.init.normal_(parameter, std=std)
    return module


def zero_biases(module: _Module) -> _Module:
    """Set all biases to zero; returns ``module``. Of a few channels, they would drown what is in the latents."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    return module
