"""Pickling of an artifact's metadata between ranks whose devices differ in index.

A plain pickle restores device tensors and random generators onto the sender's device. Here both travel as host
bytes and come back on the receiver's device. Tensors that travel by themselves are left out and put back.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch


def dumps(value: Any, left_out: Mapping[str, torch.Tensor]) -> bytes:
    """Pickle ``value``; generators and device tensors inside it are taken to the host.

    The tensors of ``left_out`` are only named.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, left_out).dump(value)
    return buffer.getvalue()


def loads(data: bytes, device: torch.device, left_out: Mapping[str, torch.Tensor]) -> Any:
    """Inverse of :func:`dumps`, with device objects on ``device``; for bytes from this program's workers only."""
    return _Unpickler(io.BytesIO(data), device, left_out).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, left_out: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = {id(tensor): name for name, tensor in left_out.items()}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Generator):
            return "generator", obj.device.type, obj.get_state().numpy().tobytes()
        if isinstance(obj, torch.Tensor):
            if (name := self._names.get(id(obj))) is not None:
                return "field", "", name
            if obj.device.type != "cpu":
                return "tensor", obj.device.type, obj.cpu()
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device, left_out: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._device = device
        self._left_out = left_out

    def persistent_load(self, pid: Any) -> Any:
        kind, device_type, value = pid
        if kind == "field":
            return self._left_out[value]
        device = self._device if device_type == self._device.type else torch.device(device_type)
        if kind == "tensor":
            return value.to(device)
        generator = torch.Generator(device=device)
        generator.set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        return generator
