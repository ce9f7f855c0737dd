"""The kit on workflows: those that ship pass every check, and each check sees what it is for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from gfdit.adapters.testing.__main__ import main
from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.adapters.testing.workflow_checks import WORKFLOW_CHECKS, WorkflowRequest, check_workflows

EXAMPLE = Path(__file__).parents[3] / "examples/workflows/controlnets.py"
Source = Callable[..., str]
Ranks = Callable[[int], ComponentRanks]


@pytest.fixture(scope="module")
def example(source: Source, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kit")
    shutil.copy(EXAMPLE, folder)
    weights: dict[str, object] = {family: source(family) for family in ("flux", "sd3")}
    weights |= {f"{name}-nets": [source(f"{name}-controlnet", seed=s) for s in (0, 1)] for name in ("flux", "sd3")}
    (folder / "controlnets.json").write_text(json.dumps(weights))
    return str(folder / EXAMPLE.name)


@pytest.mark.thorough
@pytest.mark.parametrize("names", [{"sd3-1"}, {"sd3-1", "flux-2"}], ids=str)
def test_the_workflows_that_ship_pass(ranks: Ranks, example: str, names: set[str]) -> None:
    values = {"prompt": "a red panda", "height": 128, "width": 128, "max_sequence_length": 32}
    images = {f"image_{number}": Image.linear_gradient("L").convert("RGB") for number in range(2)}
    requests = [
        WorkflowRequest(example, "flux-2", {**values, **images, "seed": 1}, steps=3),
        WorkflowRequest(example, "sd3-1", {**values, "image_0": images["image_1"], "seed": 2}, steps=3),
    ]
    report = check_workflows(ranks(2), 2, [request for request in requests if request.name in names])
    assert report.passed, str(report)
    assert [result.name for result in report.results] == list(WORKFLOW_CHECKS)
    assert "cfg2xsp1" in str(report) and "sp2" in str(report), "both kinds of degrees"


MODELS = """
import torch

from gfdit.core.layouts import ParallelSpec
from gfdit.core.tasks import TaskKind
from gfdit.workflow import Image, Latents, Model, Workflow

LOADED = []


class Noise(Model):
    kind = TaskKind.PREPARE

    def setup_io(self):
        self.add_input("seed", int)
        self.add_output("latents", Latents)

    def load(self, device, dtype):
        return {{}}

    def num_bytes(self, components):
        return 0

    def execute(self, components, call, seed):
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(4, 8, generator=generator)
        {noise}
        return {{"latents": {{"latents": latents}}}}


class Base(Noise):
    kind = TaskKind.DENOISE

    def setup_io(self):
        self.add_input("latents", Latents)
        self.add_output("latents", Latents)

    def load(self, device, dtype):
        weights = torch.ones(8)
        {load}
        return {{"weights": weights}}

    def candidates(self, num_ranks, guided=False):
        return (ParallelSpec(1), ParallelSpec(2))

    def execute(self, components, call, latents):
        tensor = latents["latents"] * 0.9 + components["weights"]
        {step}
        return {{"latents": {{"latents": tensor}}}}


class Decode(Noise):
    kind = TaskKind.DECODE

    def setup_io(self):
        self.add_input("latents", Latents)
        self.add_output("image", Image)

    def execute(self, components, call, latents):
        return {{"image": latents["latents"].clone()}}


noise, base, decode = Noise("noise"), Base("base"), Decode("decode")
with Workflow("mine", 4) as mine:
    latents = noise(seed=mine.add_input("seed", int, 0))
    for step in range(4):
        latents = base(step, latents=latents)
    mine.add_output(decode(latents=latents))
"""
SABOTAGES = {
    "": {},
    "alone": {"noise": "latents = latents + torch.rand(1)"},
    "degrees": {"step": "tensor = tensor + 0.01 * (len(call.layout.ranks) - 1)"},
    "interleaved": {
        "step": "tensor = tensor + components.get('last', 0); components['last'] = 0 * tensor if "
        "call.step_index == 3 else tensor"
    },
    "audit": {"step": "latents['latents'].mul_(0.5)"},
    "reload": {"load": "LOADED.append(1); weights = weights * len(LOADED)"},
    "reload ": {"load": "LOADED.append(torch.zeros(2**18))"},
    "interleaved ": {
        "step": "tensor = tensor + components.get('last', 0) * (len(call.layout.ranks) - 1); components['last'] = "
        "0 * tensor if call.step_index == 3 else tensor"
    },
}


@pytest.mark.parametrize("seen_by", SABOTAGES)
def test_what_each_check_sees(ranks: Ranks, tmp_path: Path, seen_by: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MODELS.format(**{"noise": "pass", "load": "pass", "step": "pass", **SABOTAGES[seen_by]}))
    requests = [WorkflowRequest(str(file), "mine", {"seed": seed}) for seed in (1, 2)]
    names = [seen_by.strip()] if seen_by else list(WORKFLOW_CHECKS)
    report = check_workflows(ranks(2), 2, requests, checks=names)
    assert report.passed is (not seen_by), str(report)


@pytest.mark.thorough
def test_the_command(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [example, "--ranks", "1", "--steps", "2", "--workflow", "flux-0", "--checks", "audit"]
    assert main([*argv, "--input", "max_sequence_length=32"]) == 0, capsys.readouterr()
    assert "audit        ok" in capsys.readouterr().out
    assert main([*argv, "--input", "max_sequence_length"]) == 2
    assert "--input must be NAME=VALUE, got 'max_sequence_length'" in capsys.readouterr().err
