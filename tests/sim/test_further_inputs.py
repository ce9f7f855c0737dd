"""A request with an input of its own, an image to edit: two encode tasks that do not need each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from pytest import approx

from gfdit.core import ParallelSpec, TaskKind, trajectory
from gfdit.core.cost.file import ArtifactSize, CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.loading import load_policy
from gfdit.core.tasks import with_encoder
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.simulator import Status
from tests.sim.runs import ends, run
from tests.sim.tables import AROUND_S, ENCODE_S, STEP_S, line, table

POLICIES = ("edf", "equipartition", "fcfs", "random-layout", "rssp", "srtf", "static", "tetriserve", "triage")


def edit_table(step_s: Mapping[int, float] = STEP_S) -> CostTable:
    sizes = [ArtifactSize("m", kind, 512, 512, 1, False, 1000) for kind in ("conditioning", "image", "latents")]
    return replace(table(step_s), migration_latency_s=0.0, artifacts=tuple(sizes))


def test_the_graph() -> None:
    graph = with_encoder(trajectory("r", 2, (ParallelSpec(1),)), "image", {TaskKind.DENOISE})
    graph.check()
    by_id = {task.id: task for task in graph.tasks}
    assert [task.id for task in graph.tasks if not task.inputs] == ["r/encode_image", "r/encode"]
    assert by_id["r/encode_image"].outputs == ("r/image",)
    assert by_id["r/denoise/1"].inputs == ("r/conditioning", "r/latents/1", "r/image")
    assert "r/image" not in by_id["r/prepare"].inputs + by_id["r/decode"].inputs


def test_the_simulator_makes_the_graph_of_a_model_whose_table_has_such_an_artifact() -> None:
    asked = line("a").request()
    assert GraphBuilder(TableCostModel(edit_table()), 2).service_s(asked) == approx(
        AROUND_S + ENCODE_S + 2 * STEP_S[1]
    )
    assert GraphBuilder(TableCostModel(table()), 2).service_s(asked) == approx(AROUND_S + 2 * STEP_S[1])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_every_policy_serves_it(name: str, run_ahead: int) -> None:
    trace = [line(f"r{i}", 0.4 * i, num_steps=3, deadline_s=20.0 if i % 2 else None) for i in range(6)]
    done = run(load_policy(name, {}, "none"), trace, num_ranks=4, costs=edit_table(), run_ahead=run_ahead)
    assert {request.status for request in done.requests} == {Status.COMPLETED} and not done.faults
    assert done.num_tasks == 6 * (2 + 1 + 3 + 1)


@pytest.mark.parametrize("name", ["edf", "tetriserve", "triage"])
def test_both_encode_tasks_run_at_once_where_ranks_are_free(name: str) -> None:
    costs = edit_table({1: 2.0})
    alone_s, at_once_s = (
        ends(run(load_policy(name, {}, "none"), [line("a")], num_ranks, costs))["a"] for num_ranks in (1, 2)
    )
    assert alone_s == approx(AROUND_S + ENCODE_S + 2 * 2.0)
    assert at_once_s == approx(AROUND_S + 2 * 2.0)
