"""Kits over tiny checkpoints. All of a session fork their processes from one that has imported vLLM-Omni."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gfdit.adapters.testing import AdapterKit, ForkServer
from gfdit.adapters.tiny_models import TinyModelSpec, build
from tests.support.waiting import HANG_S

Kits = Callable[..., AdapterKit]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The checkpoint of a family of ``gfdit.adapters.tiny_models``, made once."""
    folder = tmp_path_factory.mktemp("models")

    def make(family: str, **spec: Any) -> Path:
        path = folder / "-".join([family, *(f"{name}{value}" for name, value in sorted(spec.items()))])
        if not path.exists():
            fork_server.run(build, family, path, TinyModelSpec(**spec))
        return path

    return make


@pytest.fixture(scope="module")
def kits(fork_server: ForkServer, tiny_model: Callable[..., Path]) -> Iterator[Kits]:
    """``kits("qwen-image")``: a kit over a tiny checkpoint, or over a folder, that is open for the module.

    Who asks again for the same has the same one, as it was left.
    """
    known: dict[str, AdapterKit] = {}
    with ExitStack() as opened:

        def make(model: str | Path, **options: Any) -> AdapterKit:
            asked = repr((model, sorted(options.items())))
            if asked not in known:
                folder = tiny_model(model) if isinstance(model, str) else model
                kit = AdapterKit(folder, fork_server=fork_server, comm_timeout_s=HANG_S, **options)
                known[asked] = opened.enter_context(kit)
            return known[asked]

        yield make
