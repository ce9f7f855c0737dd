"""An artifact taken apart for transport: tensors as they are, everything else as bytes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import torch

from gfdit.migration import pickling


@dataclass(slots=True)
class ArtifactParts:
    """``tensors`` are replicated fields (any shape, dtype, device); ``metadata`` is a pickle of the rest."""

    metadata: bytes = b""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return len(self.metadata) + sum(tensor.nbytes for tensor in self.tensors.values())

    def header(self) -> bytes:
        """Everything a receiver needs to allocate the tensors, and the metadata."""
        specs = [
            (name, tensor.dtype, tuple(tensor.shape), tensor.device.type == "cpu")
            for name, tensor in self.tensors.items()
        ]
        return pickle.dumps((self.metadata, specs), protocol=pickle.HIGHEST_PROTOCOL)

    @classmethod
    def allocate(cls, header: bytes, device: torch.device) -> ArtifactParts:
        """Uninitialized tensors for a :meth:`header` of one of this program's workers.

        On ``device``, but on the host where the sender has them there.
        """
        metadata, specs = pickle.loads(header)
        host = torch.device("cpu")
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=host if on_host else device)
            for name, dtype, shape, on_host in specs
        }
        return cls(metadata, tensors)


def split_fields(fields: dict[str, Any]) -> ArtifactParts:
    """Tensors apart, the rest pickled. Objects inside ``fields`` keep their own tensors (schedulers)."""
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in fields.items() if name not in tensors}
    return ArtifactParts(pickling.dumps(rest), tensors)


def join_fields(parts: ArtifactParts, device: torch.device) -> dict[str, Any]:
    """Inverse of :func:`split_fields`; generators and nested tensors come back on ``device``."""
    return {**pickling.loads(parts.metadata, device), **parts.tensors}
