"""Arrival patterns: the offered load is the one asked for, and the phases are where they should be."""

from __future__ import annotations

import statistics

import pytest

from gfdit.core.cost_table import TableCostModel
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.workloads import PATTERNS, generate, offered_load, request_classes, window_s
from tests.sim.tables import AROUND_S, table

WAN = TableCostModel(load_cost_table("wan2.2-synthetic"))
QWEN = TableCostModel(load_cost_table("qwen-image-h20"))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("cost", [WAN, QWEN], ids=["wan", "qwen"])
def test_load_is_what_was_asked_for(name: str, cost: TableCostModel) -> None:
    phases, classes = PATTERNS[name], request_classes(cost)
    loads = [
        offered_load(
            generate(phases, classes, num_ranks=8, load=0.9, seed=seed),
            classes,
            num_ranks=8,
            over_s=window_s(phases),
        )
        for seed in range(60)
    ]
    assert statistics.fmean(loads) == pytest.approx(0.9, rel=0.05)


def test_windows_are_the_published_ones() -> None:
    windows = {name: window_s(phases) for name, phases in PATTERNS.items()}
    assert windows == {
        "short": 600,
        "foreground-burst": 1800,
        "inflight-burst": 1500,
        "five-phase": 3600,
        "poisson": 600,
    }


def test_classes_are_the_published_shapes_and_deadlines() -> None:
    small, medium, large = request_classes(WAN)
    assert [str(kind.shape) for kind in (small, medium, large)] == ["480x832x49", "480x832x81", "720x1280x81"]
    assert small.cfg and small.num_steps == 50
    # 0.055 + 0.052 + 50 * 0.1323e-3 * 5070 + (9e-8 * 480 * 832 * 49 + 100.5) / 1000
    assert small.service_s == pytest.approx(33.747311, abs=1e-3)
    for kinds, factors in ((request_classes(WAN), (2.0, 2.5, 3.5)), (request_classes(QWEN), (1.5, 2.0, 6.0))):
        assert [kind.deadline_s / kind.service_s for kind in kinds] == pytest.approx(factors)
    assert not request_classes(QWEN)[0].cfg


def test_the_inflight_burst_has_large_requests_and_then_only_small_ones() -> None:
    trace = generate(PATTERNS["inflight-burst"], request_classes(WAN), num_ranks=64, load=0.9, seed=1)
    early = {request.slo_class for request in trace if request.arrival_s < 300}
    assert early == {"L"} and {r.slo_class for r in trace if r.arrival_s >= 300} == {"S"}
    assert all(r.arrival_s < 300 or 600 <= r.arrival_s < 780 for r in trace)


def test_rates_of_the_phases() -> None:
    trace = generate(PATTERNS["short"], request_classes(WAN), num_ranks=800, load=1.0, seed=3)
    per_s = [
        sum(start_s <= request.arrival_s < end_s for request in trace) / (end_s - start_s)
        for start_s, end_s in ((0, 60), (60, 360), (360, 540), (540, 600))
    ]
    assert [rate / per_s[1] for rate in per_s] == pytest.approx([0.8 / 1.5, 1, 2.5 / 1.5, 0], rel=0.1)
    small = [request.slo_class == "S" for request in trace if request.arrival_s >= 360]
    assert statistics.fmean(small) == pytest.approx(0.7, abs=0.03)


def test_a_trace_is_sorted_and_repeats_from_its_seed() -> None:
    classes = request_classes(WAN)
    one, again, other = (
        generate(PATTERNS["five-phase"], classes, num_ranks=4, load=1.0, seed=seed) for seed in (5, 5, 6)
    )
    assert one == again != other
    assert [request.id for request in one] == sorted(request.id for request in one)
    assert [request.arrival_s for request in one] == sorted(request.arrival_s for request in one)


def test_a_table_of_one_shape_has_three_classes_of_it() -> None:
    kinds = request_classes(TableCostModel(table()), num_steps=3, deadline_factors=(1.0, 2.0, 3.0))
    assert [kind.service_s for kind in kinds] == [AROUND_S + 3 * 2.0] * 3
    assert kinds[1].deadline_s == 2 * kinds[1].service_s


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_ranks": 0}, "number of ranks must be at least 1, got 0"),
        ({"load": 0.0}, "load must be a positive number, got 0.0"),
        ({"load": float("inf")}, "load must be a positive number, got inf"),
        ({"load": 1e-9}, "no request arrives at load 1e-09"),
    ],
)
def test_impossible_workloads(change: dict[str, float], told: str) -> None:
    arguments = {"num_ranks": 4, "load": 1.0, "seed": 0} | change
    with pytest.raises(ValueError, match=told):
        generate(PATTERNS["poisson"], request_classes(WAN), **arguments)  # type: ignore[arg-type]


def test_a_table_without_times_on_one_rank() -> None:
    with pytest.raises(ValueError, match="no time of a denoising step of 'm' on one rank"):
        request_classes(TableCostModel(table({2: 1.0})))


def test_an_unknown_model() -> None:
    with pytest.raises(ValueError, match=r"no cost for model 'flux', known: wan2\.2"):
        request_classes(WAN, model="flux")
