"""The program that checks a GPU, on what there is without one: it must work when a GPU is lent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.report import headlines

SLICE = ["--heap", "shared_memory", "--interpret", "--quick", "--rounds", "1", "--sizes", "64"]


@pytest.fixture(autouse=True)
def command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu_check.py", *SLICE])


def test_a_slice_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["uneven", "graph", "timeout", "controls"]
    assert gpu_check.main([*SLICE, "--only", *only, "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    paths = sorted(tmp_path.iterdir())
    assert [path.suffix for path in paths] == [".json", ".md"]
    assert all(path.name.startswith("gpu_check_interpreted_") for path in paths)
    report, text = json.loads(paths[0].read_text()), paths[1].read_text()
    assert [check["name"].split()[0] for check in report["checks"]] == [
        "uneven",
        "graph",
        "timeout",
        "negative",
    ]
    # Nothing here may be taken for a figure of a GPU.
    assert not report["on_gpu"] and report["device"] == "no GPU"
    assert "**Not on a GPU.**" in text and "aim" not in text
    assert {row["what"] for row in report["timings"]} >= {"handshake", "group", "barrier", "all_to_all"}


def test_a_failed_check_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_wrong(where: object, quick: bool):
        yield "good", lambda: "fine"
        yield "bad", lambda: 1 // 0

    monkeypatch.setattr("benchmarks.gpu.checks.all_checks", one_wrong)
    monkeypatch.setattr("benchmarks.gpu.ranks.Where.run", lambda *args, **options: [])
    assert gpu_check.main([*SLICE, "--no-times", "--out", str(tmp_path)]) == 1
    (text,) = (path.read_text() for path in tmp_path.glob("*.md"))
    assert "1 of 2 checks passed" in text and "| bad | FAILED |" in text and "ZeroDivisionError" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--interpret"], "--interpret and --heap shared_memory go together"),
        (["--ranks", "2"], "--ranks must be at least 4"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(argv)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_without_a_gpu_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 2
    assert (
        capsys.readouterr().err == "gpu_check: error: a heap on 'cuda' needs a CUDA device, and torch sees none\n"
    )


def test_headlines_compare_with_handshake_and_copy() -> None:
    """Four ranks: three parts travel by two copies each, the own one by one, so 7 copies of a part in 4 ranks."""

    def row(what: str, num_bytes: int, us: float, **fields: object) -> dict[str, object]:
        return {"what": what, "ranks": 4, "bytes": num_bytes, "us": us, **fields}

    rows = [
        row("handshake", 0, 2.0),
        row("device copy", 4 << 20, 10.0),
        row("barrier", 0, 2.5, path="barrier"),
        row("all_gather", 1024, 4.0, path="push"),
        row("all_gather", 1024, 3.5, path="low_latency"),
        row("all_gather", 4 << 20, 340.0, path="push"),
        row("all_gather", 4 << 20, 400.0, path="pull"),
    ]
    text = "\n".join(headlines(rows))
    assert "barrier, 0 bytes per pair: 2.50 us by barrier, 1.25 x the handshake (aim 1.5: reached)" in text
    assert (
        "all_gather, 1024 bytes per pair: 3.50 us by low_latency, 1.75 x the handshake (aim 1.5: missed)" in text
    )
    assert "340.0 us by push, 82% of the device's copy rate (aim 80%: reached)" in text
