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
        specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        return pickle.dumps((self.metadata, specs), protocol=pickle.HIGHEST_PROTOCOL)

    @classmethod
    def allocate(cls, header: bytes, device: torch.device) -> ArtifactParts:
        """Uninitialized tensors on ``device`` for a :meth:`header` of one of this program's workers."""
        metadata, specs = pickle.loads(header)
        return cls(
            metadata, {name: torch.empty(shape, dtype=dtype, device=device) for name, dtype, shape in specs}
        )


def split_fields(fields: dict[str, Any]) -> ArtifactParts:
    """Tensors apart, the rest pickled. Objects inside ``fields`` keep their own tensors (schedulers)."""
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in fields.items() if name not in tensors}
    return ArtifactParts(pickling.dumps(rest), tensors)


def join_fields(parts: ArtifactParts, device: torch.device) -> dict[str, Any]:
    """Inverse of :func:`split_fields`; generators and nested tensors come back on ``device``."""
    return {**pickling.loads(parts.metadata, device), **parts.tensors}
