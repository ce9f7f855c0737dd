"""The result file: its fields, and its numbers against an independent computation."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import pytest

from gfdit.sim.results import describe, percentile_interval, summarize, write_requests_csv
from gfdit.sim.simulator import SimulatedRequest, SimulationRun, Status
from tests.sim.tables import line

TOP = [
    *(
        "policy",
        "ranks",
        "num_requests",
        "num_completed",
        "num_rejected",
        "slo_attainment",
        "slo_attainment_grace",
    ),
    *("mean_latency_s", "p50_latency_s", "p95_latency_s", "p99_latency_s", "p50_latency_ci95_s"),
    *("p95_latency_ci95_s", "p99_latency_ci95_s", "throughput_rps", "rank_busy_ratio", "rank_widening_ratio"),
    *("migrations", "per_class", "requests"),
]


def made_up() -> SimulationRun:
    """Ten completed requests with latencies 1 to 10 s, deadline 5 s, then one of each other kind."""
    requests = [
        SimulatedRequest(
            line(f"r{i}", float(i), slo_class="S" if i % 2 else "M", deadline_s=5.0),
            Status.COMPLETED,
            end_s=i + 1.0 + i,
            rank_seconds=2.0,
        )
        for i in range(10)
    ]
    requests += [
        SimulatedRequest(line("rejected", 20.0, slo_class="S", deadline_s=5.0), Status.REJECTED, 20.0),
        SimulatedRequest(line("failed", 21.0, slo_class="S"), Status.FAILED, 25.0, rank_seconds=1.0),
        SimulatedRequest(line("starved", 22.0, slo_class="L")),
        SimulatedRequest(line("patient", 23.0, slo_class="L"), Status.COMPLETED, 50.0, rank_seconds=4.0),
    ]
    return SimulationRun("p", 2, requests, num_tasks=9, num_migrations=3, first_start_s=0.5, last_end_s=50.0)


def test_fields_are_those_of_the_contract() -> None:
    result = summarize(made_up())
    assert list(result) == TOP
    assert list(result["requests"][0]) == [
        *("id", "class", "arrival_s", "deadline_s", "status"),
        *("finish_s", "latency_s", "met_deadline", "rank_seconds"),
    ]


def test_numbers() -> None:
    result = summarize(made_up(), grace_s=2.0)
    latencies_s = [*range(1, 11), 27.0]
    assert (result["num_requests"], result["num_completed"], result["num_rejected"]) == (14, 11, 1)
    # In time: 1 to 5 s, and the one without a deadline. Rejected, failed and starved are misses.
    assert result["slo_attainment"] == pytest.approx(6 / 14)
    assert result["slo_attainment_grace"] == pytest.approx(8 / 14)
    assert result["mean_latency_s"] == pytest.approx(statistics.fmean(latencies_s))
    cuts = statistics.quantiles(latencies_s, n=100, method="inclusive")
    assert [result[f"p{p}_latency_s"] for p in (50, 95, 99)] == pytest.approx([cuts[49], cuts[94], cuts[98]])
    assert result["throughput_rps"] == pytest.approx(11 / 50)
    assert result["rank_busy_ratio"] == pytest.approx((10 * 2 + 1 + 4) / (2 * 49.5))


def test_classes_add_up_to_the_whole() -> None:
    result = summarize(made_up())
    classes = result["per_class"]
    assert list(classes) == ["L", "M", "S"]
    for name in ("num_requests", "num_completed", "num_rejected"):
        assert sum(numbers[name] for numbers in classes.values()) == result[name]
    met = sum(numbers["slo_attainment"] * numbers["num_requests"] for numbers in classes.values())
    assert met / result["num_requests"] == pytest.approx(result["slo_attainment"])


def test_requests_that_did_not_complete() -> None:
    *_, rejected, failed, starved, _ = summarize(made_up())["requests"]
    for request in (rejected, failed, starved):
        assert (request["finish_s"], request["latency_s"], request["met_deadline"]) == (None, None, False)
    assert failed["rank_seconds"] == 1.0


def test_nothing_completed() -> None:
    result = summarize(SimulationRun("p", 2, [SimulatedRequest(line("a"))]))
    assert (result["slo_attainment"], result["throughput_rps"], result["rank_busy_ratio"]) == (0.0, 0.0, 0.0)
    assert result["mean_latency_s"] is None and result["p99_latency_s"] is None
    assert " - " in describe(result)


def test_no_requests_is_an_error() -> None:
    with pytest.raises(ValueError, match="no requests"):
        summarize(SimulationRun("p", 2, []))


def test_the_table_has_a_row_per_class_and_one_for_all() -> None:
    rows = describe(summarize(made_up())).splitlines()
    assert [row.split()[0] for row in rows] == ["class", "L", "M", "S", "all", "policy"]
    assert "42.9%" in rows[4] and "0.220 requests/s" in rows[5]


def test_what_parallelism_cost_is_told_apart() -> None:
    run = made_up()
    narrowest = {request.trace.id: 1.5 for request in run.requests}
    result = summarize(run, narrowest_rank_s=narrowest)
    # Ten took 2 rank-seconds and one 4; what did not complete counts as useful.
    assert result["rank_widening_ratio"] == pytest.approx((10 * 0.5 + 2.5) / (2 * 49.5))
    assert "for widening" in describe(result) and "for widening" not in describe(summarize(run))


def test_percentile_intervals_are_order_statistics() -> None:
    values = [float(value) for value in range(1000)]
    low, high = percentile_interval(values, 95) or (math.nan, math.nan)
    assert 930 <= low < 950 < high <= 970  # 950 ± 1.96 x 6.9
    assert percentile_interval(values[:20], 99) is None


def test_requests_as_csv(tmp_path: Path) -> None:
    write_requests_csv(tmp_path / "r.csv", {"p": summarize(made_up())})
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    assert len(rows) == 14 and rows[0]["policy"] == "p" and rows[0]["class"] == "M"
    assert {row["status"] for row in rows} == {"completed", "rejected", "failed", "starved"}
