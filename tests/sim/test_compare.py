"""Several policies at once: the same numbers as alone, in order, whatever the number of processes."""

from __future__ import annotations

import builtins
import csv
import io
import json
import math
import os
import re
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gfdit.cli import main as cli
from gfdit.core.policy.loading import DEFAULT_POLICY
from gfdit.sim import compare
from gfdit.sim.bounds.possible import KNOWN, ROLLING, UPPER
from gfdit.sim.compare import Job, PolicyChoice, in_processes, simulate
from gfdit.sim.estimates import estimate
from gfdit.sim.simulator import SimulationOptions
from gfdit.sim.sweep import BOUND, Grid, Point, num_cases, run_sweep
from gfdit.sim.trace import write_trace
from tests.sim.tables import line, table

ROOT = Path(__file__).resolve().parents[2]
JOBS = {"sim": ["--jobs", "1"], "sweep": ["--jobs", "1"]}
STARVES = (
    "from gfdit.core import Decision\n"
    "class Lazy:\n    name = 'lazy'\n    def schedule(self, view): return Decision()\n"
)


def grid(**changes: object) -> Grid:
    options: dict[str, object] = {
        "table": table(),
        "policies": (PolicyChoice("fcfs"), PolicyChoice("fcfs", (("group_size", "2"),), name="wide")),
        "workloads": ("short",),
        "loads": (0.5, 1.5),
        "seeds": (0, 1),
        "options": SimulationOptions(2),
        "num_steps": 20,
        "bound": True,
    }
    return Grid(**(options | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sweep_json() -> str:
    return json.dumps(run_sweep(grid()).as_json())


def process_of(index: int) -> tuple[int, int]:
    return index, os.getpid()


def fail_on_two(index: int) -> int:
    if index == 2:
        raise ValueError("two is wrong")
    return index


def test_items_keep_their_order_in_other_processes() -> None:
    done = []
    found = in_processes(process_of, range(8), num_processes=2, on_done=lambda: done.append(threading.get_ident()))
    assert [index for index, _ in found] == list(range(8))
    assert os.getpid() not in {process for _, process in found}
    assert done == [threading.get_ident()] * 8
    assert {process for _, process in in_processes(process_of, range(3), num_processes=1)} == {os.getpid()}


def test_an_error_in_a_process_is_the_callers() -> None:
    for num_processes in (1, 2):
        with pytest.raises(ValueError, match="two is wrong"):
            in_processes(fail_on_two, range(6), num_processes=num_processes)


def test_a_sweep_is_the_same_in_any_number_of_processes() -> None:
    one, two = (run_sweep(grid(loads=(1.5,)), num_processes=number).as_json() for number in (1, 2))
    assert json.dumps(one) == json.dumps(two)


def test_a_sweep_has_every_combination_with_the_numbers_of_single_runs(sweep_json: str) -> None:
    data = json.loads(sweep_json)
    assert len(data["cells"]) == num_cases(grid()) == 2 * 2 * 5
    assert {cell["policy"] for cell in data["cells"]} == {"fcfs", "wide", UPPER, KNOWN, ROLLING}
    cell = next(c for c in data["cells"] if (c["load"], c["seed"], c["policy"]) == (1.5, 1, "wide"))
    trace = grid().trace(Point("short", 1.5), 1)
    alone = simulate(Job(grid().policies[1], trace, table(), SimulationOptions(2))).result
    assert cell["slo_attainment"] == alone["slo_attainment"] and cell["p95_latency_s"] == alone["p95_latency_s"]
    assert len(cell["latencies_s"]) == alone["num_completed"] == len(trace)
    for point in data["points"]:
        values = [
            cell["slo_attainment"]
            for cell in data["cells"]
            if (cell["load"], cell["policy"]) == (point["load"], point["policy"])
        ]
        assert point["slo_attainment"]["mean"] == pytest.approx(statistics.fmean(values))


def test_the_bound_is_above_the_policies() -> None:
    sweep = run_sweep(grid())
    for point in sweep.points:
        for policy in ("fcfs", "wide"):
            assert sweep.difference(point, BOUND, policy, "slo_attainment").mean >= 0
        assert sweep.difference(point, UPPER, KNOWN, "slo_attainment").mean >= 0
        assert sweep.difference(point, UPPER, ROLLING, "slo_attainment").mean >= 0
        assert min(sweep.mean(point, side, "slo_attainment") for side in (KNOWN, ROLLING)) > 0


def test_slo_scale_multiplies_the_deadlines() -> None:
    plain, scaled = (grid().trace(Point("short", 0.5, slo_scale=scale), 0) for scale in (1.0, 2.0))
    assert [r.deadline_s for r in scaled] == [pytest.approx(2 * (r.deadline_s or 0)) for r in plain]
    assert [r.arrival_s for r in scaled] == [r.arrival_s for r in plain]


def test_what_varies_most_is_the_axis() -> None:
    sweep = run_sweep(grid(bound=False, seeds=(0,)))
    assert sweep.axis == "load" and list(map(str, sweep.groups())) == ["short"]
    scales = run_sweep(grid(bound=False, seeds=(0,), loads=(0.5,), slo_scales=(1.0, 1.5)))
    assert scales.axis == "slo_scale"
    assert {str(common): list(map(str, points)) for common, points in scales.groups().items()} == {
        "short, load 0.5": ["short, load 0.5", "short, load 0.5, SLO scale 1.5"]
    }


def test_intervals() -> None:
    # Student's t for 4 degrees of freedom at 97.5 %: 2.776.
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.ci95 == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-5)
    assert estimate([7.0]).ci95 is None and estimate([7.0]).low == 7.0


def test_paired_differences_do_not_see_what_both_suffer() -> None:
    sweep = run_sweep(grid(bound=False, seeds=tuple(range(4))))
    point = Point("short", 1.5)
    values = [sweep.values(point, name, "mean_latency_s") for name in ("wide", "fcfs")]
    assert sweep.difference(point, "wide", "fcfs", "mean_latency_s") == estimate(
        [a - b for a, b in zip(*values, strict=True)]
    )
    assert sweep.values(point, "fcfs", "per_class.S.num_requests")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"workloads": ("long",)}, "unknown workload 'long', known: short"),
        ({"policies": (PolicyChoice("fcfs"),) * 2}, "policy 'fcfs' is there twice"),
        ({"options": SimulationOptions(2, jitter=0.1)}, "no upper bound with jitter"),
    ],
)
def test_impossible_grids(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        grid(**changes)


# The commands


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    table().save("c.json")
    Path("lazy.py").write_text(STARVES)
    write_trace("t.jsonl", [line("a", deadline_s=6.0), line("b", 0.5, deadline_s=6.0), line("c", 1.0)])
    return tmp_path


SIM = ("sim", "--trace", "t.jsonl", "--costs", "c.json", "--ranks", "2", "--jobs", "1")


def sim(*args: str) -> int:
    return cli.main([*SIM, *args])


def sweep(*args: str) -> int:
    own = ["--workload", "short", "--load", "0.5,1", "--steps", "20", "--seeds", "2"]
    return cli.main(["sweep", "--costs", "c.json", "--ranks", "2", "--jobs", "1", *own, *args])


def error_of(capsys: pytest.CaptureFixture[str], call: Callable[[], int]) -> str:
    assert call() == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


WIDE = ("--policy", "fcfs", "--policy-arg", "group_size=2")


def test_sim_compares_policies(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = f"{ROOT / 'examples' / '02_write_a_policy.py'}:OldestWidest"
    policies = (*WIDE, "--policy", "fcfs", "--policy", example)
    assert sim(*policies, "--json", "r.json", "--bound", "--grace-s", "1") == 0
    out = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[0] for row in out[1:4]] == ["fcfs group_size=2", "fcfs", example]
    assert out[4].startswith("no schedule exceeds ") and out[5].startswith("one that knows the future meets ")
    results = json.loads(Path("r.json").read_text())["results"]
    assert sim("--policy", "fcfs", "--json", "one.json", "--grace-s", "1") == 0
    one = json.loads(Path("one.json").read_text())
    assert {key: results["fcfs"][key] for key in one} == one
    assert out[6].startswith("one planned anew at each arrival meets ")
    bound, known, rolling = (results["fcfs"][key] for key in ("upper_bound", "best_known", "rolling"))
    assert bound["slo_attainment"] >= max(known["slo_attainment"], rolling["slo_attainment"])
    assert min(known["slo_attainment"], rolling["slo_attainment"]) > 0
    assert 1.0 >= bound["slo_attainment_grace"] >= bound["slo_attainment"] >= one["slo_attainment"]


def test_admission_is_of_the_policy_before_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace("t.jsonl", [line(f"r{i}", deadline_s=6.0) for i in range(6)])
    assert sim("--policy", "fcfs", "--policy", "fcfs", "--admission", "deadline", "--json", "r.json") == 0
    results = json.loads(Path("r.json").read_text())["results"]
    assert {name: result["num_rejected"] for name, result in results.items()} == {
        "fcfs": 0,
        "fcfs admission=deadline": 4,
    }
    assert sim("--admission", "deadline", "--policy", "fcfs", "--json", "one.json") == 0
    assert json.loads(Path("one.json").read_text()) == results["fcfs admission=deadline"]
    told = error_of(capsys, lambda: sim("--policy", "fcfs", "--admission", "all"))
    assert "--admission: invalid choice: 'all'" in told and "deadline" in told


def test_what_is_simulated_besides(here: Path) -> None:
    for name, options in (
        ("plain", []),
        ("slow", ["--slow-rank", "0@4"]),
        ("failing", ["--fail-rank", "1@0.6+100"]),
        ("late", ["--dispatch-latency-s", "0.5"]),
        ("ahead", ["--dispatch-latency-s", "0.5", "--run-ahead", "1"]),
    ):
        cli.main([*SIM, "--policy", "fcfs", "--json", f"{name}.json", *options])
    results = {path.stem: json.loads(path.read_text()) for path in here.glob("*.json") if path.stem != "c"}
    means_s = {name: result["mean_latency_s"] for name, result in results.items()}
    assert means_s["plain"] < means_s["ahead"] < means_s["late"] and means_s["plain"] < means_s["slow"]
    assert results["failing"]["num_completed"] < 3 or means_s["failing"] > means_s["plain"]


def test_an_argument_belongs_to_the_policy_before_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("--policy-arg", "group_size=2", "--policy", "fcfs", "--json", "a.json") == 0
    assert sim(*WIDE, "--json", "b.json") == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    told = "--policy-arg group_size=2 belongs after the --policy it is for"
    assert told in error_of(
        capsys, lambda: sim("--policy-arg", "group_size=2", "--policy", "fcfs", "--policy", "equipartition")
    )


def test_without_a_policy_it_is_the_default(here: Path) -> None:
    assert sim("--json", "a.json") == sim("--policy-arg", "reserve=0.5", "--json", "b.json") == 0
    for name in ("a.json", "b.json"):
        assert json.loads(Path(name).read_text())["policy"] == DEFAULT_POLICY


def test_what_a_policy_does_wrong_is_told_with_the_others_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = error_of(capsys, lambda: sim("--policy", "fcfs", "--policy", "lazy.py:Lazy", "--json", "r.json"))
    assert "the first: policy 'lazy' left every rank idle" in told
    results = json.loads(Path("r.json").read_text())["results"]
    assert results["fcfs"]["num_completed"] == 3 and results["lazy.py:Lazy"]["num_completed"] == 3
    told = error_of(capsys, lambda: sweep("--policy", "lazy.py:Lazy", "--json", "s.json"))
    assert "short, load 0.5, seed 0: lazy.py:Lazy: faults of the policy" in told and "(and 3 more runs)" in told
    assert json.loads(Path("s.json").read_text())["points"]


def test_sweep_prints_means_and_draws(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plots = ("--plots", "p", "--lanes", "short, load 1")
    assert sweep(*WIDE, "--policy", "equipartition", "--bound", "--json", "s.json", *plots) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["load", "0.5", "1"] and out[2].startswith("fcfs group_size=2 ")
    points = json.loads(Path("s.json").read_text())["points"]
    mean = next(p for p in points if (p["policy"], p["load"]) == ("equipartition", 1.0))["slo_attainment_grace"]
    assert f"{100 * mean['mean']:.1f}" in out[3]
    assert sorted(path.name for path in Path("p").iterdir()) == ["attainment.png", "lanes.png", "latency.png"]


@pytest.mark.parametrize(
    ("call", "args", "told"),
    [
        (sim, ["--policy", "fcfs", "--policy", "fcfs"], "--policy fcfs is there twice"),
        (sim, [*WIDE, "--policy", "fcfs", "--timeline", "l.json"], "--timeline is of a single --policy"),
        (sim, ["--policy", "fcfs", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (sim, ["--policy", "fcfs", "--bound", "--jitter", "0.1"], "there is no upper bound with jitter"),
        (
            sim,
            ["--policy", "fcfs", "--bound", "--slow-rank", "0@0.5"],
            "no upper bound with ranks that are faster",
        ),
        (sim, ["--policy", "fcfs", "--slow-rank", "0@"], "a slow rank must be RANK@FACTOR or"),
        (sim, ["--policy", "fcfs", "--fail-rank", "7@1"], "rank 7"),
        (sim, ["--policy", "fcfs", "--run-ahead", "2"], "--run-ahead: invalid choice: 2"),
        (sim, ["--policy", "fcfs", "--policy", "no-such"], "unknown policy 'no-such', known: "),
        (sweep, ["--policy", "fcfs", "--load", "0.5;1"], "--load takes numbers with commas"),
        (sweep, ["--policy", "fcfs", "--load", "-1"], "load must be a positive number, got -1"),
        (sweep, ["--policy", "fcfs", "--workload", "long"], "unknown workload 'long', known: short"),
        (sweep, ["--policy", "fcfs", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (sweep, ["--policy", "fcfs", "--slo-scale", "0"], "SLO scale must be a positive number"),
        (sweep, ["--policy", "fcfs", "--per-min", "3"], "the rate follows from the load: give one of them"),
        (sweep, ["--policy", "fcfs", "--lanes", "short, load 1"], "--lanes needs --plots DIR"),
        (
            sweep,
            ["--policy", "fcfs", "--plots", "p", "--lanes", "short, load 3"],
            "--lanes 'short, load 3' is not in this sweep, which has: short, load 0.5; short, load 1",
        ),
    ],
)
def test_mistakes(
    here: Path, call: Callable[..., int], args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in error_of(capsys, lambda: call(*args))
    assert not Path("p").exists()


@pytest.mark.thorough
def test_the_commands_in_the_documentation_run(here: Path) -> None:
    text = (ROOT / "docs" / "comparing.md").read_text()
    blocks = re.findall(r"```\n(gfdit .*?)```", text, flags=re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [command for command in commands if command[1] != "bench"]  # of servers that run
    assert [command[1] for command in commands] == ["workload", "sim", "sweep"]
    for command in commands:
        assert command[0] == "gfdit" and cli.main([*command[1:], *JOBS.get(command[1], [])]) == 0, command
    assert Path("runs.png").exists() and (here / "plots" / "lanes.png").exists()


LOOPS = """
from gfdit.core import Decision
class Loops:
    name = 'loops'
    def schedule(self, view):
        for _ in range(2 if view.ready else 0):
            WAIT()
        return Decision()
"""


def test_a_policy_that_does_not_answer_is_told_of(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on once that has been said."""
    monkeypatch.setattr(compare, "HANG_S", 0.05)
    heard = io.StringIO()  # a thread writes to it: what is captured may be taken away while that does
    monkeypatch.setattr(sys, "stderr", heard)

    def wait_until_told() -> None:
        while not heard.getvalue().endswith("\n"):
            time.sleep(0.01)

    monkeypatch.setattr(builtins, "WAIT", wait_until_told, raising=False)
    Path("loops.py").write_text(LOOPS)
    sim("--policy", "loops.py:Loops")
    said = heard.getvalue().splitlines()
    assert said[0].startswith(
        "policy 'loops.py:Loops' has not answered for 0.05 s, at 0.000 s of the trace; it is at"
    )
    assert said[0].endswith("loops.py:7")


def test_an_interrupted_command_ends_in_a_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "WAIT", interrupted, raising=False)
    Path("loops.py").write_text(LOOPS)
    assert sim("--policy", "loops.py:Loops") == cli.INTERRUPTED
    assert capsys.readouterr().err == "gfdit sim: interrupted\n"


def test_a_sweep_over_ranks_traces_and_admission(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["sweep", "--costs", "c.json", "--ranks", "1,2", "--jobs", "1", "--trace", "t.jsonl"]
    shown = ["--show", "in-time,p99-s", "--per-class", "--csv", "s.csv"]
    assert cli.main([*asked, *shown, "--policy", "fcfs", "--admission", "both", "--bound"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "t.jsonl: requests in time, %, mean over seeds and 95 % interval"
    assert out[1].split() == ["num_ranks", "1", "2"]
    assert [row.split("  ")[0] for row in out[2:7]] == ["fcfs", "fcfs admission=deadline", UPPER, KNOWN, ROLLING]
    rows = list(csv.DictReader(Path("s.csv").read_text().splitlines()))
    assert [(row["num_ranks"], row["policy"]) for row in rows[:2]] == [
        ("1", "fcfs"),
        ("1", "fcfs admission=deadline"),
    ]
    assert float(rows[0]["slo_attainment"]) <= float(rows[4]["slo_attainment"]) and rows[0]["num_seeds"] == "1"
    told = error_of(capsys, lambda: cli.main([*asked, "--load", "1"]))
    assert "--load is of --workload; a trace has its own" in told
    assert "--ranks takes positive whole numbers" in error_of(capsys, lambda: sweep("--ranks", "2;4"))
    assert "--show 'p98' is unknown, known: in-time" in error_of(capsys, lambda: sweep("--show", "p98"))


def test_an_interval_ends_where_shares_do() -> None:
    found = estimate([1.0, 1.0, 0.9], least=0, most=1)
    assert found.ci95 is not None and found.mean + found.ci95 > 1 == found.high
    assert found.shown(100) == f"96.7 ({100 * found.low:.1f} to 100.0)"
    assert estimate([0.5, 0.6], least=0, most=1).shown(100, 0) == "55 (0 to 100)"
    assert estimate([0.5, 0.51, 0.52], least=0, most=1).shown() == "0.5 ± 0.0"


def test_a_size_that_costs_say_little_of_is_told_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("--policy", "fcfs") == 0
    assert not capsys.readouterr().err
    write_trace(
        "t.jsonl", [line("a"), replace(line("b"), height=4800, width=8320), replace(line("c"), height=9600)]
    )
    assert sim("--policy", "fcfs") == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("gfdit sim: warning: request b is 4800x8320, the costs of ") and "(and 1 more)" in told
