"""Workflows over components as an author records them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.core.layouts import ParallelSpec
from gfdit.workflow import Workflow
from gfdit.workflow.compiling import CompiledWorkflow
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


@pytest.mark.parametrize(
    ("family", "scale", "negative", "guided"),
    [
        ("sd3", "guidance_scale", None, {None: True, 4.0: True, 1.0: False}),  # against an empty text
        ("flux", "true_cfg_scale", None, {None: False, 4.0: False}),
        ("flux", "true_cfg_scale", "blurry", {None: False, 1.0: False, 4.0: True}),
        ("qwen_image", "true_cfg_scale", None, {None: False, 4.0: False}),
        ("qwen_image", "true_cfg_scale", "", {None: True, 4.0: True, 1.0: False}),
    ],
)
def test_guidance_is_known_before_anything_runs(
    family: str, scale: str, negative: str | None, guided: dict[float | None, bool]
) -> None:
    compiled = _plain(family, "nowhere", scale)
    for value, expected in guided.items():
        given = {"prompt": "a", "negative_prompt": negative, scale: value}
        assert compiled.guided(compiled.given(given)) is expected, value


@pytest.mark.parametrize("family", ["sd3", "flux", "qwen_image"])
def test_bytes_on_disk_are_known_before_anything_is_loaded(family: str, source: Source) -> None:
    """All weights of a checkpoint, each once; nobody counts those of another folder."""
    path = Path(source("qwen-image" if family == "qwen_image" else family))
    stored = {
        model.component: model.stored_bytes() for model in _plain(family, str(path), "guidance_scale").models
    }
    assert None not in stored.values()
    assert sum(stored.values()) == sum(file.stat().st_size for file in path.rglob("*.safetensors"))  # type: ignore[arg-type]


def _plain(family: str, source: str, scale: str) -> CompiledWorkflow:
    module = import_module(f"gfdit.adapters.components.{family}")
    name = {"sd3": "SD3", "flux": "Flux", "qwen_image": "QwenImage"}[family]
    text, noise, transformer, decoder = (
        getattr(module, name + part)(source) for part in ("TextEncoder", "Noise", "Transformer", "Decoder")
    )
    with Workflow("plain", 1) as made:
        negative = made.add_input("negative_prompt", str, None)
        embeds = text(prompt=made.add_input("prompt", str), negative_prompt=negative)
        guidance = {scale: made.add_input(scale, float, None)}
        latents = transformer(0, latents=noise(seed=0, height=64, width=64), embeds=embeds, **guidance)
        made.add_output(decoder(latents=latents))
    return CompiledWorkflow(made)


def test_a_source_without_a_transformer_is_named() -> None:
    from gfdit.adapters.components.flux import FluxTransformer

    with pytest.raises(ValueError, match="nowhere is no checkpoint with a folder 'transformer'"):
        FluxTransformer("nowhere").candidates(2)
