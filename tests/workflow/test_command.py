"""`gfdit workflows`: what it says of a file, what it draws, and what it says of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gfdit.cli.main import USAGE_ERROR, main

FILE = """
from gfdit.workflow import Workflow
from gfdit.workflow.passes import ApproximateCache
from tests.workflow.models import Base, Decode, Noise, Text, two_nets

text, noise, base, decode = Text({source!r}), Noise(), Base({source!r}, pinned=True), Decode()
with Workflow("plain", 12, (ApproximateCache(5),)) as plain:
    prompt = plain.add_input("prompt", str)
    embeds, latents = text(prompt=prompt), noise(seed=plain.add_input("seed", int, 3))
    for step in range(12):
        latents = base(step, latents=latents, embeds=embeds)
    plain.add_output(decode(latents=latents))
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(bytes(2**20))
    (weights / "readme.md").write_bytes(bytes(2**20))
    file = tmp_path / "flows.py"
    file.write_text(FILE.format(source=str(weights)))
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["workflows", *argv]) == 0
    return capsys.readouterr().out


def test_nodes_components_and_who_shares_them(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, path).splitlines()
    assert lines[0].startswith("nets-2: 2 steps, 9 tasks (")
    assert lines[1] == "  takes prompt: str, seed: int = 0, guidance: float = 1.0"
    (base,) = [line.split() for line in lines if line.startswith("  base ") and "guidance" in line]
    assert base[1:4] == ["2", "denoise", "Base:sd:None"]
    assert "net-0.residuals (deferred)," in " ".join(base)
    (plain,) = [line for line in lines if line.startswith("plain: ")]
    assert plain.startswith("plain: 12 steps, 16 tasks (") and plain.endswith("flows.py:7)")
    shared = {line.split()[0]: line for line in lines if line.endswith("nets-2")}
    assert "Base:sd:None" in shared
    assert any(line.endswith("all, pinned  plain") for line in lines)


def test_bytes_are_those_of_weights_on_disk(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    (plain,) = map(json.loads, run(capsys, path, "--json", "--workflow", "plain").splitlines())
    num_bytes = {one["name"].partition(":")[0]: one["bytes"] for one in plain["components"]}
    assert num_bytes == {"Text": 2**20, "Noise": None, "Base": 2**20, "Decode": None, "cache": 2**30}
    assert plain["inputs"] == {
        "prompt": {"type": "str", "required": True},
        "seed": {"type": "int", "required": False},
    }


def test_with_other_steps_and_with_what_a_cache_has(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nets-2: 9 steps, 30 tasks" in run(capsys, path, "--steps", "9", "--workflow", "nets-2")
    cached = run(capsys, path, "--cached", "--workflow", "plain")
    assert cached.startswith("plain: 12 steps, 10 tasks, with what the cache has")
    assert "\n  noise " not in cached


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_graphs_are_drawn(path: str, ending: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / f"graphs.{ending}"
    run(capsys, path, "--plot", str(picture))
    begin = picture.read_bytes()[:200]
    assert begin.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in begin
    empty = tmp_path / f"one.{ending}"
    run(capsys, path, "--plot", str(empty), "--workflow", "nets-2")
    assert picture.stat().st_size > empty.stat().st_size  # a panel for either


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workflow", "nets"], "there is no workflow 'nets', workflows: nets-2, plain"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "9"], "workflow plain has 12 steps, not 9"),
        (["--cached"], "workflow nets-2 has no cache"),
        (["--plot", "graphs.pdf"], "graphs.pdf: a picture ends in .png or .svg"),
    ],
)
def test_mistakes(path: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workflows", path, *argv]) == USAGE_ERROR
    assert capsys.readouterr().err == f"gfdit workflows: error: {message}\n"


def test_a_mistake_in_a_file_is_one_line_with_its_place(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(path)
    file.write_text(file.read_text().replace("latents=latents, embeds=embeds", "latents=latents"))
    assert main(["workflows", path]) == USAGE_ERROR
    assert capsys.readouterr().err == (
        f"gfdit workflows: error: {path}:11: base lacks its input embeds (Embeddings)\n"
    )
