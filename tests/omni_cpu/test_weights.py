"""Weights are on the disk before anything starts whose time is limited."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gfdit.omni import launcher, weights
from gfdit.omni.plugin import find_accelerator
from gfdit.omni.settings import Settings

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    models: list[str] = []
    monkeypatch.setattr(weights, "omni_snapshot_download", models.append)
    return models


def test_a_folder_is_there_already(fetched: list[str], tmp_path: Path) -> None:
    weights.fetch_weights(str(tmp_path))
    assert not fetched


def test_a_hub_model_is_fetched_before_the_start_is_timed(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        pass

    def start(*_: Any, **__: Any) -> None:
        fetched.append("heap and processes")
        raise StartedError

    monkeypatch.setattr(launcher, "create_heap", start)
    config = SimpleNamespace(model="some/model")
    with pytest.raises(StartedError):
        launcher.ElasticExecutor(config, Settings(), 2)
    assert fetched == ["some/model", "heap and processes"]
