"""The reports on the policies: verdicts follow the numbers, in both directions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.policy_reports import gaps
from benchmarks.policy_reports.claims import Claim, Verdict, claims_table, count_led, rivals_of
from benchmarks.policy_reports.default_claims import DEFAULT, FAST, Targets
from benchmarks.policy_reports.gfdit_claims import EDF, OTHERS, crossing, edf_is_best
from benchmarks.policy_reports.report import Report
from gfdit.sim.bounds.exact import optimal_num_met
from gfdit.sim.bounds.possible import SIDES
from gfdit.sim.compare import PolicyChoice
from gfdit.sim.options import SimulationOptions
from gfdit.sim.sweep import BOUND, Cell, Grid, Point, Sweep
from tests.sim.tables import table

POINT = Point("short", 0.9)


def made_up(edf: tuple[float, ...], others: tuple[float, ...], point: Point = POINT) -> Sweep:
    """Attainment by seed."""
    values = {EDF: edf, **dict.fromkeys(OTHERS, others)}
    return Sweep(
        tuple(
            Cell(point, seed, policy, {"slo_attainment_grace": attainments[seed]})
            for seed in range(len(edf))
            for policy, attainments in values.items()
        )
    )


@pytest.mark.parametrize(
    ("edf", "others", "verdict"),
    [
        ((0.9, 0.8, 0.7), (0.5, 0.5, 0.5), Verdict.HOLDS),
        ((0.9, 0.8, 0.7), (0.91, 0.81, 0.71), Verdict.FAILS),
        # Ahead on average, but seeds alone may explain it.
        ((0.9, 0.8, 0.7), (0.6, 0.9, 1.0), Verdict.WITHIN_NOISE),
    ],
)
def test_a_claim_of_being_best_follows_the_numbers(
    edf: tuple[float, ...], others: tuple[float, ...], verdict: Verdict
) -> None:
    assert edf_is_best({"made up": made_up(edf, others)}).verdict is verdict


def test_overload_is_not_counted_against_it() -> None:
    overload = made_up((0.1, 0.1, 0.1), (0.9, 0.8, 0.9), Point("short", 1.2))
    below = made_up((0.9, 0.9, 0.9), (0.1, 0.2, 0.1))
    assert edf_is_best({"made up": Sweep(overload.cells + below.cells)}).verdict is Verdict.HOLDS


def test_a_crossing_needs_both_sides() -> None:
    def at(load: float, edf: float) -> tuple[Cell, ...]:
        return made_up((edf, edf + 0.1, edf), (0.5, 0.6, 0.6), Point("short", load)).cells

    def verdict(*cells: Cell) -> Verdict:
        return crossing({"made up": Sweep(cells)}).verdict

    assert verdict(*at(0.5, 0.9), *at(1.5, 0.1)) is Verdict.HOLDS
    assert verdict(*at(0.5, 0.1), *at(1.5, 0.9)) is Verdict.FAILS
    assert verdict(*at(0.5, 0.9)) is verdict(*at(1.5, 0.1)) is Verdict.FAILS


def test_who_is_ahead_is_named() -> None:
    sweep = made_up((0.5, 0.5, 0.5), (0.6, 0.7, 0.8))
    rivals = rivals_of(sweep, EDF, OTHERS[:1], sweep.points)
    text = count_led(len(sweep.points), rivals)
    assert (
        text.startswith("nobody ahead in 0 of 1 settings") and f"{OTHERS[0]} at short, load 0.9 by 20.0 ±" in text
    )
    assert rivals_of(sweep, OTHERS[0], [EDF], sweep.points) == []


def targets(**changed: dict[str, float]) -> dict[str, Verdict]:
    """Verdicts by the first word of the claim, where the default is ahead of all by much but for ``changed``."""
    good = {"slo_attainment": 0.99, "mean_latency_s": 1.0, "p99_latency_s": 2.0}
    worse = {"slo_attainment": 0.8, "mean_latency_s": 2.0, "p99_latency_s": 3.0}
    numbers = {DEFAULT: good, **dict.fromkeys((*FAST, "fcfs", "edf, admission"), worse)}
    numbers |= {BOUND: {"slo_attainment": 1.0}, f"{DEFAULT}, admission": dict.fromkeys(good, 1.0)}
    for name, values in changed.items():
        policy = BOUND if name == "bound" else name
        numbers[policy] = {**numbers[policy], **values}
    cells = [Cell(POINT, seed, policy, values) for seed in (0, 1) for policy, values in numbers.items()]
    return {
        claim.statement.split()[0]: claim.verdict for claim in Targets({"made up": Sweep(tuple(cells))}).claims()
    }


def test_targets_follow_the_numbers() -> None:
    assert set(targets().values()) == {Verdict.HOLDS}
    for statement, changed in {
        "attainment": {"edf, admission": {"slo_attainment": 1.0}},
        "at": {DEFAULT: {"slo_attainment": 0.85}},  # too little over the others, too far from the bound
        "mean": {"srtf": {"mean_latency_s": 0.9}},
        "99th": {"fcfs": {"p99_latency_s": 1.5}},
    }.items():
        assert targets(**changed)[statement] is Verdict.FAILS


def test_verdicts_are_written_out() -> None:
    claims = [
        Claim("a", "1", "x", Verdict.HOLDS, "left out"),
        Claim("b", "2", "y", Verdict.FAILS, "because"),
        Claim("c", "3", "z", Verdict.NOT_JUDGED),
    ]
    rows = claims_table(claims)[2:]
    assert [row.split(" | ")[-1] for row in rows] == [
        "**holds** |",
        "**does not hold**: because |",
        "not judged here |",
    ]


def test_a_report_says_where_it_comes_from_and_keeps_its_means(tmp_path: Path) -> None:
    source = {"date": "2026-01-01", "commit": "abc", "command": "make report", "python": "3.11"}
    kept = tmp_path / "kept"
    report = Report("r", "Title", tmp_path, source, num_seeds=2, num_processes=1, first_seed=7, kept=kept)
    grid = Grid(
        table(),
        (PolicyChoice("fcfs"),),
        ("short",),
        report.seeds,
        SimulationOptions(2),
        loads=(0.5,),
        num_steps=20,
        bound=True,
    )
    sweep = report.sweep("s", grid)
    each = 1 + len(SIDES)
    assert [cell.seed for cell in sweep.cells] == [7] * each + [8] * each
    assert len(list(kept.iterdir())) == 2 * each
    assert report.sweep("s", grid).as_json(cells=False) == sweep.as_json(cells=False)  # taken from there
    report.add("text")
    report.write()
    written = (tmp_path / "r.md").read_text()
    assert written.startswith("# Title\n\n- 2026-01-01, commit abc") and written.endswith("text\n")
    mean, *_ = json.loads((tmp_path / "r.json").read_text())["sweeps"]["s"]
    found = sweep.estimate(sweep.points[0], "fcfs", "slo_attainment")
    assert found is not None and mean["slo_attainment"]["mean"] == round(found.mean, 5)


def test_small_instances_are_small_enough_for_the_optimum() -> None:
    costs = gaps.small_table()
    traces = [gaps.small_trace(costs, seed) for seed in range(30)]
    shortest = min(traces, key=lambda trace: sum(request.num_steps for request in trace))
    assert 0 < optimal_num_met(shortest, costs, num_ranks=gaps.SMALL_RANKS) <= len(shortest)
    assert {len(trace) for trace in traces} == {3, 4, 5}
