"""docs/workflows.md: its examples work, and what it shows is what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gfdit.cli.main import USAGE_ERROR, main
from gfdit.core import TaskKind
from gfdit.workflow import passes

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "workflows.md").read_text()
EXAMPLE, MODEL = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["workflows", "flux.py", *argv]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "flux.py"
    path.write_text(EXAMPLE)
    return path


def test_the_example_is_listed_as_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = PAGE.partition("$ gfdit workflows flux.py\n")[2].partition("```")[0].splitlines()
    assert listed(capsys)[: len(shown)] == shown
    assert listed(capsys, "--steps", "4")[0].startswith("flux-canny-style: 4 steps, 13 tasks")


def changed(number: int, old: str, new: str) -> str:
    lines = EXAMPLE.splitlines()
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (31, ", embeds=embeds", ""),
        (30, "scale=", "strength="),
        (31, "latents=latents", "latents=embeds"),
        (31, "[residuals]", "[]"),
        (28, "seed=seed", "seed=3"),
        (32, "w.add_output", "print"),
        (13, '"weights/flux-dev"', 'open("none").read()'),
    ],
)
def test_mistakes_are_told_as_shown(
    number: int, old: str, new: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(changed(number, old, new))
    assert main(["workflows", "flux.py"]) == USAGE_ERROR
    told = capsys.readouterr().err.strip().removeprefix("gfdit workflows: error: ")
    shown = re.findall(r"^\| [^|]+ \| `([^|]*)` \|$", PAGE, re.MULTILINE)
    assert any(_like(one, told) for one in shown), told


def _like(shown: str, told: str) -> bool:
    pattern = re.sub(r":\d+: ", r":\\d+: ", re.escape(shown).replace(re.escape("..."), ".*"))
    return re.fullmatch(pattern, told) is not None


def test_the_model_can_be_called() -> None:
    space: dict[str, type] = {}
    exec(MODEL, space)
    preview = space["Preview"]("weights.pt")
    assert preview.kind is TaskKind.DECODE
    assert [port.optional for port in preview.inputs.values()] == [False, True]
    assert preview.component == "Preview:weights.pt:None"


def test_every_pass_is_there() -> None:
    for name in passes.__all__:
        assert f"| `{name}(" in PAGE
