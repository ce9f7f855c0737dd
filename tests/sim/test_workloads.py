"""Arrival patterns: the offered load is the one asked for, and the phases are where they should be."""

from __future__ import annotations

import hashlib
import itertools
import random
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gfdit.core import Shape, TaskKind
from gfdit.core.cost.table import TableCostModel
from gfdit.policies.equipartition import Equipartition
from gfdit.sim.arrivals import arrival_times, pick
from gfdit.sim.burstiness import burstiness
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.shares import Shares
from gfdit.sim.simulator import SimulationOptions, Simulator, Status
from gfdit.sim.workloads import (
    GENTD26,
    PATTERNS,
    generate,
    offered_load,
    request_classes,
    workload_classes,
)
from tests.sim.tables import AROUND_S, table

WAN = TableCostModel(load_cost_table("wan2.2-synthetic"))
QWEN = TableCostModel(load_cost_table("qwen-image-h20"))
FLUX = TableCostModel(load_cost_table("flux-h100"))
TETRISERVE = ("tetriserve-uniform", "tetriserve-skewed")


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("cost", [WAN, QWEN], ids=["wan", "qwen"])
def test_load_is_what_was_asked_for(name: str, cost: TableCostModel) -> None:
    workload = PATTERNS[name]
    classes = workload_classes(workload, cost, num_steps=50)
    loads = [
        offered_load(
            generate(workload, classes, num_ranks=8, load=0.9, seed=seed, duration_s=workload.duration_s),
            classes,
            num_ranks=8,
            over_s=workload.duration_s,
        )
        for seed in range(60)
    ]
    assert statistics.fmean(loads) == pytest.approx(0.9, rel=0.06)


def test_durations_are_the_published_ones() -> None:
    durations_s = {name: workload.duration_s for name, workload in PATTERNS.items()}
    assert durations_s == {
        "short": 600,
        "foreground-burst": 1800,
        "inflight-burst": 1500,
        "five-phase": 3600,
        "poisson": 600,
        "gamma": 600,
        "production-images": 600,
        "tetriserve-uniform": 1500,
        "tetriserve-skewed": 1500,
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
        ({"load": None}, "no rate of its own: give a load"),
        ({"per_min": 5.0}, "give one of them"),
        ({"load": None, "per_min": -5.0}, "requests a minute must be a positive number, got -5.0"),
        ({"cv": -0.5}, "cv must be a number from 0 to 100.0, got -0.5"),
        ({"cv": float("nan")}, "cv must be a number from 0 to 100.0, got nan"),
        ({"duration_s": 0.0}, "duration must be a positive number, got 0.0"),
        ({"num_requests": 0}, "number of requests must be at least 1, got 0"),
    ],
)
def test_impossible_workloads(change: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"num_ranks": 4, "load": 1.0, "seed": 0} | change
    with pytest.raises(ValueError, match=told):
        generate(PATTERNS["poisson"], request_classes(WAN), **arguments)


def test_a_table_without_times_on_one_rank() -> None:
    with pytest.raises(ValueError, match="no time of a denoising step of 'm' on one rank"):
        request_classes(TableCostModel(table({2: 1.0})))


def test_a_measured_table_of_several_models_and_settings() -> None:
    """As `gfdit profile` writes them: guidance on and off, batches, copies of several models."""
    plain, guided = table(), [replace(entry, cfg=True, seconds=2 * entry.seconds) for entry in table().entries]
    batched = [replace(entry, batch=2) for entry in plain.entries if entry.task is TaskKind.DENOISE]
    entries = (*plain.entries, *guided, *batched, *table(model="other").entries)
    cost = TableCostModel(replace(plain, entries=entries))
    with pytest.raises(ValueError, match="which model: the cost table has several, known: m, other"):
        request_classes(cost)
    small, _, large = request_classes(cost, model="m", num_steps=3)
    assert small.cfg and small.shape == large.shape == Shape(512, 512)
    assert small.service_s == 2 * (AROUND_S + 3 * 2.0)
    trace = generate(PATTERNS["poisson"], (small, small, large), num_ranks=2, load=0.5, seed=1)
    done = Simulator(Equipartition(), cost.table, trace, SimulationOptions(2)).run()
    assert {request.status for request in done.requests} == {Status.COMPLETED}


def test_an_unknown_model() -> None:
    with pytest.raises(ValueError, match=r"no cost for model 'flux', known: wan2\.2"):
        request_classes(WAN, model="flux")


# Arrivals


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    times_s = arrival_times([(10.0, 2.0)], random.Random(1), cv)
    gaps_s = [after - before for before, after in itertools.pairwise(itertools.islice(times_s, 40_000))]
    assert statistics.fmean(gaps_s) == pytest.approx(0.5, rel=0.05)
    assert statistics.pstdev(gaps_s) / statistics.fmean(gaps_s) == pytest.approx(cv, rel=0.05, abs=1e-9)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_the_number_expected_is_exact_however_bursty(cv: float) -> None:
    """A process that began at an arrival would have (cv squared - 1) / 2 more of them: 7.5 at 4."""
    draw = random.Random(2)
    counts = []
    for _ in range(2000):
        times_s = arrival_times([(3.0, 2.0), (2.0, 0.0), (1.0, 4.0)], draw, cv)
        counts.append(sum(1 for _ in itertools.takewhile(lambda at_s: at_s < 6.0, times_s)))
    assert statistics.fmean(counts) == pytest.approx(10, abs=4 * statistics.stdev(counts) / 2000**0.5 + 1e-9)


def test_nothing_arrives_in_a_phase_without_a_rate() -> None:
    times_s = list(itertools.islice(arrival_times([(1.0, 50.0), (2.0, 0.0)], random.Random(3), 2.0), 5000))
    assert times_s == sorted(times_s) and times_s[-1] > 100
    assert all(at_s % 3.0 < 1.0 for at_s in times_s)


def test_classes_are_drawn_in_proportion() -> None:
    draw = random.Random(4)
    counts = Counter(pick((1.0, 0.0, 3.0), draw) for _ in range(20_000))
    assert counts[1] == 0 and counts[2] / counts[0] == pytest.approx(3, rel=0.1)


def test_a_pattern_repeats_until_the_end_asked_for() -> None:
    classes = request_classes(WAN)
    short = PATTERNS["short"]
    longer = generate(short, classes, num_ranks=8, load=1.0, seed=3, duration_s=1500)
    assert max(request.arrival_s for request in longer) > 1200
    assert (
        generate(short, classes, num_ranks=8, load=1.0, seed=3, num_requests=5)
        == [request for request in longer[:5]]
        or len(longer) > 9
    )  # ids have as many digits as the trace needs
    assert len(generate(short, classes, num_ranks=8, load=1.0, seed=3, num_requests=500)) == 500


def test_a_rate_instead_of_a_load() -> None:
    classes = request_classes(WAN)
    trace = generate(PATTERNS["five-phase"], classes, num_ranks=1, per_min=20.0, seed=1, duration_s=36_000)
    assert len(trace) == pytest.approx(20 * 600, rel=0.03)


def test_a_trace_is_the_same_on_every_version_of_python() -> None:
    """Only sums, logarithms and ``random()``, whose sequence Python keeps: the digest is of the arrival times."""
    trace = generate(PATTERNS["gamma"], request_classes(WAN), num_ranks=8, load=5.0, seed=11)
    text = " ".join(f"{request.arrival_s:.6f}{request.slo_class}" for request in trace)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "214f509ca93c0ff8"


# Several models


def test_models_share_the_requests_of_a_workload() -> None:
    both = TableCostModel(load_cost_table("flux-h100,qwen-image-h20"))
    models = Shares(("flux.1-dev", "qwen-image"), (0.7, 0.3))
    classes = workload_classes(PATTERNS["five-phase"], both, models=models)
    names = [f"{model}/{size}" for model in models.values for size in "SML"]
    assert [kind.name for kind in classes] == names
    assert classes[0].service_s == request_classes(FLUX)[0].service_s
    trace = generate(PATTERNS["five-phase"], classes, num_ranks=64, load=0.8, seed=1)
    counts = Counter(request.model for request in trace)
    assert counts["flux.1-dev"] / counts.total() == pytest.approx(0.7, abs=0.05)
    assert offered_load(trace, classes, num_ranks=64, over_s=3600) == pytest.approx(0.8, rel=0.1)
    done = Simulator(Equipartition(), both.table, trace[:40], SimulationOptions(4)).run()
    assert {request.status for request in done.requests} == {Status.COMPLETED}


def test_tables_in_one_have_the_slowest_copies_of_any(tmp_path: Path) -> None:
    slow = replace(table(model="slow"), migration_latency_s=9.0, hardware="other")
    slow.save(tmp_path / "slow.json")
    table().save(tmp_path / "m.json")
    both = load_cost_table([str(tmp_path / "m.json"), str(tmp_path / "slow.json")])
    assert both.entries == (*table().entries, *slow.entries)
    assert (both.hardware, both.migration_latency_s) == ("none, other", 9.0)
    with pytest.raises(
        ValueError, match=r"model 'flux\.1-dev' is in two cost tables: flux-h100 and flux-h100-edits"
    ):
        load_cost_table("flux-h100,flux-h100-edits")


# As in a service's log


def test_a_production_trace_has_its_load_exactly_and_the_steps_of_the_log() -> None:
    workload = PATTERNS["production-images"]
    classes = workload_classes(workload, QWEN)
    trace = generate(workload, classes, num_ranks=4, load=0.9, seed=3)
    assert len(trace) == workload.num_requests and trace[0].arrival_s == 0
    assert offered_load(trace, classes, num_ranks=4, over_s=trace[-1].arrival_s) == pytest.approx(0.9, rel=1e-4)
    denser = generate(workload, classes, num_ranks=4, per_min=60.0, seed=3)
    assert denser[-1].arrival_s == pytest.approx(400.0)
    assert [one.num_steps for one in denser] == [one.num_steps for one in trace]
    steps = Counter(one.num_steps for one in trace)
    assert steps.most_common(1)[0][0] == 30 and steps[30] / 400 == pytest.approx(0.92, abs=0.05)
    assert {one.num_steps for one in generate(workload, request_classes(QWEN), num_ranks=1, seed=0)} == {50}
    with pytest.raises(ValueError, match="no coefficient of variation to choose"):
        generate(workload, classes, num_ranks=4, load=0.9, seed=3, cv=2.0)


def test_production_arrivals_are_the_same_on_every_version_of_python() -> None:
    times_s = itertools.islice(GENTD26.arrival_times(random.Random(11)), 500)
    text = " ".join(f"{at_s:.4f}" for at_s in times_s)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "e5e2b3b20c1da1d1"


def test_production_arrivals_are_as_bursty_as_the_log() -> None:
    """Medians of windows of 2,700 requests; the log's own two parts are 1.6 times apart where they differ most."""
    found = [
        burstiness(list(itertools.islice(GENTD26.arrival_times(random.Random(seed)), 2700))).numbers()
        for seed in range(30)
    ]
    median = {name: statistics.median(one[name] for one in found) for name in found[0]}
    assert 5 < median["gap CV"] < 12
    assert 1.0 < median["dispersion, 1 s"] < 1.4
    assert 2 < median["dispersion, 60 s"] < 9
    assert 60 < median["dispersion, 3600 s"] < 250
    assert 0.6 < median["correlation, 1 min"] < 0.9
    assert 0.2 < median["correlation, 30 min"] < 0.6
    assert 25 < median["peak / mean a minute"] < 150


def test_sessions_begin_at_the_mean_rate_and_have_their_mean_size() -> None:
    steady = replace(GENTD26, rate_sigma=0.0, script_share=0.0, per_hour=60.0)
    num_requests = 50_000
    times_s = itertools.islice(steady.arrival_times(random.Random(1)), num_requests)
    first_s, *_, last_s = times_s
    sizes = 1 + sum((1 + k / steady.size_scale) ** -steady.size_shape for k in range(1, 1000))
    assert num_requests / (last_s - first_s) * 3600 == pytest.approx(60 * sizes, rel=0.05)


def test_burstiness_of_arrivals_that_are_known() -> None:
    poisson = burstiness(list(itertools.islice(arrival_times([(1.0, 0.5)], random.Random(1)), 40_000)))
    assert poisson.gap_cv == pytest.approx(1, rel=0.05)
    assert list(poisson.dispersions.values())[:5] == pytest.approx([1.0] * 5, rel=0.2)
    assert list(poisson.correlations.values()) == pytest.approx([0.0] * 4, abs=0.1)
    even = burstiness([float(second) for second in range(0, 36_001, 10)])
    assert even.gap_cv == 0 and even.peak_to_mean == 1
    pairs = burstiness([at_s for minute in range(600) for at_s in (60.0 * minute + 1, 60.0 * minute + 1.5)])
    assert pairs.dispersions[1] == pytest.approx(2 - 2 / 60, rel=0.01)  # two or none


# TetriServe


def test_tetriserve_mixes_are_the_published_ones() -> None:
    for name in TETRISERVE:
        workload = PATTERNS[name]
        classes = workload_classes(workload, FLUX)
        assert [(kind.name, kind.deadline_s, kind.num_steps) for kind in classes] == [
            ("256", 1.5, 20),
            ("512", 2.0, 20),
            ("1024", 3.0, 20),
            ("2048", 5.0, 20),
        ]
        traces = [generate(workload, classes, num_ranks=8, seed=seed) for seed in range(40)]
        assert statistics.fmean(map(len, traces)) == pytest.approx(300, rel=0.03)  # 12 a minute
        counts = Counter(request.slo_class for trace in traces for request in trace)
        weights = {"uniform": (1, 1, 1, 1), "skewed": (1.0157, 1.0645, 1.2840, 2.7183)}[name.partition("-")[2]]
        for kind, weight in zip(classes, weights, strict=True):
            assert counts[kind.name] / counts.total() == pytest.approx(weight / sum(weights), rel=0.06)


def test_deadlines_scale() -> None:
    classes = workload_classes(PATTERNS["tetriserve-skewed"], FLUX, slo_scale=1.5, num_steps=7)
    assert [kind.deadline_s for kind in classes] == [2.25, 3.0, 4.5, 7.5]
    assert {kind.num_steps for kind in classes} == {7}
    with pytest.raises(ValueError, match="SLO scale must be a positive number, got 0"):
        request_classes(WAN, slo_scale=0.0)
    with pytest.raises(ValueError, match="this workload has deadlines"):
        workload_classes(PATTERNS["tetriserve-skewed"], FLUX, deadline_factors=(1.0, 2.0, 3.0))
