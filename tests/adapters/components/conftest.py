"""Ranks with components over tiny checkpoints, and diffusers in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gfdit.adapters.testing import ForkServer
from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.adapters.testing.processes import Child
from tests.support.waiting import HANG_S

#: Layers of the base models and of what goes with them: residuals are spread unevenly over the blocks.
LAYERS = {
    "flux": 3,
    "flux-controlnet": 2,
    "flux-controlnet-pixels": 2,
    "flux-controlnet-union": 1,
    "flux-lora": 3,
    "sd3": 5,
    "sd3-controlnet": 2,
    "sd3-lora": 5,
    "sd3.5-controlnet": 2,
    "qwen-image": 3,
    "qwen-image-controlnet": 2,
    "qwen-image-lora": 3,
}


@pytest.fixture(scope="session")
def source(tiny_model: Callable[..., Path]) -> Callable[..., str]:
    """``source("flux-controlnet")``: the folder of a tiny checkpoint; another ``seed`` is another one."""

    def get(family: str, seed: int = 0, **spec: Any) -> str:
        return str(tiny_model(family, seed=seed, **{"num_layers": LAYERS[family], **spec}))

    return get


@pytest.fixture(scope="module")
def ranks(fork_server: ForkServer, source: Callable[..., str]) -> Iterator[Callable[[int], ComponentRanks]]:
    """``ranks(4)``: as many processes without components, each number started once for the module."""
    with ExitStack() as opened:
        started: dict[int, ComponentRanks] = {}

        def get(num_ranks: int) -> ComponentRanks:
            if num_ranks not in started:
                made = ComponentRanks(fork_server, num_ranks, source("sd3"), comm_timeout_s=HANG_S)
                started[num_ranks] = opened.enter_context(made)
            return started[num_ranks]

        yield get


@pytest.fixture(scope="module")
def diffusers(fork_server: ForkServer) -> Iterator[Child]:
    """Answers ``call("run", reference, asked)``; it keeps the pipelines that it has loaded."""
    child = fork_server.start("diffusers", Diffusers)
    try:
        yield child
    finally:
        child.close()


class Diffusers:
    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)
