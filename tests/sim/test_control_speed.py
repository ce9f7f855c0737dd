"""The benchmark of the control plane: small, and only that it measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gfdit.cli import main as cli
from gfdit.core import Decision, SchedulerView
from gfdit.core.cost.table import TableCostModel
from gfdit.policies.fcfs import Fcfs
from gfdit.sim.control_speed import SteadyState, simulated_tasks_per_s
from gfdit.sim.request_classes import request_classes
from tests.sim.tables import line, table

SMALL = "bench control --requests 3 --repeats 1 --ranks 8 --in-flight 12 --tasks 300"


class Count(Fcfs):
    """Counts decisions, and requests alive at each."""

    alive: list[int]

    def schedule(self, view: SchedulerView) -> Decision:
        self.alive = [*getattr(self, "alive", []), len(view.requests)]
        return super().schedule(view)


class Stop(Fcfs):
    def schedule(self, view: SchedulerView) -> Decision:
        return super().schedule(view) if view.now_s < 3 else Decision()


def test_as_many_requests_are_in_flight_as_asked_for() -> None:
    policy = Count(1)
    classes = request_classes(TableCostModel(table()), num_steps=5)
    state = SteadyState(policy, table(), classes, num_ranks=4, in_flight=9)
    load = state.measure(200, warm_up=50)
    assert set(policy.alive[30:]) == {8, 9}  # 8 between the end of one and the arrival of the next
    assert load.num_tasks == 200 and 200 <= len(load.decisions_s) == len(load.latencies_s) < len(policy.alive)
    # Four ranks are never idle: what the tasks took is what there was.
    assert load.mean_task_s * 200 == pytest.approx(4 * load.simulated_s, rel=0.05)
    assert sum(load.decisions_s) > 0 and load.control_s > 0


def test_a_policy_that_makes_mistakes_is_not_measured() -> None:
    with pytest.raises(ValueError, match="policy 'fcfs': policy 'fcfs' left every rank idle"):
        simulated_tasks_per_s(Stop(1), table(), [line("a", num_steps=5)], 1)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    arguments = [*SMALL.split(), "--policy", "fcfs", "--policy-arg", "group_size=2", "--policy", "equipartition"]
    assert cli.main([*arguments, "--json", str(out), "--out", str(tmp_path / "results")]) == 0
    shown = capsys.readouterr().out.splitlines()
    *rows, machine = shown[1:]
    assert [row.split("  ")[0] for row in rows] == ["fcfs group_size=2", "equipartition"]
    report = json.loads(out.read_text())
    assert machine == f"this machine: {report['additions_per_s'] / 1e6:.1f} million additions a second in Python"
    for row in report["policies"]:
        assert row["per_addition"] == pytest.approx(1e6 * row["tasks_per_s"] / report["additions_per_s"])
        assert row["tasks_per_s"] > 0 and row["decision_p50_s"] <= row["decision_p99_s"]
        assert row["growth"] == pytest.approx(10 * row["tasks_per_s"] / row["tasks_per_s_long"])
        assert min(row["control_share"], row["policy_share"], row["simulated_s"]) > 0
    dated = sorted(path.suffix for path in (tmp_path / "results").iterdir())
    assert dated == [".json", ".md"]
    (markdown,) = (tmp_path / "results").glob("control_*.md")
    assert report["commit"] in markdown.read_text() and "requests in flight" in markdown.read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--ranks 0", "--ranks must be at least 1, got 0"),
        ("--in-flight -1", "--in-flight must be at least 1, got -1"),
        ("--policy fifo", "unknown policy 'fifo', known: "),
    ],
)
def test_mistakes(arguments: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL.split(), *arguments.split()]) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
