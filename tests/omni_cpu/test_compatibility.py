"""What gfdit builds on in vLLM-Omni is all looked for at start, and what is not there is named."""

from __future__ import annotations

import importlib

import pytest

from gfdit.omni.compatibility import check_symbols
from gfdit.omni.plugin import find_accelerator
from gfdit.omni.vllm_symbols import MEMBERS, SYMBOLS
from tests.support import vllm_uses

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")

_ENGINE = "vllm_omni.diffusion.diffusion_engine"
_Z_IMAGE = "vllm_omni.diffusion.models.z_image.pipeline_z_image"


def test_everything_that_the_code_uses_is_looked_for() -> None:
    assert vllm_uses.symbols() == SYMBOLS
    assert vllm_uses.members() == MEMBERS


def test_this_vllm_omni_has_it_all() -> None:
    check_symbols()


@pytest.mark.parametrize(
    "missing",
    [
        "vllm_omni.diffusion.distributed.parallel_state._CFG",
        "vllm_omni.diffusion.worker.input_batch.InputBatch.make_batch",
        f"{_Z_IMAGE}.retrieve_timesteps",
    ],
)
def test_a_name_that_is_not_there_is_said(missing: str) -> None:
    *modules, name = missing.split(".")
    where, of = ".".join(modules), ""
    if where not in SYMBOLS:
        where, _, of = where.rpartition(".")
    wrong = f"{of}.{name}_x".lstrip(".")
    assert f"{of}.{name}".lstrip(".") in SYMBOLS[where]
    with pytest.raises(ImportError, match=f"gfdit needs {where}.{wrong}, which this vLLM-Omni"):
        check_symbols({where: (wrong,)}, {})


def test_a_removed_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    state = importlib.import_module("vllm_omni.diffusion.distributed.parallel_state")
    monkeypatch.delattr(state, "_CFG")
    with pytest.raises(ImportError, match=r"parallel_state\._CFG"):
        check_symbols()


@pytest.mark.parametrize(
    ("place", "name", "parameters", "message"),
    [
        (
            f"{_ENGINE}:DiffusionEngine",
            "_renamed_loop",
            "self",
            r"builds on .*DiffusionEngine\._renamed_loop, which",
        ),
        (f"{_ENGINE}:DiffusionEngine", "_renamed", None, r"builds on .*DiffusionEngine\._renamed, which"),
        (f"{_ENGINE}:Renamed", "_busy_loop", "self", r"builds on .*Renamed\._busy_loop, which"),
        (
            f"{_ENGINE}:DiffusionEngine",
            "_busy_loop",
            "self, timeout",
            r"overrides .*DiffusionEngine\._busy_loop\(self, timeout\), which takes \(self\) in this",
        ),
        (f"{_Z_IMAGE}:ZImagePipeline", "__init__", "self", r"which takes \(self, od_config, prefix\) in this"),
    ],
)
def test_a_member_that_is_another_one_is_said(place: str, name: str, parameters: str | None, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        check_symbols({}, {place: {name: parameters}})
