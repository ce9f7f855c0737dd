"""What gfdit says of pipelines beforehand is what their self-test says, and is said of nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gfdit.adapters.forward import proven
from gfdit.adapters.forward.families import FAMILIES
from gfdit.adapters.testing import ForkServer
from tools.prove_families import prove

STOCK: dict[str, Any] = {
    "diffusion_load_format": "default",
    "custom_pipeline_args": None,
    "cache_backend": "none",
    "model_class_name": "FluxPipeline",
}


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["flux", "z-image", "wan-dmd", "helios"])
def test_it_is_found_again(family: str, fork_server: ForkServer, tmp_path: Path) -> None:
    pipeline, verdicts = prove(family, fork_server, tmp_path)
    assert verdicts == proven.load().pipelines[pipeline]


def test_a_verdict_is_of_stock_pipelines_and_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(**changes: Any) -> bool:
        return proven.proven_verdicts(SimpleNamespace(**{**STOCK, **changes})) is not None

    assert known() and proven.load().pipelines.keys() <= FAMILIES.keys()
    assert not known(diffusion_load_format="diffusers") and not known(custom_pipeline_args={"pipeline_class": "x"})
    assert not known(cache_backend="tea_cache") and not known(model_class_name="SanaVideoPipeline")
    monkeypatch.setattr(proven, "version", lambda: "0.31.0")
    assert not known()
