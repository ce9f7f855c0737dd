"""Edits under masks: their sizes, templates, rates and deadlines, and the commands that make and simulate them."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from gfdit.cli import main as cli
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.costs.flux_edits import edit_table, flux_edits
from gfdit.sim.edit_workloads import EDITS, EditTimes, generate_edits, template_names
from gfdit.sim.trace import TraceRequest, read_trace

TIMES = EditTimes(TableCostModel(edit_table()), flux_edits())


def edits(name: str = "edits-own", **more: Any) -> list[TraceRequest]:
    options: dict[str, Any] = {"num_ranks": 4, "seed": 1, "load": 0.5}
    return generate_edits(EDITS[name], TIMES, **options | more)


@pytest.mark.parametrize(("name", "mean"), [("edits-own", 0.11), ("edits-public", 0.19), ("edits-try-on", 0.35)])
def test_masks_are_as_large_as_published_and_some_are_much_larger(name: str, mean: float) -> None:
    draw = random.Random(1)
    ratios = sorted(EDITS[name].mask_ratio(draw) for _ in range(4000))
    assert fmean(ratios) == pytest.approx(mean, abs=0.01)
    assert ratios[0] >= 0.01 and ratios[-1] <= 1.0
    median, p95 = ratios[2000], ratios[3800]
    assert median < mean and p95 > 1.8 * mean


def test_few_templates_are_asked_for_most() -> None:
    counts = Counter(edit.template for edit in edits(num_requests=5000))
    assert set(counts) <= set(template_names()) and len(template_names()) == 970
    assert counts["t0"] / counts["t9"] == pytest.approx(10, rel=0.5)
    assert counts.most_common(1)[0][0] == "t0"


@pytest.mark.parametrize("load", [0.3, 1.2])
def test_the_load_is_what_edits_take_alone(load: float) -> None:
    trace = edits(load=load, num_requests=2000)
    work_s = sum(TIMES.alone_s(edit.mask_ratio or 1.0) for edit in trace)
    assert work_s / (4 * trace[-1].arrival_s) == pytest.approx(load, rel=0.1)


def test_the_same_seed_has_the_same_edits_at_any_rate() -> None:
    slow, fast = (edits(load=None, per_min=rate, num_requests=50) for rate in (6, 60))
    assert [replace(edit, arrival_s=0.0) for edit in slow] == [replace(edit, arrival_s=0.0) for edit in fast]
    for one, other in zip(slow, fast, strict=True):
        assert one.arrival_s == pytest.approx(10 * other.arrival_s, abs=1e-4)
    assert edits(num_requests=50, seed=2)[0].mask_ratio != edits(num_requests=50)[0].mask_ratio


def test_deadlines_are_multiples_of_the_time_alone() -> None:
    for edit in edits(num_requests=50, slo_scale=0.5):
        assert edit.mask_ratio is not None and edit.deadline_s is not None
        factor = float(edit.slo_class.removesuffix("x"))
        assert edit.deadline_s == pytest.approx(0.5 * factor * TIMES.alone_s(edit.mask_ratio), abs=1e-5)


def test_bursts_have_longer_gaps_and_shorter_ones() -> None:
    def scatter(cv: float) -> float:
        at_s = [edit.arrival_s for edit in edits(cv=cv, num_requests=1000)]
        gaps = [later - earlier for earlier, later in pairwise(at_s)]
        return fmean((gap / fmean(gaps) - 1) ** 2 for gap in gaps) ** 0.5

    assert scatter(1.0) == pytest.approx(1, rel=0.2) and scatter(3.0) == pytest.approx(3, rel=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load": None}, "either a load or a number of requests a minute"),
        ({"per_min": 3}, "either a load or a number of requests a minute"),
        ({"load": -1}, "load must be a positive number, got -1"),
        ({"cv": 101}, "cv must be a number from 0 to 100"),
        ({"duration_s": 1e-6}, "no edit arrives within 1e-06 s with seed 1"),
    ],
)
def test_what_is_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edits(**options)


def test_by_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make = "workload edits-public --costs flux-h100-edits --ranks 2 --load 0.3 --num-requests 12 --out e.jsonl"
    assert cli.main(make.split()) == 0
    assert "12 edits in" in capsys.readouterr().out
    assert all(edit.mask_ratio and edit.template for edit in read_trace("e.jsonl"))
    simulate = "sim --trace e.jsonl --costs flux-h100-edits --ranks 2 --policy fcfs --jobs 1"
    means_s = []
    for more in ("", " --template-gib 1000000"):
        assert cli.main([*(simulate + more).split(), "--json", "r.json"]) == 0
        means_s.append(json.loads(Path("r.json").read_text())["mean_latency_s"])
    assert means_s[1] < 0.6 * means_s[0]
    sweep = (
        "sweep --workload edits-own --load 0.1 --seeds 1 --costs flux-h100-edits --ranks 1 --policy fcfs --jobs 1"
    )
    assert cli.main([*sweep.split(), "--template-gib", "1000000"]) == 0
