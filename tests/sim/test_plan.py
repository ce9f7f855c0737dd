"""Fewest ranks for a target: the search, what is sure, and the command."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gfdit.cli import main as cli
from gfdit.sim.compare import PolicyChoice
from gfdit.sim.options import SimulationOptions
from gfdit.sim.plan import (
    Demand,
    Requirement,
    Study,
    bootstrap,
    fewest,
    judge,
    plan,
    prediction_bound,
    up_to_degree,
)
from gfdit.sim.trace import write_trace
from tests.sim.tables import line, table

MOST = 40


def searched(first: int, enough: set[int]) -> tuple[int | None, list[int]]:
    search, tried = fewest(first, MOST), []
    asked = next(search)
    while True:
        tried.append(asked)
        try:
            asked = search.send(asked in enough)
        except StopIteration as end:
            return end.value, tried


@given(first=st.integers(1, MOST), least=st.integers(1, MOST + 5))
def test_the_search_finds_the_fewest_and_tries_nothing_twice(first: int, least: int) -> None:
    found, tried = searched(first, set(range(least, MOST + 1)))
    assert found == (least if least <= MOST else None)
    assert len(tried) == len(set(tried)) <= 2 * math.log2(MOST) + 4


def test_a_gap_just_below_is_looked_over() -> None:
    assert searched(1, {10, *range(12, MOST + 1)})[0] == 10


def test_the_next_value_is_beyond_the_bound_as_often_as_said() -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(size=(4000, 11))
    below = [row[10] < prediction_bound(row[:10].tolist(), 0.9, upper=False) for row in values]
    assert 0.085 < sum(below) / len(below) < 0.115
    assert prediction_bound([1.0, math.inf], 0.9, upper=True) == math.inf


def test_windows_that_are_late_together_make_the_bootstrap_unsure() -> None:
    requirement = Requirement("attainment", 0.9)
    late = np.arange(400) // 10 % 10 != 0  # one window in ten, all of it
    together = np.arange(400) // 10
    mixed = np.arange(400) % 40
    spreads = [bootstrap([late.astype(float)], [requirement], [w], 40).std() for w in (together, mixed % 10)]
    assert spreads[0] > 0.03
    assert bootstrap([np.ones(400)], [requirement], [mixed], 40).min() == 1.0


def test_values_of_requests() -> None:
    requests: list[dict[str, Any]] = [
        {"class": "S", "latency_s": 2.0, "deadline_s": 1.5},
        {"class": "S", "latency_s": None, "deadline_s": None},
        {"class": "L", "latency_s": 9.0, "deadline_s": None},
    ]
    assert Requirement("attainment", 0.9).values(requests, 0.0).tolist() == [0, 0, 1]
    assert Requirement("attainment", 0.9, "S").values(requests, 0.5).tolist() == [1, 0]
    latency = Requirement("p99_s", 5.0)
    # What never completes has no latency that could be good.
    assert latency.statistic(latency.values(requests, 0.0)) == math.inf


def study(confidence: float = 0.9, **changes: object) -> Study:
    demand = Demand(table(), "poisson", per_min=4.0, num_steps=4, duration_s=900.0)
    policies = (PolicyChoice("edf"), PolicyChoice("fcfs"))
    target = (Requirement("attainment", 0.9),)
    return Study(demand, policies, target, SimulationOptions(1), tuple(range(4)), confidence, **changes)  # type: ignore[arg-type]


def test_more_confidence_takes_no_fewer_ranks() -> None:
    for low, high in zip(plan(study(0.5)), plan(study(0.99)), strict=True):
        assert low.num_ranks is not None and high.num_ranks is not None
        assert low.num_ranks <= high.num_ranks
        assert low.verdicts[low.num_ranks].is_met
        if low.num_ranks > 1:
            assert not low.verdicts[low.num_ranks - 1].is_met


def test_what_a_trace_rules_out_is_not_simulated_again() -> None:
    asked = replace(study(), demand=replace(study().demand, per_min=10.0, duration_s=300.0))
    numbers = [(PolicyChoice("edf"), num_ranks) for num_ranks in (1, 4)]
    simulated: list[int] = []
    whole = judge(asked, numbers)
    few, enough = judge(asked, numbers, gives_up=True, on_done=lambda: simulated.append(1))
    assert len(simulated) == 2 + 3
    assert not whole[0].is_met and not few.is_met and few.bounds == (-math.inf,)
    assert enough == whole[1] and enough.is_met


@given(
    first=st.floats(0, 1),
    others=st.lists(st.floats(0, 1), min_size=2, max_size=9),
    confidence=st.floats(0.5, 0.99),
)
def test_no_others_make_up_for_a_trace_that_rules_a_number_out(
    first: float, others: list[float], confidence: float
) -> None:
    at_best = max(first, prediction_bound([first, *[1.0] * len(others)], confidence, upper=False))
    assert prediction_bound([first, *others], confidence, upper=False) <= at_best + 1e-9


def test_what_cannot_be_met_has_no_answer() -> None:
    assert {answer.num_ranks for answer in plan(study(max_ranks=1))} <= {None, 1}
    demand = Demand(table(), trace=(line("a", deadline_s=0.1), line("b", 1.0, deadline_s=0.1)))
    hopeless = Study(
        demand, (PolicyChoice("edf"),), (Requirement("attainment", 0.9),), SimulationOptions(1), max_ranks=4
    )
    assert plan(hopeless)[0].num_ranks is None


def test_a_table_of_fewer_degrees() -> None:
    assert {entry.parallel.size for entry in up_to_degree(table(), 2).entries} == {1, 2}


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    table().save("c.json")
    write_trace("t.jsonl", [line(f"r{i:02}", 2.0 * i, deadline_s=20.0, slo_class="S") for i in range(60)])
    return tmp_path


def run_plan(*args: str) -> int:
    return cli.main(["plan", "--costs", "c.json", "--policy", "edf", "--jobs", "1", "--max-ranks", "32", *args])


def test_a_trace_is_planned_with_what_ifs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what_ifs = ("--arrivals", "x2", "--lose-node", "--ranks-per-node", "2", "--degrees", "1")
    files = ("--csv", "p.csv", "--json", "p.json", "--plot", "p.png")
    target = ("--attainment", "0.9", "--p99-s", "30", "--class", "S:0.9", "--price-per-rank-hour", "2")
    assert run_plan("--trace", "t.jsonl", *target, *what_ifs, *files) == 0
    rows = {row["what_if"]: row for row in csv.DictReader(Path("p.csv").read_text().splitlines())}
    assert list(rows) == ["as asked", "a node less", "arrivals x2", "degree ≤ 1"]
    ranks = int(rows["as asked"]["ranks"])
    assert int(rows["arrivals x2"]["ranks"]) > ranks
    assert int(rows["a node less"]["nodes"]) == -(-ranks // 2) + 1
    assert float(rows["as asked"]["cost_a_day"]) == 2 * 24 * ranks
    assert f"fewest: {ranks} ranks" in capsys.readouterr().out
    assert json.loads(Path("p.json").read_text())["rows"][0]["ranks"] == ranks
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--trace", "t.jsonl"], "a target is needed: --attainment"),
        (["--trace", "t.jsonl", "--attainment", "95"], "attainment must be a share above 0 and up to 1, got 95"),
        (["--trace", "t.jsonl", "--attainment", "0.9", "--confidence", "2"], "confidence must be at least 0.5"),
        (["--trace", "t.jsonl", "--attainment", "0.9", "--per-min", "2"], "--per-min is of --workload"),
        (["--trace", "t.jsonl", "--class", "S"], "--class takes NAME:X"),
        (["--trace", "t.jsonl", "--class", "X:0.9"], "no request is of class 'X'"),
        (["--trace", "t.jsonl", "--mean-s", "0.1"], "no policy meets the target (mean latency 0.1 s) on up to 32"),
        (["--workload", "poisson", "--attainment", "0.9"], "poisson needs --per-min"),
        (["--workload", "poisson", "--per-min", "2", "--attainment", "0.9", "--seeds", "2"], "at least 3 seeds"),
        (
            ["--trace", "t.jsonl", "--attainment", "0.9", "--arrivals", "x0"],
            "--arrivals must be a positive factor",
        ),
    ],
)
def test_mistakes(here: Path, capsys: pytest.CaptureFixture[str], args: list[str], told: str) -> None:
    assert run_plan(*args) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
