"""An artifact taken apart for transport: its tensor fields, and everything else as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class ArtifactParts:
    """What one rank holds of an artifact: ``tensors`` by field (any strides and device), ``metadata`` a pickle."""

    metadata: bytes = b""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
