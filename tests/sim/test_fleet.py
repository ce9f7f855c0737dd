"""Several servers under one clock, with a router in front."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gfdit.cli import main as cli
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.loading import load_policy
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.fleet import ROUTERS, Fleet, FleetOptions
from gfdit.sim.options import SimulationOptions
from gfdit.sim.results import summarize
from gfdit.sim.simulator import SimulationRun, Simulator, Status
from gfdit.sim.trace import TraceRequest, write_trace
from gfdit.sim.workloads import PATTERNS, generate, workload_classes

COSTS = "qwen-image-h20"
TABLE = load_cost_table(COSTS)
POISSON = PATTERNS["poisson"]


def trace(num_ranks: int, num_requests: int = 24) -> list[TraceRequest]:
    classes = workload_classes(POISSON, TableCostModel(TABLE), num_steps=4)
    return generate(POISSON, classes, num_ranks=num_ranks, seed=1, load=0.9, num_requests=num_requests)


def run(requests: list[TraceRequest], router: str, num_replicas: int, num_ranks: int = 2) -> SimulationRun:
    options = SimulationOptions(num_ranks, jitter=0.05, check_every_event=True)
    fleet = FleetOptions(num_replicas, router)
    return Fleet(lambda: load_policy("edf", {}, "none"), TABLE, requests, options, fleet).run()


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_of_one_is_that_server(router: str) -> None:
    requests = trace(2)
    options = SimulationOptions(2, jitter=0.05)
    alone = Simulator(load_policy("edf", {}, "none"), TABLE, requests, options).run()
    assert summarize(run(requests, router, 1)) == summarize(alone)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_served_once(router: str) -> None:
    requests = trace(6)
    done = run(requests, router, 3)
    assert [request.trace for request in done.requests] == requests
    assert all(request.status is Status.COMPLETED for request in done.requests)
    assert done.num_ranks == 6
    assert summarize(run(requests, router, 3)) == summarize(done)  # the same input, the same result


def line(name: str, arrival_s: float, side: int, deadline_s: float | None) -> TraceRequest:
    return TraceRequest(name, arrival_s, "qwen-image", side, side, 1, 10, deadline_s=deadline_s)


def test_a_router_that_knows_the_work_does_not_go_by_numbers() -> None:
    """One large image on the first server, a small one on the second: the next belongs to the second."""
    requests = [
        line("large", 0.0, 1536, None),
        line("small", 0.1, 512, None),
        line("next", 1.1, 512, None),
    ]
    ends_s = {}
    for router in ("least-connections", "deadline-aware"):
        done = {request.trace.id: request for request in run(requests, router, 2, num_ranks=1).requests}
        ends_s[router] = done["next"].end_s
        assert done["large"].end_s is not None and done["large"].end_s > 10
    assert ends_s["deadline-aware"] is not None and ends_s["least-connections"] is not None
    assert ends_s["deadline-aware"] < ends_s["least-connections"]


def test_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ({"num_replicas": 0}, {"router": "random"}, {"interval_s": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            replace(FleetOptions(2), **wrong)
    write_trace(tmp_path / "t.jsonl", trace(2, 2))
    common = ["sim", "--trace", str(tmp_path / "t.jsonl"), "--costs", COSTS, "--ranks", "2", "--policy", "edf"]
    assert cli.main([*common, "--replicas", "2", "--timeline", str(tmp_path / "t")]) == cli.USAGE_ERROR
    assert "--timeline" in capsys.readouterr().err
    assert cli.main([*common, "--router", "round-robin"]) == cli.USAGE_ERROR
    assert "--replicas" in capsys.readouterr().err


def test_from_the_command_line(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", trace(4, 6))
    found = tmp_path / "result.json"
    command = ["sim", "--trace", str(tmp_path / "t.jsonl"), "--costs", COSTS, "--ranks", "2", "--policy", "edf"]
    assert cli.main([*command, "--replicas", "2", "--router", "deadline-aware", "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert result["num_completed"] == 6 and result["ranks"] == 4
