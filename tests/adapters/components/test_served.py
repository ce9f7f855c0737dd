"""Workflows over HTTP: six in one server of two ranks make the images of diffusers with the same weights."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from gfdit.adapters.testing.processes import Child
from gfdit.cli.main import USAGE_ERROR, main
from gfdit.observe.timeline import read_timeline
from tests.support import local_http
from tests.support.server import ServerProcess, free_port, start_server
from tests.support.waiting import HANG_S, wait_until

EXAMPLE = Path(__file__).parents[3] / "examples/workflows/controlnets.py"
SIDE, STEPS, SEED, TEXT_TOKENS = 128, 4, 5, 32
NUM_NETS = {"flux": 2, "sd3": 2, "qwen-image": 1}
GUIDANCE = {"flux": 1.0, "sd3": 4.0, "qwen-image": 4.0}
MORE = """
from gfdit.workflow import Patch
from gfdit.workflow.passes import ApproximateCache


@workflow(steps=28)
def cached(steps):
    made = record("sd3", 0, steps)
    made.name, made.passes = "sd3-cached", (ApproximateCache(skip=2, similarity=0.9999),)
    return made


@workflow(steps=28)
def misfit(steps):
    made = record("flux", 0, steps)
    made.name = "flux-misfit"
    base = next(node.model for node in made.nodes if node.model.kind == "denoise")
    base.add_patch(Patch(WEIGHTS["misfit"], step=1))
    return made
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workflows")


@pytest.fixture(scope="module")
def server(source: Callable[..., str], folder: Path) -> Iterator[ServerProcess]:
    text = EXAMPLE.read_text()
    assert "name + part)(base)" in text
    on_rank_1 = "name + part)(base, **({'ranks': (1,)} if (family, part) == ('flux', 'TextEncoder') else {}))"
    (folder / EXAMPLE.name).write_text(text.replace("name + part)(base)", on_rank_1) + MORE)
    weights: dict[str, Any] = {family: source(family) for family in NUM_NETS}
    weights |= {
        f"{name}-nets": [source(f"{name}-controlnet", seed=seed) for seed in range(most)]
        for name, most in NUM_NETS.items()
    }
    weights["misfit"] = source("flux-lora", num_layers=5)  # the base has three
    (folder / "controlnets.json").write_text(json.dumps(weights))
    argv = ["gfdit", "serve", "--workflow", str(folder / EXAMPLE.name), "--ranks", "2", "--policy", "triage"]
    argv += ["--timeline", str(folder / "timeline.json")]
    port = free_port()
    argv += ["--port", str(port), "--", "--dtype", "float32", "--enforce-eager"]
    with start_server(argv, port, folder / "server.log") as running:
        running.wait_healthy(HANG_S)
        yield running


def _base64(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def post(server: ServerProcess, workflow: str | None, inputs: Any = None, **body: Any) -> httpx.Response:
    gfdit = {} if workflow is None else {"workflow": workflow}
    asked = {
        "prompt": "a red panda",
        "size": f"{SIDE}x{SIDE}",
        "num_inference_steps": STEPS,
        "seed": SEED,
        "response_format": "b64_json",
        "extra_params": {"gfdit": {**gfdit, "inputs": inputs or {}}},
        **body,
    }
    return local_http.post(f"{server.base_url}/v1/images/generations", json=asked)


def generate(server: ServerProcess, family: str, num_nets: int) -> np.ndarray:
    from tests.adapters.components.generation import picture

    inputs: dict[str, Any] = {f"image_{number}": _base64(picture(number)) for number in range(num_nets)}
    inputs |= {"max_sequence_length": TEXT_TOKENS, "negative_prompt": "blurry"}
    inputs |= {"guidance_scale": 4.0} if family == "sd3" else {"true_cfg_scale": GUIDANCE[family]}
    if family == "flux":
        del inputs["negative_prompt"]
    answer = post(server, f"{family}-{num_nets}", inputs)
    assert answer.status_code == 200, answer.text
    data = base64.b64decode(answer.json()["data"][0]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(data)), dtype=np.int16)


def make_reference(family: str, sources: dict[str, Any], num_nets: int) -> np.ndarray:
    """In the process that has diffusers."""
    from diffusers.image_processor import VaeImageProcessor

    from tests.adapters.components.generation import Asked, Net, reference

    nets = tuple(Net(path, scale=0.7, image_seed=number) for number, path in enumerate(sources["nets"][:num_nets]))
    asked = Asked(
        family, sources["base"], nets, None, GUIDANCE[family], steps=STEPS, height=SIDE, width=SIDE, seed=SEED
    )
    (image,) = VaeImageProcessor().postprocess(reference(asked).image, output_type="pil")
    return np.asarray(image, dtype=np.int16)


@pytest.fixture(scope="module")
def expected(source: Callable[..., str], diffusers: Child) -> Callable[[str, int], np.ndarray]:
    made: dict[tuple[str, int], np.ndarray] = {}

    def get(family: str, num_nets: int) -> np.ndarray:
        if (family, num_nets) not in made:
            nets = [source(f"{family}-controlnet", seed=seed) for seed in range(NUM_NETS[family])]
            sources = {"base": source(family), "nets": nets}
            made[family, num_nets] = diffusers.call("run", make_reference, family, sources, num_nets)
        return made[family, num_nets]

    return get


ALL = [(family, num_nets) for family, most in NUM_NETS.items() for num_nets in range(most + 1)]


@pytest.mark.parametrize(("family", "num_nets"), ALL)
def test_an_image_is_that_of_diffusers(
    server: ServerProcess, expected: Callable[[str, int], np.ndarray], family: str, num_nets: int
) -> None:
    made = generate(server, family, num_nets)
    assert is_same(family, made, expected(family, num_nets))
    assert made.std() > 10, "there is nothing in the image"


def is_same(family: str, one: np.ndarray, other: np.ndarray) -> bool:
    """A pixel of SD3 may be rounded the other way: the branches of its guidance are one batch, or on two ranks."""
    return int(np.abs(one - other).max()) <= (1 if family == "sd3" else 0)


def test_all_at_once_are_themselves_alone_also_when_a_worker_is_killed(server: ServerProcess) -> None:
    alone = {key: generate(server, *key) for key in ALL}
    for one, other in combinations(ALL, 2):
        assert np.abs(alone[one] - alone[other]).max() > 10, f"images of {one} and {other} cannot be told apart"
    with ThreadPoolExecutor(len(ALL)) as threads:
        asked = {key: threads.submit(partial(generate, server, *key)) for key in ALL}
        workers = [p for p in psutil.Process(server.process.pid).children(recursive=True) if _is_worker(p)]
        os.kill(workers[0].pid, signal.SIGKILL)
        for key, future in asked.items():
            assert is_same(key[0], future.result(), alone[key]), key
    wait_until(
        lambda: local_http.get(f"{server.base_url}/health").status_code == 200, "the server is healthy again"
    )


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "DiffusionWorker" in " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("workflow", "inputs", "message"),
    [
        ("none", {}, "there is no workflow 'none', workflows: flux-0, flux-1, flux-2, sd3-0, sd3-1, sd3-2, qwen"),
        ("flux-1", {}, "workflow flux-1 needs the input 'image_0' (Image)"),
        ("flux-1", {"image_0": "xx"}, "input 'image_0' is no image"),
        ("flux-1", {"image_0": 3}, "input 'image_0' must be an image as base64, got 3"),
        ("flux-0", {"style": 1}, "workflow flux-0 has no input 'style', inputs: prompt, negative_prompt, seed"),
        ("sd3-0", {"seed": "a"}, "input 'seed' must be int, got 'a'"),
        ("sd3-0", {"height": 100}, "height must be a multiple of 16 pixels, got 100"),
        ("sd3-0", {"height": 10**9}, "pixels a frame, at most"),
    ],
)
def test_a_mistake_is_one_clear_line(server: ServerProcess, workflow: str, inputs: Any, message: str) -> None:
    answer = post(server, workflow, inputs)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert local_http.get(f"{server.base_url}/health").status_code == 200


BROKEN = """
from gfdit.adapters.components import flux
from gfdit.workflow import Workflow

with Workflow("mine", 4) as mine:
    prompt = mine.add_input("prompt", str)
    latents = flux.FluxNoise({base!r})(seed=0, height=64, width=64)
    embeds = flux.FluxTextEncoder({base!r}{encoder})(prompt=prompt)
    for step in range(4):
        latents = flux.FluxTransformer({base!r})(step, latents=latents, {embeds})
    mine.add_output(flux.FluxDecoder({base!r})(latents=latents))
"""


@pytest.mark.parametrize(
    ("changes", "argv", "message"),
    [
        ({}, ["--set", "component_bytes=1000"], "GiB, and a rank has 0.00 GiB"),
        ({"encoder": ", ranks=(2,)"}, [], "may be on ranks (2,), and there are 2"),
        ({"embeds": ""}, [], "mine.py:10: fluxtransformer lacks its input embeds (Embeddings)"),
        ({"embeds": "embeds=embeds, strength=1"}, [], "mine.py:10: fluxtransformer has no input strength"),
        ({"encoder": "("}, [], "mine.py:8: '(' was never closed"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_anything_starts(
    source: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    argv: list[str],
    message: str,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(BROKEN.format(**{"base": source("flux"), "encoder": "", "embeds": "embeds=embeds", **changes}))
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("it starts"))
    assert main(["serve", "--workflow", str(file), "--ranks", "2", *argv]) == USAGE_ERROR
    error = capsys.readouterr().err
    assert error.startswith("gfdit serve: error: ") and message in error and error.count("\n") == 1, error


def test_a_lora_that_fits_in_part_fails_its_request_only(server: ServerProcess) -> None:
    before = generate(server, "flux", 0)
    answer = post(server, "flux-misfit", {"max_sequence_length": TEXT_TOKENS})
    assert answer.status_code == 500, answer.text
    assert "fits in part only" in answer.json()["error"]["message"], answer.text
    assert np.array_equal(generate(server, "flux", 0), before)


def test_an_encoder_runs_only_where_it_may_be(server: ServerProcess, folder: Path) -> None:
    generate(server, "flux", 0)
    generate(server, "sd3", 0)
    spans = read_timeline(folder / "timeline.json")
    assert {span.rank for span in spans if span.task.endswith("/fluxtextencoder")} == {1}
    assert {span.rank for span in spans if span.task.endswith("/sd3textencoder")}
    assert {span.rank for span in spans} == {0, 1}


def test_without_a_name_the_first_workflow_is_meant(server: ServerProcess) -> None:
    inputs = {"max_sequence_length": TEXT_TOKENS}
    named, unnamed = (post(server, name, inputs).json()["data"] for name in ("flux-0", None))
    assert named == unnamed


def test_a_similar_prompt_goes_on_from_latents_in_the_cache(server: ServerProcess) -> None:
    def made(workflow: str, prompt: str, seed: int) -> Any:
        answer = post(server, workflow, {"max_sequence_length": TEXT_TOKENS}, prompt=prompt, seed=seed)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    first = made("sd3-cached", "two cats on a roof", 5)
    assert first == made("sd3-0", "two cats on a roof", 5), "after a miss all steps run"
    assert made("sd3-cached", "two cats on a roof", 6) == first, "with the noise of the first"
    assert made("sd3-0", "two cats on a roof", 6) != first
    other = made("sd3-cached", "a red panda", 6)
    assert other == made("sd3-0", "a red panda", 6), "another prompt is a miss"
