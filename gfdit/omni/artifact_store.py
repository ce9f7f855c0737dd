"""The artifacts one rank holds, by id; used by both lanes of a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gfdit.core.artifact_views import ArtifactView
from gfdit.migration.codec import Artifact, ArtifactCodec


@dataclass(slots=True)
class _Entry:
    artifact: Artifact
    view: ArtifactView | None  # once somebody has asked


class ArtifactStore:
    """A dictionary with a lock. An artifact, once put, is never changed in place by a reader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def put(self, name: str, artifact: Artifact, view: ArtifactView | None = None) -> None:
        """``view``, if it is known, spares asking its codec."""
        with self._lock:
            self._entries[name] = _Entry(artifact, view)

    def get(self, name: str) -> Artifact:
        """Raises ``KeyError`` naming the artifact if this rank does not hold it."""
        return self._entry(name).artifact

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
