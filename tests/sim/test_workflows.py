"""Workflows in the simulator: streams, residency, loads that fail, ranks that are lost."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gfdit.cli.main import USAGE_ERROR, main
from gfdit.core import Decision, Dispatch, ExecutionLayout, SchedulerView
from gfdit.core.components import Component, Load
from gfdit.core.policy.loading import load_policy
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.lego import Lego
from gfdit.policies.triage import Triage
from gfdit.sim.rank_faults import RankFailure
from gfdit.sim.simulator import Status
from gfdit.sim.trace import read_trace, write_trace
from gfdit.sim.workflow_mixes import mix_of
from gfdit.sim.workflow_source import WorkflowSource
from tests.sim.pools import BASE, COMPONENTS, GIB, NET_S, NETS, STEP_S, TEXT, VAE, line, simulate

PINNED = tuple(Component(one.name, one.num_bytes, one.load_s, pinned=True) for one in COMPONENTS)
BEFORE_S, AFTER_S = 0.03, 0.05  # text, decoding


def alone_s(num_nets: int, num_ranks: int) -> float:
    run = simulate(Lego(adaptive=False), [line(0, 0.0, num_nets)], num_ranks, components=PINNED)
    (request,) = run.requests
    assert not run.faults
    assert request.latency_s is not None
    return request.latency_s


def test_a_net_runs_beside_the_base_model_and_hides_behind_it() -> None:
    in_sequence = BEFORE_S + 4 * (STEP_S + NET_S) + AFTER_S
    assert alone_s(1, 1) == pytest.approx(in_sequence, abs=0.01)
    hidden = BEFORE_S + 4 * STEP_S + AFTER_S
    assert alone_s(1, 2) == pytest.approx(hidden, abs=0.01)
    assert alone_s(2, 3) == pytest.approx(hidden, abs=0.01)


def test_what_is_slower_than_the_base_model_holds_it_up() -> None:
    assert alone_s(2, 2) == pytest.approx(BEFORE_S + 4 * (STEP_S + NET_S) + AFTER_S, abs=0.01)


def test_with_one_rank_a_reader_waits_for_the_whole_of_what_it_would_have_streamed() -> None:
    run = simulate(Lego(), [line(0, 0.0, 2)], 1)
    assert [request.status for request in run.requests] == [Status.COMPLETED]
    assert run.num_loads == 5
    assert run.num_migrations == 0


@pytest.mark.parametrize("policy", [Lego, Triage, Fcfs])
def test_components_come_and_go_in_little_memory(policy: type) -> None:
    """Six GiB hold the base model and one or two others, never all."""
    draw = random.Random(1)
    trace = [line(number, number * 0.3, draw.randrange(3)) for number in range(40)]
    run = simulate(policy(), trace, 3, component_bytes=6 * GIB)
    assert {request.status for request in run.requests} == {Status.COMPLETED}
    assert run.num_loads > len(COMPONENTS)
    assert not run.faults or policy is Fcfs


@pytest.mark.parametrize(("policy", "run_ahead"), [(Lego, 0), pytest.param(Triage, 1, marks=pytest.mark.thorough)])
def test_lost_ranks_lose_their_components_and_no_request(policy: type, run_ahead: int) -> None:
    draw = random.Random(2)
    trace = [line(number, number * 0.2, draw.randrange(3)) for number in range(60)]
    failures = tuple(RankFailure(rank, 1.0 + 2.5 * number, 1.0) for number, rank in enumerate((0, 2, 1, 3)))
    run = simulate(policy(), trace, 4, component_bytes=6 * GIB, failures=failures, run_ahead=run_ahead)
    assert {request.status for request in run.requests} == {Status.COMPLETED}
    assert not run.faults


def test_of_a_component_that_cannot_be_loaded_only_its_requests_end() -> None:
    trace = [line(number, number * 0.5, number % 2) for number in range(10)]
    run = simulate(Lego(), trace, 2, component_failures=((NETS[0], 1000),))
    for request in run.requests:
        wants_net = request.trace.model == "nets-1"
        assert request.status is (Status.LOST if wants_net else Status.COMPLETED), request
        assert ("component net-0 cannot be loaded: simulated" in request.detail) is wants_net


def test_a_load_that_fails_once_is_tried_again() -> None:
    run = simulate(Lego(), [line(0, 0.0, 1)], 2, component_failures=tuple((c.name, 2) for c in COMPONENTS))
    assert run.requests[0].status is Status.COMPLETED


def test_workflows_share_what_they_have_in_common() -> None:
    trace = [line(number, 0.0, number % 3) for number in range(3)]
    run = simulate(Lego(), trace, 1)
    assert run.num_loads == len(COMPONENTS)  # and not one for each workflow
    assert run.loaded_bytes == sum(one.num_bytes for one in COMPONENTS)


def test_what_is_pinned_stays_and_may_be_on_some_ranks_only() -> None:
    components = tuple(
        Component(
            one.name, one.num_bytes, one.load_s, pinned=one.name == TEXT, ranks=(1,) if one.name == TEXT else None
        )
        for one in COMPONENTS
    )
    trace = [line(number, number * 0.4, 1) for number in range(20)]
    run = simulate(Lego(), trace, 3, components=components, component_bytes=6 * GIB)
    assert {request.status for request in run.requests} == {Status.COMPLETED}


def test_a_component_that_never_fits_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"component base takes 4\.00 GiB, .* a rank has 3\.00 GiB"):
        simulate(Lego(), [line(0, 0.0, 0)], 1, component_bytes=3 * GIB)


@dataclass
class Loads:
    """Loads what it is told first, then leaves everything to the fallback."""

    loads: tuple[object, ...]
    name: str = "loads"
    places_components: bool = True
    told: bool = field(default=False, init=False)

    def schedule(self, view: SchedulerView) -> Decision:
        loads, self.told = (() if self.told else self.loads), True
        return Decision(loads=loads)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("load", "rule"),
    [
        ("base", "must return loads of type Load, got str"),
        (Load(0, "none"), "there is no such component, components: base, net-0, net-1, text, vae"),
        (Load(7, BASE), "rank 7 does not exist or is lost, ranks: [0, 1]"),
        (Load(0, TEXT), "it is on rank 0 already"),
        (Load(0, BASE, (NETS[0],)), "net-0 is not on rank 0 and cannot be evicted"),
        (Load(0, BASE, (TEXT,)), "text is pinned on rank 0"),
        (Load(0, BASE), f"it takes {4 * GIB} bytes, and rank 0 has {3 * GIB} left"),
        (Load(0, VAE), "it may be on ranks (1,), not on 0"),
    ],
)
def test_a_load_against_the_rules_is_told_and_not_carried_out(load: object, rule: str) -> None:
    components = tuple(
        Component(
            one.name, one.num_bytes, one.load_s, pinned=one.name == TEXT, ranks=(1,) if one.name == VAE else None
        )
        for one in COMPONENTS
    )
    components = tuple(
        one if one.name != BASE else Component(BASE, 4 * GIB, 0.8, ranks=(0, 1)) for one in components
    )
    run = simulate(Loads((load,)), [line(0, 0.0, 0)], 2, components=components, component_bytes=5 * GIB)
    assert rule in run.faults[0]


@dataclass
class WholeGroup:
    """Puts the reader of a stream on the rank that makes it: the rules do not allow that."""

    name: str = "whole-group"
    places_components: bool = True
    tried: bool = field(default=False, init=False)

    def schedule(self, view: SchedulerView) -> Decision:
        for task in view.ready:
            if task.deferred and len(view.free_ranks) < len(view.ranks):
                busy = next(rank.id for rank in view.ranks if rank.running_request)
                self.tried = True
                return Decision((Dispatch((task.id,), ExecutionLayout((busy,))),))
        return Lego().schedule(view)


def test_who_reads_a_stream_cannot_run_where_it_is_made() -> None:
    policy = WholeGroup()
    run = simulate(policy, [line(0, 0.0, 1)], 2, components=PINNED)
    assert policy.tried
    assert "is busy with request r0" in run.faults[0]
    assert run.requests[0].status is Status.COMPLETED


def test_lego_is_found_by_name() -> None:
    assert load_policy("lego", {"batching": "false"}).name == "lego"


def test_the_commands_simulate_a_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    asked = ["workload", "S6", "--ranks", "8", "--load", "0.6", "--num-requests", "25", "--out", str(trace)]
    assert main(asked) == 0
    assert "25 requests" in capsys.readouterr().out
    common = ["sim", "--workflows", "S6", "--trace", str(trace), "--ranks", "8", "--rank-gib", "72"]
    policies = ["--policy", "triage", "--policy", "lego", "--policy", "edf", "--jobs", "1"]
    assert main([*common, *policies, "--json", str(out), "--plot", str(tmp_path / "p.png")]) == 0
    results = json.loads(out.read_text())["results"]
    assert all(result["num_completed"] == 25 for result in results.values())
    assert main([*asked[:-4], "--duration-s", "30", "--out", str(trace)]) == 0
    assert all(request.arrival_s < 30 for request in read_trace(trace))


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--workflows", "S7"], "there are no workflows 'S7'; a file.py, or one of: S1, S2"),
        (["--workflows", "nowhere.py"], "nowhere.py"),
        (["--workflows", "S1"], "request r0: no workflow 'flux-dev', workflows: sd3, sd3+cn1, sd3+cn1+cn2"),
        (["--workflows", "S4", "--rank-gib", "12"], "component flux-dev takes 22.20 GiB"),
        (["--workflows", "S4", "--rank-gib", "0"], "--rank-gib must be a positive number, got 0.0"),
        (["--workflows", "S4", "--bound"], "--bound knows no workflows"),
        (["--rank-gib", "12"], "--rank-gib is for components of --workflows"),
        ([], "--costs is needed; only a mix of --workflows has costs of its own"),
    ],
)
def test_mistakes_in_workflows_are_one_line(
    argv: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(trace, mix_of("S4").trace(1, load=0.1, seed=4))
    assert read_trace(trace)[0].model == "flux-dev"
    assert main(["sim", "--trace", str(trace), "--ranks", "2", *argv]) == USAGE_ERROR
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1, said


def test_a_file_of_workflows_is_simulated_with_a_table(tmp_path: Path) -> None:
    source = WorkflowSource("S4")
    file = tmp_path / "mine.py"
    file.write_text(
        "from gfdit.sim.workflow_mixes import Variant\n"
        "from gfdit.sim.costs.workflow_costs import BASES\n"
        "mine = Variant(BASES['flux-dev'], (1,)).record()\n"
    )
    costs, trace = tmp_path / "c.json", tmp_path / "t.jsonl"
    assert source.costs is not None
    source.costs.save(costs)
    lines = [request for request in mix_of("S4").trace(9, load=0.1) if request.model == "flux-dev+cn1"]
    write_trace(trace, lines)
    argv = ["sim", "--trace", str(trace), "--ranks", "2", "--workflows", str(file), "--costs", str(costs)]
    out = tmp_path / "r.json"
    assert main([*argv, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["num_completed"] == len(lines) > 0
