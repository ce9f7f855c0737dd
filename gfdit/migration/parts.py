"""An artifact taken apart for transport: its tensor fields, and everything else as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gfdit.core.layouts import ExecutionLayout


@dataclass(slots=True)
class ArtifactParts:
    """What one rank holds of an artifact: ``tensors`` by field (any strides and device), ``metadata`` a pickle.

    ``layout`` is the one under which the rank got it, by making or receiving it. It says which part of a sharded
    field a tensor is, which its shape does not; without sharded fields it may be left out.
    """

    metadata: bytes = b""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    layout: ExecutionLayout | None = None
