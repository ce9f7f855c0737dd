"""FP8 weights, quantised while loading and by the checkpoint: the elastic path makes stock's images of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gfdit.adapters.testing import AdapterKit, ForkServer, KitRequest
from tests.adapters.conftest import Kits

FORWARD = "gfdit.adapters.forward.adapter:ForwardAdapter"
REQUEST = KitRequest(128, 96, seed=1, steps=4, negative_prompt=" ", true_cfg_scale=4.0)
# In bfloat16, of images from 0 to 1.
TOLERANCE = 0.02
# Of the linear layers of Qwen-Image's blocks, those that vLLM-Omni lets be quantised.
_QUANTISED = ("attn.", "img_mlp.", "txt_mlp.")


def to_fp8(source: Path, target: Path) -> None:
    """A checkpoint with a scale for every tensor, as published ones have."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for path in (target / "transformer").glob("*.safetensors"):
        tensors = load_file(path)
        for name, weight in list(tensors.items()):
            if weight.ndim == 2 and name.endswith(".weight") and any(part in name for part in _QUANTISED):
                scale = weight.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
                tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale"] = scale
        save_file(tensors, path)
    for path in (target / "transformer").glob("*.index.json"):
        path.unlink()  # one file needs none
    config = target / "transformer" / "config.json"
    how = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": how}))


@pytest.fixture(scope="module", params=["online", "checkpoint"])
def kit(
    request: pytest.FixtureRequest,
    kits: Kits,
    fork_server: ForkServer,
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[AdapterKit]:
    """Driven by the stock ``forward``, with a verdict, so that guidance can be split."""
    model, options = tiny_model("qwen-image", dtype="bfloat16"), {"quantization_config": "fp8"}
    if request.param == "checkpoint":
        source, model = model, tmp_path_factory.mktemp("fp8") / "model"
        fork_server.run(to_fp8, source, model)
        options = {}
    kit = kits(model, num_ranks=2, dtype="bfloat16", od_config=options, adapter=FORWARD)
    (verdict,) = kit.self_test(REQUEST).values()
    assert verdict.mode is not None, verdict
    yield kit


@pytest.mark.thorough
def test_one_rank_makes_stocks_image_wherever_it_is(kit: AdapterKit) -> None:
    for dtypes in kit.on_ranks(dtypes_of_blocks):
        assert "float8_e4m3fn" in dtypes, "nothing is quantised: the test would prove nothing"
    (stock,) = kit.stock(REQUEST)
    for script in ("sp1@0", "sp1@0 sp1@1", "encode@1 sp1@1 sp1@0 decode@1"):
        assert kit.run(REQUEST, script).identical(stock), script
    for output in kit.run_interleaved([(REQUEST, "sp1@0"), (REQUEST, "sp1@1 sp1@0")]):
        assert output.identical(stock)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("degrees", "script"),
    [({"ulysses_degree": 2}, "sp2@0,1"), ({"cfg_parallel_size": 2}, "cfg2@1,0")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_ranks_make_stocks_image_at_that_degree(kit: AdapterKit, degrees: dict[str, int], script: str) -> None:
    """Scales of activations are of what a rank sees, as in stock: another degree, slightly another image."""
    (stock,) = kit.stock(REQUEST, **degrees)
    assert kit.run(REQUEST, script).difference(stock) <= TOLERANCE
    changing = kit.run(REQUEST, f"{script} sp1@0 {script}")
    assert changing.difference(stock) < 0.5


def dtypes_of_blocks(executor: Any) -> set[str]:
    return {
        str(weight.dtype).removeprefix("torch.") for weight in executor.runner.pipeline.transformer.parameters()
    }
