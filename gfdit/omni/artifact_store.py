"""The artifacts one rank holds, by id; used by both lanes of a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from gfdit.adapters.base import Artifact


class ArtifactStore:
    """A dictionary with a lock. An artifact, once put, is never changed in place by a reader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._artifacts: dict[str, Artifact] = {}

    def put(self, name: str, artifact: Artifact) -> None:
        with self._lock:
            self._artifacts[name] = artifact

    def get(self, name: str) -> Artifact:
        """Raises ``KeyError`` naming the artifact if this rank does not hold it."""
        with self._lock:
            if name not in self._artifacts:
                raise KeyError(f"artifact {name} is not on this rank")
            return self._artifacts[name]

    def drop(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._artifacts.pop(name, None)

    def sizes(self) -> dict[str, int]:
        """Bytes of tensor fields by artifact id."""
        with self._lock:
            return {
                name: sum(value.nbytes for value in artifact.values() if isinstance(value, torch.Tensor))
                for name, artifact in self._artifacts.items()
            }
