"""The artifacts one rank holds, by id; used by both lanes of a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.layouts import ExecutionLayout
from gfdit.migration.codec import Artifact, ArtifactCodec
from gfdit.migration.parts import ArtifactParts


@dataclass(slots=True)
class _Entry:
    artifact: Artifact
    layout: ExecutionLayout | None
    view: ArtifactView | None  # once somebody has asked


class ArtifactStore:
    """A dictionary with a lock. An artifact, once put, is never changed in place by a reader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def put(
        self, name: str, artifact: Artifact, layout: ExecutionLayout | None, view: ArtifactView | None = None
    ) -> None:
        """This rank has got its part under ``layout``. ``view``, if it is known, spares asking its codec."""
        with self._lock:
            self._entries[name] = _Entry(artifact, layout, view)

    def get(self, name: str) -> Artifact:
        """Raises ``KeyError`` naming the artifact if this rank does not hold it."""
        return self._entry(name).artifact

    def pack(self, name: str, codec: ArtifactCodec) -> ArtifactParts:
        """Taken apart by ``codec``. Raises ``KeyError`` as :meth:`get` does."""
        entry = self._entry(name)
        parts = codec.pack(entry.artifact)
        parts.layout = entry.layout
        return parts

    def view(self, name: str, codec: ArtifactCodec) -> ArtifactView:
        """What it consists of, by ``codec``. Raises ``KeyError`` as :meth:`get` does."""
        entry = self._entry(name)
        if entry.view is None:
            entry.view = codec.view(entry.artifact)
        return entry.view

    def drop(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._entries.pop(name, None)

    def layouts(self) -> dict[str, ExecutionLayout | None]:
        """Under which it got its part of each."""
        with self._lock:
            return {name: entry.layout for name, entry in self._entries.items()}

    def sizes(self) -> dict[str, int]:
        """Bytes of tensor fields by artifact id."""
        with self._lock:
            return {
                name: sum(value.nbytes for value in entry.artifact.values() if isinstance(value, torch.Tensor))
                for name, entry in self._entries.items()
            }

    def _entry(self, name: str) -> _Entry:
        with self._lock:
            if name not in self._entries:
                raise KeyError(f"artifact {name} is not on this rank")
            return self._entries[name]
