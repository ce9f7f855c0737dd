"""A digest of everything in an artifact, by path: to see whether, and where, two of them differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

Fingerprint = dict[str, str]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size)


def fingerprint(value: Any) -> Fingerprint:
    """Equal for equal values, whichever process they are in; modules count by their type alone."""
    return dict(_walk("", value, []))


def differences(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Paths at which they differ."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def _walk(path: str, value: Any, above: list[int]) -> Iterator[tuple[str, str]]:
    if id(value) in above:
        yield path, "itself"
    elif isinstance(value, _PLAIN):
        yield path, f"{type(value).__name__} {value!r}"
    elif isinstance(value, torch.Tensor):
        yield path, f"{value.dtype} {tuple(value.shape)} {_digest(_bytes_of(value))}"
    elif isinstance(value, np.ndarray):
        yield path, f"{value.dtype} {value.shape} {_digest(np.ascontiguousarray(value).tobytes())}"
    elif isinstance(value, torch.Generator):
        yield path, f"generator {value.device.type} {_digest(_bytes_of(value.get_state()))}"
    elif hasattr(value, "getbands"):  # a PIL image
        yield path, f"{value.mode} {value.size} {_digest(value.tobytes())}"
    elif isinstance(value, torch.nn.Module) or callable(value):
        yield path, getattr(value, "__qualname__", type(value).__qualname__)
    else:
        yield path, "dict" if isinstance(value, dict) else type(value).__qualname__  # others travel as one
        for name, inner in _members(value):
            yield from _walk(f"{path}.{name}" if path else str(name), inner, [*above, id(value)])


def _members(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return list({**named, **getattr(value, "__dict__", {})}.items())


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
