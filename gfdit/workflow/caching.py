"""Latents of earlier prompts, to begin with those of a similar one (approximate caching, Agarwal et al., 2024).

A cache is a component without weights, pinned on one rank: what is put in there is found there. It compares the
embeddings that the workflow makes anyway. Latents fit where size and noise level (sigma) agree, so that a schedule
with another shift or number of steps never gets what it cannot go on with.

Latents are as those of ``gfdit.adapters.components``: ``latents``, ``height``, ``width``, ``step_index`` and a
``scheduler`` with ``sigmas``. Of tensors only ``nbytes`` and conversion to an array are used.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gfdit.core.tasks import TaskKind
from gfdit.workflow.model import Call, Condition, Embeddings, Latents, Model

Key = tuple[int, int, float]
"""Height, width, sigma."""
DEFAULT_BYTES = 2**30
DEFAULT_SIMILARITY = 0.9
CACHE_MISS = 424
"""By this status of a request's failure the engine knows that it has to begin with noise."""
_SIGMA_DIGITS = 6


class CacheMiss(ValueError):  # noqa: N818 - it is no error of anybody's
    """Nothing similar is there: the request has to begin with noise, by the graph of the workflow that does so."""


@dataclass(frozen=True, slots=True)
class _Entry:
    vector: np.ndarray  # of length 1
    tensor: Any
    num_bytes: int


@dataclass
class LatentCache:
    """At most ``max_bytes`` of latents, what was used longest ago goes first; ``similarity`` is a cosine."""

    max_bytes: int = DEFAULT_BYTES
    similarity: float = DEFAULT_SIMILARITY
    num_bytes: int = field(default=0, init=False)
    _entries: OrderedDict[int, tuple[Key, _Entry]] = field(default_factory=OrderedDict, init=False)
    _by_key: dict[Key, dict[int, _Entry]] = field(default_factory=dict, init=False)
    _last: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"a cache must have at least one byte, got {self.max_bytes}")
        if not 0 < self.similarity <= 1:
            raise ValueError(f"similarity must be above 0 and at most 1, got {self.similarity}")

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: Key, vector: np.ndarray, tensor: Any, num_bytes: int) -> None:
        """Something larger than the whole cache is not kept."""
        if num_bytes > self.max_bytes:
            return
        self._last += 1
        entry = _Entry(_unit(vector), tensor, num_bytes)
        self._entries[self._last] = key, entry
        self._by_key.setdefault(key, {})[self._last] = entry
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            number, (of, oldest) = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            del self._by_key[of][number]
            if not self._by_key[of]:
                del self._by_key[of]

    def find(self, key: Key, vector: np.ndarray) -> Any:
        """The tensor whose embedding is the most similar one, or None."""
        alike = self._by_key.get(key, {})
        found = [(n, entry) for n, entry in alike.items() if entry.vector.shape == vector.shape]
        if not found:
            return None
        similarities = np.stack([entry.vector for _, entry in found]) @ _unit(vector)
        best = int(similarities.argmax())
        if similarities[best] < self.similarity:
            return None
        number, entry = found[best]
        self._entries.move_to_end(number)
        return entry.tensor


class _Cached(Model):
    """What looks up and what puts in are of one component, so they have one cache."""

    kind = TaskKind.PREPARE
    title: ClassVar[str]

    def __init__(self, noise: Model, cache: str, skip: int, max_bytes: int, similarity: float, rank: int) -> None:
        self.noise, self.cache, self.skip = noise, cache, skip
        self.max_bytes, self.similarity = max_bytes, similarity
        super().__init__(noise.source, name=self.title, dtype=noise.dtype, pinned=True, ranks=(rank,))

    @property
    def component(self) -> str:
        return f"cache:{self.cache}:{self.noise.component}"

    def load(self, device: Any, dtype: Any) -> Any:
        return LatentCache(self.max_bytes, self.similarity), self.noise.load(device, dtype)

    def num_bytes(self, components: Any) -> int:
        """With all that the cache may hold."""
        return self.max_bytes + self.noise.num_bytes(components[1])

    def stored_bytes(self) -> int | None:
        return self.max_bytes


class LookUp(_Cached):
    """In the place of the model that makes noise: makes the latents before step ``skip``. Raises ``CacheMiss``."""

    title = "look-up"

    def setup_io(self) -> None:
        self.inputs.update(self.noise.inputs)
        self.add_input("embeds", Embeddings)
        self.add_output("latents", Latents)

    def execute(self, components: Any, call: Call, embeds: Any, **inputs: Any) -> Mapping[str, Any]:
        cache, noise = components
        latents = self.noise.execute(noise, call, **inputs)["latents"]
        tensor = cache.find(key_of(latents, self.skip), vector_of(embeds))
        if tensor is None:
            raise CacheMiss("no similar prompt is in the cache")
        scheduler = copy.copy(latents["scheduler"])
        scheduler.set_begin_index(self.skip)  # its sigmas stay those of all steps
        return {"latents": {**latents, "latents": tensor, "scheduler": scheduler, "step_index": self.skip}}


class PutIn(_Cached):
    """Keeps the latents before step ``skip``."""

    title = "put-in"

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_output("kept", Condition)

    def execute(self, components: Any, call: Call, latents: Any, embeds: Any) -> Mapping[str, Any]:
        tensor = latents["latents"]
        components[0].put(key_of(latents, latents["step_index"]), vector_of(embeds), tensor, int(tensor.nbytes))
        return {"kept": {}}


def key_of(latents: Mapping[str, Any], step: int) -> Key:
    """What other latents must agree in to take the place of ``latents`` before ``step``."""
    sigma = float(latents["scheduler"].sigmas[step])
    return int(latents["height"]), int(latents["width"]), round(sigma, _SIGMA_DIGITS)


def vector_of(embeds: Mapping[str, Any]) -> np.ndarray:
    """What stands for a prompt: the pooled embedding, or else the mean over tokens."""
    tensor = embeds["pooled"] if "pooled" in embeds else embeds["prompt_embeds"].mean(1)
    if hasattr(tensor, "cpu"):
        tensor = tensor.float().cpu()  # no array has bfloat16
    return np.asarray(tensor, dtype=np.float32).reshape(-1)


def _unit(vector: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(vector))
    return vector / length if length > 0 else vector
