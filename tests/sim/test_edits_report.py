"""The report on edits: a slice of it, with what must hold whatever the figures are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.edits_page import markdown, plot
from benchmarks.edits_report import (
    MASK_RATIOS,
    PROCESSING_S,
    Point,
    fold,
    image_s,
    measured,
    points,
    report_of,
    table_of,
    trace_of,
)
from gfdit.cli.provenance import provenance
from gfdit.core.tasks import TaskKind

SEEDS = (0, 1)


def mean(point: Point, metric: str) -> float:
    return fmean(measured(replace(point, seed=seed))[metric] for seed in SEEDS)


@pytest.mark.parametrize("ratio", MASK_RATIOS)
def test_better_plans_are_shorter(ratio: float) -> None:
    seconds = image_s(ratio)
    for faster, slower in (
        ("ideal", "ours"),
        ("ideal", "best of a step"),
        ("ours", "no cache"),
        ("best of a step", "Algorithm 1"),
        ("best of a step", "block by block"),
        ("block by block", "naive loading"),
    ):
        assert seconds[faster] <= seconds[slower] + 1e-9, (faster, slower)


def test_all_systems_see_the_same_edits() -> None:
    static, triage = Point("batching", "static", 0.5, 1, 20), Point("batching", "triage", 0.5, 1, 20)
    assert trace_of(static) == trace_of(triage)
    assert trace_of(static) != trace_of(replace(static, seed=1))


def test_continuous_batches_wait_less_than_static_ones() -> None:
    """Several times less, where edits arrive while others run."""
    static, continuous = (Point("queueing", system, 0.4, 1, 40) for system in ("static", "pipeline"))
    assert mean(continuous, "queueing_s") < 0.5 * mean(static, "queueing_s")


def test_processing_images_between_steps_delays_all() -> None:
    naive, apart = (Point("batching", system, 0.25, 1, 40) for system in ("naive", "continuous"))
    assert mean(naive, "p95_s") > 1.1 * mean(apart, "p95_s")
    tables = [table_of(1.29, processing_s) for processing_s in (0.0, PROCESSING_S)]
    sums = [sum(e.seconds for e in t.entries if e.task in (TaskKind.ENCODE, TaskKind.DECODE)) for t in tables]
    assert sums[1] - sums[0] == pytest.approx(2 * PROCESSING_S)


@pytest.mark.thorough
@pytest.mark.parametrize("per_s", [0.5, 0.25])
def test_triage_meets_more_deadlines_and_has_a_lower_mean_than_the_placement_of_the_paper(per_s: float) -> None:
    pipeline = Point("placement", "pipeline", per_s, 4, 80, deadlines=True)
    triage = replace(pipeline, system="triage")
    assert mean(triage, "attainment") >= mean(pipeline, "attainment")
    assert mean(triage, "mean_s") < mean(pipeline, "mean_s")
    assert mean(replace(triage, deadlines=False), "p95_s") < 1.05 * mean(pipeline, "p95_s")


@pytest.mark.thorough
def test_the_page_and_the_picture(tmp_path: Path) -> None:
    report = provenance(["benchmarks/edits_report.py"]) | report_of(6, SEEDS, 1)
    text = markdown(report)
    sections = {point.section for point in points(6)}
    assert {row["section"] for row in report["rows"]} == sections
    assert text.count("\n## ") == 1 + len(sections) and "nan" not in text
    assert all("gain" in row and len(row["p95_s"]["values"]) == 2 for row in report["rows"])
    plot(report, tmp_path / "edits.png")
    assert (tmp_path / "edits.png").stat().st_size > 10_000


def test_seeds_are_folded() -> None:
    point = Point("host", "triage", 1.0, 1, 5)
    numbers = {"p95_s": 1.0, "mean_s": 1.0, "queueing_s": 0.0, "attainment": 100.0}
    (row,) = fold([(point, numbers), (replace(point, seed=1), numbers | {"p95_s": 3.0})])
    assert row["p95_s"]["mean"] == 2.0 and row["p95_s"]["values"] == [1.0, 3.0]
