"""The benchmark of a server that runs for long: what it calls flat, and that it runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.endurance import (
    ABOVE_MB,
    MAPPED,
    MAX_GROWTH,
    MOST_IN_USE,
    WITH_NOTHING_KEPT,
    Series,
    grown,
    growth,
    is_good,
    judge,
)

RUN_S = 1800.0


def of(value_at: Callable[[float], float], name: str = "control: RSS") -> Series:
    """A sample every five seconds; ``value_at`` of the share of the run that is over."""
    series = Series(name, "MB")
    for at_s in range(0, int(RUN_S) + 1, 5):
        series.add(at_s, value_at(at_s / RUN_S))
    return series


@pytest.mark.parametrize(
    ("value_at", "flat"),
    [
        (lambda share: 1000.0, True),
        (lambda share: 1000.0 - 300.0 * share, True),
        (lambda share: 500.0 + 500.0 * min(1.0, 3 * share), True),
        (lambda share: 1000.0 + 500.0 * (share * 20 % 1), True),
        (lambda share: 1000.0 + 900.0 * MAX_GROWTH * share, True),
        (lambda share: 1000.0 + 2000.0 * MAX_GROWTH * share, False),
        (lambda share: 1000.0 + 100.0 * math.sqrt(share) * (share * 40 % 1) + 120.0 * share, False),
        (lambda share: 1000.0 + 200.0 * (share > 0.8), False),
        (lambda share: 3.0 + 0.5 * (share * 50 % 1), True),
        (lambda share: 3.0 + 8.0 * share, False),
    ],
    ids=["constant", "shrinks", "fills", "teeth", "little", "leak", "leak with teeth", "step", "small", "doubles"],
)
def test_what_is_flat(value_at: Callable[[float], float], flat: bool) -> None:
    assert growth(of(value_at), RUN_S).flat is flat


def test_the_line_is_the_least_squares_line() -> None:
    found = growth(of(lambda share: 100.0 + 30.0 * share), RUN_S)
    assert found.per_minute == pytest.approx(1.0)
    assert found.by_line == pytest.approx(20.0)
    assert found.by_thirds == pytest.approx(10.0, rel=0.02)
    assert found.mean == pytest.approx(120.0) and found.largest == pytest.approx(130.0)


@pytest.mark.parametrize(
    ("value_at", "verdict"),
    [
        (lambda share: 940.0 + (ABOVE_MB - 10) * (share * 20 % 1), f"below {940 + ABOVE_MB:.0f}"),
        (lambda share: 940.0 + (ABOVE_MB + 10) * (share > 0.5), f"above {940 + ABOVE_MB:.0f}"),
    ],
    ids=["bounded", "not bounded"],
)
def test_a_worker_may_keep_so_much_and_no_more(value_at: Callable[[float], float], verdict: str) -> None:
    """Beyond its own memory with nothing kept and what it has mapped."""
    times_s = [600.0, 1200.0, 1800.0]
    nothing_kept = Series(f"worker 0: {WITH_NOTHING_KEPT}", "MB", times_s, [780.0, 795.0, 800.0])
    mapped = Series(f"worker 0: {MAPPED}", "MB", times_s, [40.0, 90.0, 100.0])
    in_use = Series(f"worker 0: {MOST_IN_USE}", "MB", times_s, [300.0, 340.0, 320.0])
    rss = of(value_at, "worker 0: RSS")
    judged = judge({series.name: series for series in (nothing_kept, mapped, in_use, rss)}, RUN_S)
    assert judged["worker 0: RSS"]["verdict"] == verdict and not judged[mapped.name]["verdict"]
    assert judged[nothing_kept.name]["verdict"] == "flat"
    assert is_good({"unexpected": [], "series": judged}) == verdict.startswith("below")


def test_a_worker_that_leaks_is_not_flat() -> None:
    nothing_kept = Series(f"worker 0: {WITH_NOTHING_KEPT}", "MB", [600.0, 1200.0, 1800.0], [900.0, 950.0, 1000.0])
    judged = judge({nothing_kept.name: nothing_kept}, RUN_S)
    assert judged[nothing_kept.name]["verdict"] == "grows"
    assert not is_good({"unexpected": [], "series": judged})


def test_surprises_are_no_success() -> None:
    assert is_good({"unexpected": [], "series": {}})
    assert not is_good({"unexpected": ["failed: r1"], "series": {}})


def test_a_third_without_samples_is_no_success() -> None:
    series = Series("files", "")
    for at_s in (0.0, 10.0, 20.0, 1790.0, 1795.0):
        series.add(at_s, 1.0)
    with pytest.raises(ValueError, match="files: no sample in a third"):
        growth(series, RUN_S)


def test_caches_that_grew() -> None:
    early: dict[str, tuple[int, int | None]] = {"full": (16, 16), "grows": (3, None), "shrinks": (5, 10)}
    late: dict[str, tuple[int, int | None]] = {
        "full": (16, 16),
        "grows": (9, None),
        "shrinks": (1, 10),
        "new": (2, 8),
    }
    assert grown([{}, early, late]) == {"grows": (3, 9, None), "new": (0, 2, 8)}


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_short_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.endurance",
        "--minutes",
        "1",
        "--capacity-s",
        "15",
        "--sample-s",
        "1",
    ]
    with (tmp_path / "log").open("w") as log:
        subprocess.run(
            [*command, "--out", str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,  # a minute is too short to say what is flat
        )
    (path,) = tmp_path.glob("endurance_*.json")
    report = json.loads(path.read_text())
    assert report["outcomes"]["served"] > 0 and not report["unexpected"]
    assert {"API server: RSS", "control: RSS", "worker 0: RSS", "worker 1: threads"} <= set(report["series"])
    assert path.with_suffix(".md").exists() and path.with_suffix(".png").exists()
