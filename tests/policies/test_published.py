"""Published policies and the default: valid decisions on random runs, nothing starves, no idle machine waits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gfdit.core import ParallelSpec, Policy
from gfdit.core import commands as cmd
from gfdit.policies.edf import Edf
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.rssp import Rssp
from gfdit.policies.srtf import Srtf
from gfdit.policies.static import Static
from gfdit.policies.tetriserve import TetriServe
from gfdit.policies.triage import Triage
from tests.support.cluster import Cluster, Faults
from tests.support.timed_cluster import simulate
from tests.support.workload import CFG_2, SP_1_2_4, Arrival, make_request, random_requests

POLICIES: dict[str, Callable[[], Policy]] = {
    "static": Static,
    "fcfs-2": lambda: Fcfs(2),
    "fcfs-tasks": lambda: Fcfs(2, "task"),
    "srtf": Srtf,
    "srtf-widest": lambda: Srtf("widest"),
    "edf": Edf,
    "rssp": Rssp,
    "rssp-efficient": lambda: Rssp(0.4),
    "tetriserve": TetriServe,
    "tetriserve-bare": lambda: TetriServe(1, False, False, False, False, False),
    "tetriserve-more": lambda: TetriServe(widest_first=True, starts_in_round=True, fixed_rounds=False),
    "triage": Triage,
    "triage-throughput": lambda: Triage(objective="throughput"),
    "triage-bare": lambda: Triage(lending=0.0, giving_up=False, waiting=False, widening=False),
}
SEEDS = st.integers(0, 2**32 - 1)
FAULTS = Faults(task=0.05, cancel=0.01, rank_lost=0.01, late_report=0.05)
TWO_AT_LEAST = (ParallelSpec(2), ParallelSpec(4))


def varied_requests(seed: int, count: int) -> list[Arrival]:
    """With and without deadlines, of several priorities and two models; some need two ranks at least."""
    draw = random.Random(seed)
    requests = []
    for request, graph in random_requests(draw, count):
        if draw.random() < 0.2:
            request, graph = make_request(request.id, candidates=TWO_AT_LEAST, arrival_s=request.arrival_s)
        deadline_s = draw.choice([None, request.arrival_s, request.arrival_s + 2.0, request.arrival_s + 100.0])
        model, priority = draw.choice(["m", "m", "n"]), draw.choice([0, 0, 1])
        requests.append((replace(request, deadline_s=deadline_s, model=model, priority=priority), graph))
    return requests


def models_of(rank: int) -> tuple[str, ...]:
    """Both models on two ranks, one on the others."""
    return ("m", "n") if rank < 2 else ("m",)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12)
@given(seed=SEEDS, num_ranks=st.integers(2, 6), num_requests=st.integers(1, 9))
def test_every_request_completes_and_no_rule_is_broken(
    name: str, seed: int, num_ranks: int, num_requests: int
) -> None:
    cluster = Cluster(POLICIES[name](), num_ranks, seed, resident=models_of)
    cluster.run(varied_requests(seed, num_requests))
    assert {type(ending) for endings in cluster.endings.values() for ending in endings} == {cmd.CompleteRequest}
    assert cluster.reports == []


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8)
@given(seed=SEEDS, num_ranks=st.integers(4, 6), num_requests=st.integers(1, 9))
def test_ranks_and_requests_that_vanish_break_nothing(
    name: str, seed: int, num_ranks: int, num_requests: int
) -> None:
    cluster = Cluster(POLICIES[name](), num_ranks, seed, faults=FAULTS)
    cluster.run(random_requests(random.Random(seed), num_requests))
    assert not [report for report in cluster.reports if "broke a rule" in report or "failed in schedule" in report]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("candidates", [SP_1_2_4, CFG_2, TWO_AT_LEAST])
@pytest.mark.parametrize("deadline_s", [None, 0.5, 1000.0])
def test_an_idle_machine_with_one_request_never_waits(
    name: str, candidates: tuple[ParallelSpec, ...], deadline_s: float | None
) -> None:
    request, graph = make_request("a", candidates=candidates)
    run = simulate(POLICIES[name](), 4, [(replace(request, deadline_s=deadline_s), graph)])
    ends_s = 0.0
    for span in run.spans:
        assert span.start_s == ends_s
        ends_s = span.finish_s


def deadline(name: str, deadline_s: float, *, num_steps: int = 4) -> Arrival:
    request, graph = make_request(name, num_steps=num_steps)
    return replace(request, deadline_s=deadline_s), graph


def test_static_runs_one_request_at_a_time_on_the_full_machine() -> None:
    run = simulate(Static(), 4, [make_request("a"), make_request("b")])
    assert set(run.sizes("a") + run.sizes("b")) == {4}
    assert min(span.start_s for span in run.spans if span.request_id == "b") == run.finish_s["a"]


def test_srtf_lets_a_short_request_overtake_at_a_step() -> None:
    run = simulate(Srtf(), 1, [make_request("long", num_steps=9), make_request("short", arrival_s=2.5)])
    assert run.finish_s["short"] < run.finish_s["long"]
    assert simulate(Fcfs(), 1, [make_request("long", num_steps=9), make_request("short", arrival_s=2.5)]).finish_s[
        "short"
    ] == max(run.finish_s.values())


def test_edf_serves_the_earlier_deadline_first_and_only_as_wide_as_needed() -> None:
    run = simulate(Edf(), 1, [deadline("loose", 90.0), deadline("tight", 20.0)])
    assert run.finish_s["tight"] < run.finish_s["loose"]
    assert set(simulate(Edf(), 4, [deadline("a", 1000.0)]).sizes("a")) == {1}
    assert max(simulate(Edf(), 4, [deadline("a", 2.5)]).sizes("a")) == 4


def test_the_more_urgent_priority_goes_first() -> None:
    for policy in (Edf(), Srtf(), TetriServe()):
        (first, graph), (second, other) = deadline("a", 2000.0), deadline("b", 3000.0)
        run = simulate(policy, 1, [(first, graph), (replace(second, priority=1), other)])
        assert run.finish_s["b"] < run.finish_s["a"], policy.name
