"""Workflows over components as an author records them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.core.layouts import ParallelSpec
from tests.adapters.components.generation import Asked, generate
from tests.adapters.components.test_images import asked

Source = Callable[..., str]
Ranks = Callable[[int], ComponentRanks]


def test_the_nodes_make_the_image(ranks: Ranks, source: Source) -> None:
    """Two nets, one of them in a window of steps, and a LoRA from step 2 on."""
    what = asked(source, "sd3 nets lora@2")
    what = replace(what, nets=(what.nets[0], replace(what.nets[1], start=0.5)))
    made, num_components = ranks(1).call(run, what)
    assert made.difference(ranks(1).call(generate, what)) == 0
    assert num_components == 6, "text, noise, transformer, VAE and two nets"


def run(rank: object, what: Asked) -> object:
    from tests.adapters.components.recorded import run_recorded

    return run_recorded(rank, what)  # type: ignore[arg-type]


@pytest.mark.parametrize("module", ["flux", "sd3", "qwen_image"])
def test_models_are_read_without_torch_and_vllm(module: str) -> None:
    """Whoever draws or simulates a workflow needs neither."""
    heavy = ["torch", "vllm", "vllm_omni", "diffusers", "transformers"]
    code = f"import sys\nsys.modules.update(dict.fromkeys({heavy}))\nimport gfdit.adapters.components.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_degrees_divide_the_heads(source: Source) -> None:
    """Four heads."""
    from gfdit.adapters.components.sd3 import SD3Transformer

    model = SD3Transformer(source("sd3"))
    plain, both = [ParallelSpec(sp) for sp in (1, 2, 4)], [ParallelSpec(sp, 2) for sp in (1, 2)]
    assert sorted(model.candidates(5)) == sorted(plain)
    assert sorted(model.candidates(5, guided=True)) == sorted(plain + both)


def test_a_source_without_a_transformer_is_named() -> None:
    from gfdit.adapters.components.flux import FluxTransformer

    with pytest.raises(ValueError, match="nowhere is no checkpoint with a folder 'transformer'"):
        FluxTransformer("nowhere").candidates(2)
