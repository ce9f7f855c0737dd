"""Tensors of the past: shape, dtype and device of what was computed elsewhere, and no value.

A forward that is replayed goes through the steps before its own without computing them. What they would have made
is stood in for by :class:`Past`, through which any arithmetic goes and which no value can come out of: a forward
that needs one of them raises, and never goes on with a wrong number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map, tree_map_only

_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class PastValueError(RuntimeError):
    """A forward that is replayed asked for a value that did not travel."""


class Spec(NamedTuple):
    """All that is kept of a tensor that will not be read again."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


class Past(torch.Tensor):
    """Made of a meta tensor, which goes where it goes; its device is the one that the real tensor had."""

    _meta: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> Past:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )

    def __init__(self, meta: torch.Tensor, device: torch.device) -> None:
        self._meta = meta

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Past({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if not _NEEDS_VALUES.isdisjoint(func.tags):
            raise PastValueError(f"{func} reads a tensor of a step that was not computed here")
        _check_writes(func, args, named)
        past: dict[int, Past] = {}
        device: list[torch.device] = []

        def to_meta(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, Past):
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            past[id(tensor._meta)] = tensor
            device.append(tensor.device)
            return tensor._meta

        args, named = tree_map_only(torch.Tensor, to_meta, (args, named))
        if named.get("device") is not None:  # a copy to another device
            device.insert(0, torch.device(named["device"]))
            named["device"] = torch.device("meta")
        named.pop("pin_memory", None)
        made = func(*args, **named)

        def to_past(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            known = past.get(id(value))  # what was changed in place is itself
            return Past(value, device[0]) if known is None else known

        return tree_map(to_past, made)


def specs_of(value: Any) -> Any:
    """``value`` with a :class:`Spec` for every tensor in its containers."""
    return tree_map_only(torch.Tensor, _spec, value)


def past_of(value: Any, device: torch.device) -> Any:
    """``value`` with a :class:`Past` for every :class:`Spec`; those of a device are on ``device``."""

    def make(spec: Any) -> Any:
        if not isinstance(spec, Spec):
            return spec
        meta = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        return Past(meta, device if spec.device_type == device.type else torch.device(spec.device_type))

    return tree_map(make, value, is_leaf=lambda node: isinstance(node, Spec))


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type)


def _check_writes(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A real tensor that is written from a past one would keep its old value, and nobody would notice."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[index] if index < len(args) else kwargs.get(argument.name)
        targets = target if isinstance(target, (list, tuple)) else [target]
        if any(isinstance(one, torch.Tensor) and not isinstance(one, Past) for one in targets):
            raise PastValueError(f"{func} writes a tensor of a step that was not computed here into a real one")
