"""The tensors of an artifact, those inside its objects too: solver history is as large as the latents."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping
from enum import Enum
from types import ModuleType
from typing import Any

import torch

# Smaller ones inside an object travel with it: timesteps, sigmas, means.
NESTED_BYTES = 32 * 1024
_MAX_DEPTH = 5
_LEAVES = (str, bytes, int, float, type, ModuleType, Enum, torch.Generator, torch.nn.Module)


def tensor_fields(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """By name, those on the top level first; a nested one is named by its path, ``scheduler.model_outputs.1``.

    Each tensor once, under its first name.
    """
    found = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    seen = {id(value) for value in found.values()}
    for name, value in fields.items():
        if name not in found:
            _search(name, value, found, seen, _MAX_DEPTH)
    return found


def _search(path: str, value: Any, found: dict[str, torch.Tensor], seen: set[int], depth: int) -> None:
    if value is None or isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.nbytes > NESTED_BYTES:
            found[path] = value
    elif depth:
        for name, inner in _members(value):
            _search(f"{path}.{name}", inner, found, seen, depth - 1)


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if (reduce := copyreg.dispatch_table.get(type(value))) is None:
        return getattr(value, "__dict__", {}).items()
    made = reduce(value)  # what is pickled of it, not what it computed of that
    return [] if isinstance(made, str) else enumerate([*made[1], *made[2:3]])
