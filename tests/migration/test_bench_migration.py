"""`gfdit bench migration` measures, checks what every way brings, and writes its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gfdit.cli.main import main


@pytest.mark.thorough
def test_every_way_brings_the_same_and_the_report_is_whole(tmp_path: Path) -> None:
    assert main(["bench", "migration", "--rounds", "1", "--out", str(tmp_path)]) == 0
    (data,) = tmp_path.glob("migration_*.json")
    (text,) = tmp_path.glob("migration_*.md")
    report = json.loads(data.read_text())
    assert {entry["bytes"] for entry in report["migrations"]} == {512 * 1024, 30_000_128}
    assert all(entry["gfdit_ms"]["median"] > 0 and entry["ratio"]["median"] > 0 for entry in report["migrations"])
    assert text.read_text().count("\n| ") == 2 + len(report["migrations"])


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "migration", "--rounds", "0"]) == 2
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
