"""`gfdit workload` and `gfdit sim`: files, output, exit status, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gfdit.cli import main as cli
from gfdit.observe.timeline import MIGRATE, read_timeline
from gfdit.sim.trace import read_trace, write_trace
from tests.sim.tables import line, table

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a cost table ``c.json`` and a trace ``t.jsonl``."""
    monkeypatch.chdir(tmp_path)
    table().save("c.json")
    write_trace("t.jsonl", [line("a", deadline_s=6.0), line("b", 0.5, deadline_s=6.0), line("c", 1.0)])
    return tmp_path


def sim(*args: str, policy: str = "fcfs") -> int:
    return cli.main(["sim", "--trace", "t.jsonl", "--costs", "c.json", "--ranks", "2", "--policy", policy, *args])


def error_of(capsys: pytest.CaptureFixture[str], call: Callable[[], int]) -> str:
    assert call() == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_workload_simulated(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "short --costs wan2.2-synthetic --ranks 4 --load 1.1 --seed 2 --out w.jsonl"
    assert cli.main(["workload", *arguments.split()]) == 0
    trace = read_trace("w.jsonl")
    assert f"{len(trace)} requests in 600 s" in capsys.readouterr().out
    arguments = "--trace w.jsonl --costs wan2.2-synthetic --ranks 4 --policy equipartition --policy-arg max_sp=2"
    assert cli.main(["sim", *arguments.split(), "--json", "new/r.json", "--timeline", "l.json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in out] == ["class", "L", "M", "S", "all", "policy"]
    result = json.loads(Path("new/r.json").read_text())
    assert result["num_requests"] == result["num_completed"] == len(trace)
    spans = read_timeline("l.json")
    assert {span.sp for span in spans if span.kind == "denoise"} == {1, 2}
    assert len({(s.task, s.ranks) for s in spans if s.kind == MIGRATE}) == result["migrations"] > 0
    # Again from the timeline alone.
    tasks = [span for span in spans if span.kind != MIGRATE]
    window_s = max(span.end_s for span in tasks) - min(span.start_s for span in tasks)
    busy = sum(span.duration_s for span in tasks) / (window_s * RANKS)
    assert busy == pytest.approx(result["rank_busy_ratio"], rel=1e-4)
    # Attainment, again from the trace and the finish times alone.
    finish_s = {request["id"]: request["finish_s"] for request in result["requests"]}
    met = [finish_s[r.id] - r.arrival_s <= r.deadline_s for r in trace if r.deadline_s is not None]
    assert result["slo_attainment"] == pytest.approx(sum(met) / len(trace))


@pytest.mark.parametrize("command", ["sim", "sweep", "plan"])
def test_a_request_far_outside_of_the_costs_is_warned_about(
    here: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {
        "sim": ["--ranks", "2"],
        "sweep": ["--ranks", "2"],
        "plan": ["--max-ranks", "2", "--attainment", "0.5"],
    }
    arguments = ["--trace", "t.jsonl", "--costs", "c.json", "--policy", "fcfs", *more[command]]
    assert cli.main([command, *arguments]) == 0
    assert "warning" not in capsys.readouterr().err
    write_trace("t.jsonl", [line("a"), replace(line("far", 1.0), height=8192, width=8192)])
    cli.main([command, *arguments])
    assert "request far is 8192x8192" in capsys.readouterr().err


def test_grace(here: Path) -> None:
    assert sim("--json", "r.json", "--grace-s", "20") == 0
    result = json.loads(Path("r.json").read_text())
    assert result["slo_attainment"] < result["slo_attainment_grace"] or result["slo_attainment"] == 1


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed(here: Path) -> None:
    commands = [
        "workload five-phase --costs wan2.2-synthetic --ranks 4 --load 0.3 --seed 7 --steps 10 --out w.jsonl",
        "sim --trace w.jsonl --costs wan2.2-synthetic --ranks 4 --policy random-layout --jitter 0.05 --seed 3 "
        "--json r.json --timeline l.json",
    ]
    code = "import sys; from gfdit.cli.main import main; sys.exit(max(main(a.split()) for a in sys.argv[1:]))"
    outputs = []
    for hash_seed in ("1", "2"):
        folder = here / hash_seed
        folder.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code, *commands], cwd=folder, env=environment, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        outputs.append({"stdout": done.stdout, **files})
    assert len(outputs[0]) == 4 and outputs[0] == outputs[1]


def test_requests_that_lose_a_rank_go_on_and_may_be_late(here: Path) -> None:
    attainment = []
    for failure in ([], ["--fail-rank", "1@1.5+1"]):
        assert sim(*failure, "--json", "r.json") == 0
        result = json.loads(Path("r.json").read_text())
        assert result["num_completed"] == result["num_requests"] == 3
        attainment.append(result["slo_attainment"])
    assert attainment == [1.0, pytest.approx(2 / 3)]


def test_a_policy_that_decides_nothing_is_named_and_the_result_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.py").write_text(
        "from gfdit.core import Decision\nfrom gfdit.policies.fcfs import Fcfs\n"
        "class Lazy(Fcfs):\n    name = 'lazy'\n    def schedule(self, view):\n"
        "        return super().schedule(view) if view.now_s < 0.4 else Decision()\n"
    )
    error = error_of(capsys, lambda: sim("--json", "r.json", policy="p.py:Lazy"))
    assert "the first: policy 'lazy' left every rank idle with" in error and "first come, first served" in error
    assert json.loads(Path("r.json").read_text())["num_completed"] == 3


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return None", "policy 'bad' must return a Decision, got NoneType"),
        ("return 1 / 0", "p.py:4: ZeroDivisionError"),
        (
            "return Decision((Dispatch((view.ready[0].id,), ExecutionLayout((0, 1))),))",
            "sp x cfg must equal the number of ranks, got 1 x 1 on 2",
        ),
    ],
)
def test_a_policy_that_returns_nonsense(
    here: Path, body: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.py").write_text(
        "from gfdit.core import Decision, Dispatch, ExecutionLayout\n"
        f"class Bad:\n    name = 'bad'\n    def schedule(self, view): {body}\n"
    )
    error = error_of(capsys, lambda: sim(policy="p.py:Bad"))
    assert "faults of the policy: " in error and told in error.replace("failed in schedule at ", "")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["--ranks", "0"], "number of ranks must be at least 1, got 0"),
        (["--policy", "fifo"], "unknown policy 'fifo', known: "),
        (["--policy", "nowhere.py:P"], "policy file nowhere.py does not exist"),
        (["--policy", "syntax.py:P"], "policy file syntax.py, line 2: expected ':'"),
        (["--policy", "empty.py:P"], "policy file empty.py has no class 'P', it defines: none"),
        (["--policy", "idle.py:P"], "policy file idle.py, line 1: class P has no method schedule(self, view)"),
        (["--policy-arg", "width=2"], "policy fcfs has no argument 'width', known: group_size (int)"),
        (["--policy-arg", "group_size"], "--policy-arg takes KEY=VALUE"),
        (["--trace", "no.jsonl"], "no.jsonl"),
        (["--trace", "bad.jsonl"], "bad.jsonl, line 2: field 'arrival_s' must be a non-negative number, got -1"),
        (["--trace", "empty.jsonl"], "empty.jsonl: the trace has no requests"),
        (["--trace", "other.jsonl"], "request 'x': no cost for model 'flux', known: m"),
        (["--trace", "unsorted.jsonl"], "unsorted.jsonl, line 2: field 'arrival_s' is 1.0, before the line above"),
        (["--trace", "."], "Is a directory: '.'"),
        (["--costs", "wide.json", "--ranks", "3"], "the cost table runs 'm' on 4 ranks or more, there are 3"),
        (["--costs", "no.json"], "cost table no.json does not exist"),
        (["--costs", "t.jsonl"], "t.jsonl: not JSON"),
        (["--grace-s", "-1"], "--grace-s must be a non-negative number, got -1"),
        (["--jitter", "-1"], "jitter must be a non-negative number, got -1"),
        (["--rank", "2"], "unrecognized: --rank 2; allowed: --help, --trace"),
        (["--memory", "80,40"], "a device's memory must be GIB,WEIGHTS_GIB,MIB_PER_TOKEN, got '80,40'"),
        (["--memory", "80,90,1"], "weights of 90.0 GiB do not fit into 80.0 GiB"),
        (["--fail-rank", "2@1"], "there is no rank 2, ranks: 0 to 1"),
        (["--fail-rank", "1@soon"], "a rank failure must be RANK@TIME_S or RANK@TIME_S+DOWN_S"),
        (["--link-gbps", "320"], "--link-gbps is of nodes: --ranks-per-node says how large they are"),
        (["--ranks-per-node", "1"], "the cost table has no exchanges of 'm'"),
        (["--ranks-per-node", "0"], "the number of ranks of a node must be at least 1, got 0"),
        (["--slow-rank", "1@-2"], "a slow rank must be RANK@FACTOR or RANK@FACTOR:FROM_S-TO_S"),
    ],
)
def test_mistakes(here: Path, changes: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = (here / "t.jsonl").read_text().splitlines()[0]
    Path("bad.jsonl").write_text(f"{good}\n" + good.replace('"arrival_s": 0.0', '"arrival_s": -1'))
    Path("empty.jsonl").touch()
    write_trace("other.jsonl", [line("x", model="flux")])
    write_trace("unsorted.jsonl", [line("x", 2.0), line("y", 1.0)])
    table({4: 1.0}).save("wide.json")
    Path("syntax.py").write_text("# a policy\nclass P\n")
    Path("empty.py").touch()
    Path("idle.py").write_text("class P: pass\n")
    assert told in error_of(capsys, lambda: sim("--timeline", "l.json", *changes))
    assert not Path("l.json").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["no-such"], "choose from short, foreground-burst, inflight-burst, five-phase, poisson"),
        (["short", "--ranks", "0"], "number of ranks must be at least 1, got 0"),
        (["short", "--load", "-1"], "load must be a positive number, got -1"),
        (["short", "--model", "flux"], "no cost for model 'flux', known: m"),
        (["short", "--steps", "0"], "number of steps must be at least 1, got 0"),
        (["short", "--deadline-factors", "1", "2", "0"], "deadline factors must be 3 positive numbers"),
        (["short", "--per-min", "3"], "the rate follows from the load: give one of them"),
        (["short", "--cv", "-1"], "cv must be a number from 0 to 100.0, got -1.0"),
        (["short", "--num-requests", "0"], "number of requests must be at least 1, got 0"),
        (["short", "--duration-s", "inf"], "duration must be a positive number, got inf"),
        (["short", "--slo-scale", "0"], "SLO scale must be a positive number, got 0"),
        (["tetriserve-uniform", "--deadline-factors", "1", "2", "3"], "this workload has deadlines"),
    ],
)
def test_workload_mistakes(here: Path, changes: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = changes
    argv = ["workload", name, "--costs", "c.json", "--ranks", "2", "--load", "1", "--out", "w.jsonl", *rest]
    assert told in error_of(capsys, lambda: cli.main(argv)).replace("'", "").replace("model flux", "model 'flux'")
    assert not Path("w.jsonl").exists()


@pytest.mark.thorough
def test_the_commands_in_the_documentation_run(here: Path) -> None:
    text = (ROOT / "docs" / "simulator.md").read_text()
    blocks = re.findall(r"```\n(gfdit .*?)```", text, flags=re.DOTALL)
    commands = [shlex.split(command) for block in blocks for command in block.replace("\\\n", " ").splitlines()]
    commands = [command for command in commands if command]
    assert len(commands) >= 3
    for command in commands:
        assert command[0] == "gfdit" and cli.main(command[1:]) == 0, command
