"""The cache of latents: what it finds, what it does not, and what it drops; and the models that use it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gfdit.workflow.caching import CacheMiss, LatentCache, LookUp, PutIn
from gfdit.workflow.model import Latents, Model
from tests.workflow.models import Noise

KEY = (64, 64, 0.8)


def vector(degrees: float) -> np.ndarray:
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], dtype=np.float32) * 7


def test_the_most_similar_one_is_found() -> None:
    cache = LatentCache(similarity=0.9)
    for degrees in (0, 10, 90):
        cache.put(KEY, vector(degrees), f"at {degrees}", 1)
    assert cache.find(KEY, vector(8)) == "at 10"
    assert cache.find(KEY, vector(2)) == "at 0"
    assert cache.find(KEY, vector(50)) is None  # cos 40 degrees is 0.77


def test_size_and_noise_level_must_agree() -> None:
    cache = LatentCache()
    cache.put(KEY, vector(0), "it", 1)
    assert cache.find(KEY, vector(0)) == "it"
    for other in ((64, 32, 0.8), (32, 64, 0.8), (64, 64, 0.81)):
        assert cache.find(other, vector(0)) is None


def test_what_was_used_longest_ago_goes() -> None:
    cache = LatentCache(max_bytes=30)
    for degrees in (0, 60, 120):
        cache.put(KEY, vector(degrees), degrees, 10)
    assert cache.find(KEY, vector(0)) == 0
    cache.put(KEY, vector(180), 180, 10)
    found = [cache.find(KEY, vector(degrees)) for degrees in (0, 60, 120, 180)]
    assert found == [0, None, 120, 180]
    assert (len(cache), cache.num_bytes) == (3, 30)
    cache.put(KEY, vector(0), "large", 31)
    assert len(cache) == 3


def test_an_embedding_of_nothing_is_similar_to_nothing() -> None:
    cache = LatentCache()
    cache.put(KEY, np.zeros(2, np.float32), "none", 1)
    assert cache.find(KEY, np.zeros(2, np.float32)) is None
    assert cache.find(KEY, np.ones(3, np.float32)) is None  # of another model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bytes": 0}, "at least one byte, got 0"),
        ({"similarity": 0.0}, "above 0 and at most 1, got 0"),
        ({"similarity": 1.5}, "above 0 and at most 1, got 1.5"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentCache(**settings)


class Scheduler:
    """``begin`` is the step that comes first."""

    def __init__(self, sigmas: list[float]) -> None:
        self.sigmas, self.begin = sigmas, 0

    def set_begin_index(self, begin: int) -> None:
        self.begin = begin


class Draw(Noise):
    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_input("sigmas", list)
        self.add_output("latents", Latents)

    def execute(self, components: Any, call: Any, seed: int, sigmas: list[float]) -> dict[str, Any]:  # type: ignore[override]
        made = {"latents": np.full(4, seed, np.float32), "scheduler": Scheduler(sigmas), "step_index": 0}
        return {"latents": {**made, "height": 64, "width": 64}}


def latents_at(step: int, sigmas: list[float]) -> dict[str, Any]:
    made = Draw().execute(None, None, 1, sigmas)["latents"]
    return {**made, "latents": made["latents"] + step, "step_index": step}


def embeds(degrees: float, pooled: bool) -> dict[str, Any]:
    if pooled:
        return {"pooled": vector(degrees)[None], "prompt_embeds": np.zeros((1, 3, 2), np.float32)}
    return {"prompt_embeds": np.stack([vector(degrees)] * 3)[None]}


@pytest.mark.parametrize("pooled", [True, False])
def test_what_was_put_in_is_gone_on_with(pooled: bool) -> None:
    sigmas = [1.0, 0.9, 0.8, 0.0]
    noise: Model = Draw("sd")
    where = (noise, "w", 2, 1000, 0.95, 0)
    look_up, put_in = LookUp(*where), PutIn(*where)
    assert look_up.component == put_in.component == "cache:w:Draw:sd:None"
    components, call = look_up.load(None, None), SimpleNamespace(step_index=0)

    def find(degrees: float, sigmas: list[float]) -> dict[str, Any]:
        given = embeds(degrees, pooled)
        return look_up.execute(components, call, given, seed=5, sigmas=sigmas)["latents"]

    with pytest.raises(CacheMiss):
        find(0, sigmas)
    kept = latents_at(2, sigmas)
    assert put_in.execute(components, call, kept, embeds(0, pooled)) == {"kept": {}}
    found = find(3, sigmas)
    assert found["latents"] is kept["latents"]
    assert (found["step_index"], found["scheduler"].begin, found["height"]) == (2, 2, 64)
    # Another schedule has another sigma before step 2, or the same one at another step.
    with pytest.raises(CacheMiss):
        find(3, [1.0, 0.95, 0.9, 0.0])
    with pytest.raises(CacheMiss):
        find(90, sigmas)
