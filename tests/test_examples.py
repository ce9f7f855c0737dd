"""Every example runs as its first lines say. The last one needs a server: tests/elastic/test_http.py has it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("0*.py"))
PRINTED = {
    "01": r"^triage +80 +80 +0 ",
    "02": r"^OldestWidest keeps the rules\n(.*\n)+policy oldest-widest, 4 ranks",
    "03": r"^1\.5 times as many, triage: \d+ ranks",
    "04": r"^group and all-gather together: median \d+ us",
    "05": r"^lego, ranks: 2: 4\.77 s with loading, 1\.00 s after it",
}
LONG = "03"


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=pytest.mark.thorough if path.name.startswith(LONG) else ())
        for path in EXAMPLES
        if path.name[:2] in PRINTED
    ],
    ids=lambda path: path.stem,
)
def test_it_runs_alone(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[example.name[:2]], done.stdout, re.MULTILINE), done.stdout
    assert not list(tmp_path.iterdir())  # and leaves nothing


def test_they_are_numbered_and_say_how_they_are_run() -> None:
    assert [path.name[:2] for path in EXAMPLES] == [f"{number:02}" for number in range(1, 7)]
    for path in EXAMPLES:
        assert f"python examples/{path.name}" in path.read_text().split('"""')[1]
