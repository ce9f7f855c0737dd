"""The program that checks a GPU, on what there is without one: it must work when a GPU is lent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu import runner
from benchmarks.gpu.job import ROOT, Spec, read_results
from benchmarks.gpu.plan import PARTS, Part, lacking, limit_s
from benchmarks.gpu.report import headlines

HERE = "tests.kernels.gpu_parts"


def fake(name: str, **fields: Any) -> Part:
    return Part(name, f"{HERE}:{name}", f"whether it {name}", weight=1, interpreted_weight=1, **fields)


def run(tmp_path: Path, *parts: Part, budget_s: float = 600.0) -> dict[str, dict[str, Any]]:
    """Results by part's name, from the JSON file that is written."""
    gpu_check.main(["--interpret", "--budget-s", str(budget_s), "--out", str(tmp_path)], parts)
    (path,) = tmp_path.glob("*.json")
    return {part["name"]: part for part in json.loads(path.read_text())["parts"]}


def checks(part: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: "passed" if check["passed"] else check["detail"] for check in part["checks"]}


def test_a_part_that_raises_says_what_and_where(tmp_path: Path) -> None:
    found = run(tmp_path, fake("works"), fake("raises"), fake("raises_outside"))
    assert found["works"]["state"] == "passed" and found["works"]["rows"] == [{"what": "a thing", "figure": 1.5}]
    told = checks(found["raises"])
    assert told.pop("divides").startswith(
        "ZeroDivisionError: integer division or modulo by zero (at tests/kernels/"
    )
    assert told == {"before": "passed", "after": "passed"}
    assert found["raises"]["reason"] == "failed: divides"
    outside = checks(found["raises_outside"])["the part itself"]
    assert outside.startswith("KeyError: 'no such thing' (at tests/kernels/gpu_parts.py:")
    assert "in raises_outside" in outside


def test_a_part_that_dies_leaves_the_others_and_goes_on_behind_what_killed_it(tmp_path: Path) -> None:
    found = run(tmp_path, fake("dies"), fake("cut_off"), fake("works"), fake("nothing"))
    assert checks(found["dies"]) == {
        "before": "passed",
        "crashes": "its process died of SIGKILL",
        "after": "passed",
    }
    assert "SIGKILL in crashes" in found["dies"]["reason"]
    assert checks(found["cut_off"]) == {"before": "passed"} and found["cut_off"]["state"] == "failed"
    assert found["works"]["state"] == "passed"
    assert (found["nothing"]["state"], found["nothing"]["reason"]) == ("failed", "it checked nothing")
    (text,) = (path.read_text() for path in tmp_path.glob("*.md"))
    assert "| crashes | FAILED |" in text and "| works | passed |" in text


@pytest.mark.thorough
def test_a_part_that_hangs_is_ended_at_its_limit_and_says_where(tmp_path: Path) -> None:
    parts = [fake("hangs_hard"), fake("hangs"), fake("works", least_s=1.0)]
    found = run(tmp_path, *parts, budget_s=40.0)
    hard = found["hangs_hard"]
    assert checks(hard) == {"before": "passed", "stuck": "its process killed at its limit"}
    assert "it was at tests/kernels/gpu_parts.py:" in checks(found["hangs"])["waits"]
    assert "in _wait" in checks(found["hangs"])["waits"]
    assert "s that were left to the part; " in checks(found["hangs"])["waits"]
    assert found["works"]["state"] == "passed"


def test_a_check_that_hangs_costs_its_own_limit_only(tmp_path: Path) -> None:
    told = checks(run(tmp_path, fake("hangs_in_one_check"))["hangs_in_one_check"])
    assert told["waits"].startswith("no result in the 0.5 s; it was at ") and told["after"] == "passed"


def test_nothing_of_a_part_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def child_of(part: dict[str, Any]) -> int:
        return int(part["notes"][0].split()[1])

    child = child_of(run(tmp_path / "groups", fake("leaves_a_child"))["leaves_a_child"])
    while _is_alive(child):  # it is being ended
        time.sleep(0.01)
    # Negative control: only the part's own process is ended.
    monkeypatch.setattr(runner.os, "killpg", os.kill)
    child = child_of(run(tmp_path / "alone", fake("leaves_a_child"))["leaves_a_child"])
    assert _is_alive(child)
    os.kill(child, signal.SIGKILL)


def test_a_budget_too_small_is_said(tmp_path: Path) -> None:
    found = run(
        tmp_path, fake("works", least_s=1.0), fake("raises", least_s=500.0), fake("too_much"), budget_s=60.0
    )
    assert found["works"]["state"] == "passed"
    assert found["raises"]["state"] == "not run"
    assert found["raises"]["reason"].startswith("budget: ") and "it needs 500" in found["raises"]["reason"]
    assert checks(found["too_much"]) == {"first": "passed"}
    assert found["too_much"]["reason"] == "budget: no time was left for second"


def test_the_report_is_whole_after_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    replace = os.replace

    def looking(source: Path, target: Path) -> None:
        replace(source, target)
        if str(target).endswith(".json"):
            seen.append([part["state"] for part in json.loads(Path(target).read_text())["parts"]])

    monkeypatch.setattr("benchmarks.gpu.report.os.replace", looking)
    run(tmp_path, fake("works"), fake("raises"))
    assert seen == [
        ["waiting", "waiting"],
        ["running", "waiting"],
        ["passed", "waiting"],
        ["passed", "running"],
        ["passed", "failed"],
    ]


def test_a_report_without_words_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.report.table", lambda rows: 1 // 0)
    monkeypatch.setattr("benchmarks.gpu.report._plain_tables", lambda rows: 1 // 0)
    assert run(tmp_path, fake("works"))["works"]["state"] == "passed"
    (text,) = (path.read_text() for path in tmp_path.glob("*.md"))
    assert "see the JSON" in text and "ZeroDivisionError" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_found_survives_the_end_of_the_runner(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import sys
from benchmarks import gpu_check
from benchmarks.gpu.plan import Part
parts = [Part(name, "{HERE}:" + name, "", 1, 1) for name in ("works", "hangs", "raises")]
sys.exit(gpu_check.main(["--interpret", "--budget-s", "900", "--out", {str(tmp_path)!r}], parts))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    states: list[str] = []
    while states[:2] != ["passed", "running"]:
        assert process.poll() is None
        time.sleep(0.05)
        states = [part["state"] for path in tmp_path.glob("*.json") for part in _parts(path)]
    notes: list[str] = []
    while not notes:
        notes = [entry["note"] for file in tmp_path.rglob("hangs.jsonl") for entry in read_results(file)[:1]]
    process.send_signal(number)
    status = process.wait()
    part = int(notes[0].split()[1])
    while _is_alive(part):  # for good, or until it notices
        time.sleep(0.05)
    (path,) = tmp_path.glob("gpu_check_*.json")
    after = {part["name"]: part for part in _parts(path)}
    assert after["works"]["state"] == "passed" and list(tmp_path.glob("*.md"))
    if number == signal.SIGTERM:
        assert status == 128 + signal.SIGTERM
        assert "interrupted by SIGTERM" in after["hangs"]["reason"] and after["hangs"]["state"] == "failed"
        assert after["raises"]["reason"] == "interrupted by SIGTERM" and after["raises"]["state"] == "not run"


def _parts(path: Path) -> Sequence[dict[str, Any]]:
    return json.loads(path.read_text())["parts"]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_time_that_one_part_does_not_use_goes_to_the_others() -> None:
    first, second, third = (Part(name, "", "", weight, weight) for name, weight in (("a", 2), ("b", 1), ("c", 1)))
    assert limit_s(first, [second, third], 100.0, False) == 50.0
    assert limit_s(second, [third], 90.0, False) == 45.0
    # The most telling part gets what it needs at least, and nothing is begun that cannot.
    assert limit_s(second, [third], 10.0, False) == second.least_s
    assert limit_s(third, [], 5.0, False) == 0.0


def test_every_part_can_be_loaded_and_says_what_it_needs() -> None:
    import importlib

    for part in PARTS:
        module, _, function = part.run.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), part.name
    assert lacking(next(part for part in PARTS if part.name == "metrics"), False, ()).startswith("ncu ")
    assert lacking(next(part for part in PARTS if part.name == "NCCL"), True, ()) == "a GPU"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--interpret", "--heap", "local"], "--interpret has ranks of its own"),
        (["--ranks", "2"], "--ranks must be at least 4"),
        (["--budget-s", "0"], "--budget-s must be positive"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(argv)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_without_a_gpu_there_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    expected = "gpu_check: error: torch sees no CUDA device; without one there is --interpret\n"
    assert capsys.readouterr().err == expected
    assert gpu_check.main(["--interpret", "--only", "nonsense"]) == 2
    assert "no part is named like nonsense; there are: 'compiled ahead', bits" in capsys.readouterr().err


def test_a_spec_goes_through_its_text() -> None:
    spec = Spec(True, "interpreted", 4, 3.0, "path", sizes=(1, 2), found=("ncu",))
    assert Spec.from_json(spec.to_json()) == spec


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


_BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"msgspec", "zmq", "vllm", "vllm_omni", "diffusers", "scipy", "matplotlib"}:
            raise ImportError(f"{name} is not on a bare machine")

sys.meta_path.insert(0, Bare())
"""


@pytest.mark.thorough
def test_a_short_run_on_a_machine_with_nothing_but_torch_and_triton(tmp_path: Path) -> None:
    """The command itself, from elsewhere: a part, its processes, and its report."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(_BARE)
    out = tmp_path / "out"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_check.py"),
        "--interpret",
        "--quick",
        "--rounds",
        "1",
    ]
    command += ["--budget-s", "3000", "--only", "beside", "--out", str(out)]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(bare)}, capture_output=True, text=True
    )
    log = "".join(path.read_text() for path in out.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + log
    (path,) = out.glob("*.json")
    report = json.loads(path.read_text())
    assert [part["name"] for part in report["parts"]] == ["beside compute"]
    assert all(part["state"] == "passed" for part in report["parts"])
    # Where it was put says nothing about it, and nothing here may be taken for a figure of a GPU.
    assert report["command"].endswith("--only beside")
    assert not report["on_gpu"] and report["device"] == "no GPU"
    text = next(out.glob("*.md")).read_text()
    assert "**Not on a GPU.**" in text and "aim" not in text and "copy rate (" not in text
    told = checks({part["name"]: part for part in report["parts"]}["beside compute"])
    assert told["migration from layout to layout"] == "passed"
    assert "not run: msgspec is not on a bare machine" in text
