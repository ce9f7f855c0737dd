"""Codecs: which fields an artifact has, which are split, and how they travel (GF-DiT paper, section 5.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gfdit.core.artifacts.views import ArtifactView, FieldView
from gfdit.migration import pickling
from gfdit.migration.parts import ArtifactParts
from gfdit.migration.tensor_fields import tensor_fields

Artifact = dict[str, Any]


class ArtifactCodec(Protocol):
    """Of one kind of artifact. ``pack`` gives a tensor for every field of ``view``, under its name."""

    def view(self, artifact: Artifact) -> ArtifactView: ...

    def pack(self, artifact: Artifact) -> ArtifactParts: ...

    def unpack(self, parts: ArtifactParts, device: torch.device) -> Artifact:
        """Generators and small nested tensors come to ``device``; the tensors of ``parts`` stay as they are."""
        ...


@dataclass(frozen=True, slots=True)
class Sharding:
    """A field of which each rank holds a part, as :class:`~gfdit.core.artifacts.views.FieldView` says.

    ``shape_field`` names the field that holds its global shape, a tuple.
    """

    shape_field: str
    sp_dim: int | None = None
    cfg_dim: int | None = None


class FieldCodec:
    """Tensors are fields: replicated, or split as ``sharded`` says by name; everything else is metadata.

    Tensors inside objects (solver history) are replicated fields, but for small ones.
    """

    def __init__(self, sharded: Mapping[str, Sharding] | None = None) -> None:
        self._sharded = dict(sharded or {})

    def view(self, artifact: Artifact) -> ArtifactView:
        return ArtifactView(
            tuple([self._field(artifact, name, tensor) for name, tensor in tensor_fields(artifact).items()])
        )

    def pack(self, artifact: Artifact) -> ArtifactParts:
        tensors = tensor_fields(artifact)
        return ArtifactParts(pickling.dumps(artifact, tensors), tensors)

    def unpack(self, parts: ArtifactParts, device: torch.device) -> Artifact:
        return pickling.loads(parts.metadata, device, parts.tensors)

    def _field(self, artifact: Artifact, name: str, tensor: torch.Tensor) -> FieldView:
        dtype = str(tensor.dtype).removeprefix("torch.")
        on_host = tensor.device.type == "cpu"
        if (sharding := self._sharded.get(name)) is None:
            return FieldView(name, dtype, tensor.itemsize, tuple(tensor.shape), on_host=on_host)
        shape = tuple(artifact[sharding.shape_field])
        return FieldView(name, dtype, tensor.itemsize, shape, sharding.sp_dim, sharding.cfg_dim, on_host)
