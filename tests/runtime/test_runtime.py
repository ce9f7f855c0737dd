"""Control process, workers and messages for real, with an executor that needs no model."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import psutil
import pytest

from gfdit.comm import SharedMemoryHeap
from gfdit.core import ParallelSpec, Request, Shape, trajectory
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.commands import RunTask
from gfdit.observe.recording import RecordingReader
from gfdit.observe.snapshot import Snapshot
from gfdit.observe.traces import Fact, RequestEvent, TaskSpan, Traces
from gfdit.runtime import messages as msg
from gfdit.runtime.client import ControlClient, RuntimeDownError
from gfdit.runtime.config import RuntimeConfig, make_run_dir
from gfdit.sim.replay import replay
from tests.support.endings import Ended
from tests.support.leftovers import Leftovers, nothing_left
from tests.support.thorough import thorough
from tests.support.waiting import HANG_S, wait_until

POLICY = "gfdit.policies.layout_script:LayoutScript"
SPECS = (ParallelSpec(1), ParallelSpec(2), ParallelSpec(3), ParallelSpec(1, 2))


class Runtime:
    """A control process with three workers."""

    opened: ClassVar[list[Runtime]] = []

    def __init__(
        self,
        payload: bytes = b"",
        policy: str = POLICY,
        model: str = "m",
        comm_timeout_s: float = 5,
        executor: str = "tests.support.fake_executor",
        **config: Any,
    ) -> None:
        # Of several in this process it is not known whose a file is.
        self.left = Leftovers(own_files=not self.opened)
        run_dir = make_run_dir("gfdit-test-")
        (run_dir / "payload").write_bytes(payload)
        self.heap = SharedMemoryHeap.create(3).held_open()
        self.client = ControlClient(
            RuntimeConfig(
                run_dir=str(run_dir),
                num_ranks=3,
                model=model,
                policy=policy,
                policy_timeout_s=0.3,
                worker=f"{executor}:make_executor",
                worker_payload_path=str(run_dir / "payload"),
                start_method="forkserver",
                preload=[executor],
                heap=self.heap.to_json(),
                comm_timeout_s=comm_timeout_s,
                **config,
            )
        )
        self.num_calls = 0
        self.facts: list[Fact] = []  # with traces, what has been told of them
        self.opened.append(self)

    def wait_ready(self) -> None:
        self.client.wait_ready()
        self.left.watch(self.client.pid)

    def submit(self, name: str, script: str, payload: str = "0.001", num_steps: int = 4) -> None:
        request = Request(
            name, self.client.config.model, Shape(64, 64), num_steps, time.monotonic(), slo_class=script
        )
        self.client.send(msg.Submit(request, trajectory(name, num_steps, SPECS), payload.encode()))

    def until_running(self) -> None:
        """Some request has begun."""
        while not any(isinstance(message, cmd.StartRequest) for message in self.client.receive(0.5)):
            pass

    def receive(self, timeout_s: float) -> list[msg.ControlMessage | msg.Result]:
        messages = self.client.receive(timeout_s)
        self.facts += [fact for message in messages if isinstance(message, Traces) for fact in message.facts]
        return messages

    def until_ended(self, *names: str, timeout_s: float = 240) -> dict[str, Ended]:
        ended: dict[str, Ended] = {}
        self.results: dict[str, bytes] = {}
        deadline_s = time.monotonic() + timeout_s

        def missing() -> set[str]:
            """Of names, and of results: they come another way."""
            completed = {name for name, end in ended.items() if end.outcome == "completed"}
            return (set(names) - ended.keys()) | (completed & set(names)) - self.results.keys()

        while missing():
            assert time.monotonic() < deadline_s, f"still waiting for {missing()}"
            for message in self.receive(0.5):
                if isinstance(message, msg.RequestEnd):
                    assert message.request_id not in ended, "a request ends once"
                    ended[message.request_id] = Ended.of(message)
                elif isinstance(message, msg.Result):
                    self.results[message.request_id] = message.value
        return ended

    def call(self, method: str) -> msg.CallDone:
        self.num_calls += 1
        self.client.send(msg.CallWorkers(self.num_calls, (0, 1, 2), method, pickle.dumps(((), {}))))
        while True:
            for message in self.receive(5):
                if isinstance(message, msg.CallDone):
                    return message

    def values(self, method: str) -> list[object]:
        """Of all ranks, as soon as all are there: one may be on its way back."""

        def replies() -> list[tuple[bool, bytes]]:
            found = self.call(method).replies
            return found if all([ok for ok, _ in found]) else []

        return [pickle.loads(value) for _, value in wait_until(replies, f"every rank answers {method!r}")]

    def close(self) -> None:
        """And see that nothing is left. Once more does nothing."""
        if not hasattr(self, "heap"):
            return
        self.opened.remove(self)
        self.left.watch(self.client.pid)
        self.client.close()
        self.heap.unlink()
        del self.heap
        self.left.assert_none()


def assert_nothing_held(runtime: Runtime) -> None:
    """Frees go by the migration lane, behind the answer: allow them a moment."""
    wait_until(lambda: not any(runtime.values("held")), "nothing is held")
    assert os.listdir(runtime.client.config.claims_dir) == [], "a claim on a queued task is left"


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    runtime = Runtime()
    runtime.wait_ready()
    yield runtime
    runtime.close()


def test_requests_run_on_layouts_that_change(runtime: Runtime) -> None:
    scripts = {"a": "sp1@1 sp2@2,0 sp3@0,1,2", "b": "encode@2 prepare@1 sp2@1,0 sp1@2 decode@1", "c": "sp3@2,1,0"}
    for name, script in scripts.items():
        runtime.submit(name, script)
    ended = runtime.until_ended(*scripts)
    assert {message.outcome for message in ended.values()} == {"completed"}
    assert runtime.results.keys() == scripts.keys()
    assert_nothing_held(runtime)


def test_split_latents_are_brought_to_every_layout(runtime: Runtime) -> None:
    """Each task checks that it has its part, of the right step."""
    scripts = {
        "grows": "prepare@0 sp1@0 sp2@0,1 sp3@0,1,2 decode@2",
        "shrinks": "prepare@2 sp3@2,0,1 sp2@1,2 sp1@0 decode@0",
        "turns": "prepare@1 sp3@0,1,2 sp3@1,2,0 sp3@2,0,1 sp3@1,0,2 decode@1",
        "branches": "prepare@1 cfg2@0,1 sp2@1,0 cfg2@2,0 sp3@0,1,2 decode@0",
    }
    for name, script in scripts.items():
        runtime.submit(name, script)
    ended = runtime.until_ended(*scripts)
    assert {name: (end.outcome, end.error) for name, end in ended.items()} == dict.fromkeys(
        scripts, ("completed", "")
    )
    assert_nothing_held(runtime)


@pytest.mark.parametrize(
    ("payload", "status_code", "error"), [("client error", 422, "to blame"), ("raise", 500, "ValueError: a bug")]
)
def test_a_failed_task_fails_its_request(runtime: Runtime, payload: str, status_code: int, error: str) -> None:
    runtime.submit("bad", "sp2@0,1", payload)
    runtime.submit("good", "sp2@0,1")
    ended = runtime.until_ended("bad", "good")
    assert (ended["bad"].outcome, ended["bad"].status_code) == ("failed", status_code)
    assert error in ended["bad"].error
    assert ended["good"].outcome == "completed", ended["good"].error


def test_what_a_rank_cannot_send_is_made_again_elsewhere(runtime: Runtime) -> None:
    runtime.submit("unsendable-0", "encode@0 prepare@1 sp2@1,2")
    runtime.submit("good", "encode@1 prepare@2 sp2@1,2")
    ended = runtime.until_ended("unsendable-0", "good")
    assert {end.outcome for end in ended.values()} == {"completed"}, ended


def test_a_request_that_no_rank_can_send_ends_with_the_error(runtime: Runtime) -> None:
    runtime.submit("unsendable", "encode@0 prepare@1 sp2@1,2 sp2@0,1")
    (end,) = runtime.until_ended("unsendable").values()
    assert end.outcome == "failed" and "cannot send unsendable/" in end.error and "cannot pickle this" in end.error


def test_cancel_ends_a_request_at_the_next_boundary(runtime: Runtime) -> None:
    """Otherwise it would run for an hour."""
    runtime.submit("long", "sp2@0,1 sp2@1,2", payload="0.05", num_steps=10_000)
    runtime.submit("second", "sp3@0,1,2")
    runtime.until_running()
    runtime.client.send(ev.RequestCancelled("long"))
    ended = runtime.until_ended("long", "second")
    assert (ended["long"].outcome, ended["second"].outcome) == ("cancelled", "completed")
    assert_nothing_held(runtime)


def test_a_repeated_request_id_is_refused(runtime: Runtime) -> None:
    runtime.submit("before", "sp1@0", payload="0.3", num_steps=1)
    runtime.submit("twin", "sp1@0")
    runtime.submit("twin", "sp1@0", payload="raise")
    (first,) = runtime.until_ended("twin").values()
    assert first.outcome == "failed" and "already alive" in first.error
    ended = runtime.until_ended("before", "twin")
    assert ended["twin"].outcome == "completed", "the first one still has its own payload"


def test_calls_reach_every_worker_and_errors_come_back(runtime: Runtime) -> None:
    assert len(set(runtime.values("pid"))) == 3
    replies = runtime.call("fail").replies
    assert [ok for ok, _ in replies] == [False] * 3 and b"no such luck" in replies[0][1]


def test_a_worker_that_cannot_start_is_reported() -> None:
    runtime = Runtime(payload=b"fail to start")
    with pytest.raises(RuntimeDownError, match="out of memory"):
        runtime.wait_ready()
    runtime.close()


def test_workers_that_still_load_end_with_their_server(tmp_path: Path) -> None:
    runtime = Runtime(payload=f"load for ever {tmp_path}".encode())
    deadline_s = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 3:
        assert time.monotonic() < deadline_s, "the workers do not load"
        time.sleep(0.05)
    runtime.close()  # how long that takes is asserted under a virtual clock, in tests/whole


def test_a_request_that_kills_its_worker_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    runtime = Runtime(max_retries=2, record_path=str(recording))
    runtime.wait_ready()
    runtime.submit("poison", "encode@1", "die")
    runtime.submit("good", "sp2@0,2 sp3@0,1,2 sp2@1,2", payload="0.01", num_steps=40)
    ended = runtime.until_ended("poison", "good")
    assert (ended["poison"].outcome, ended["poison"].status_code) == ("failed", 503)
    # On whichever rank its turn came last: it is not tried on one that is away.
    assert re.search(
        r"rank \d was lost: its worker ended with exit code 7 \(after 2 retries", ended["poison"].error
    )
    assert ended["good"].outcome == "completed", ended["good"].error
    assert_nothing_held(runtime)
    runtime.close()
    assert replay(recording).difference is None


@pytest.mark.parametrize("number", [signal.SIGSTOP, *thorough([signal.SIGKILL])])
def test_a_rank_that_dies_or_hangs_is_replaced_while_the_others_serve(number: signal.Signals) -> None:
    runtime = Runtime(heartbeat_timeout_s=3.0, traces=True)
    runtime.wait_ready()
    pids = runtime.values("pid")
    scripts = {"wide": "sp3@0,1,2", "moves": "sp1@1 sp2@1,2", "elsewhere": "encode@0 prepare@0 sp1@0 decode@0"}
    for name, script in scripts.items():
        runtime.submit(name, script, payload="0.02", num_steps=30)
    time.sleep(0.3)
    os.kill(int(str(pids[1])), number)
    ended = runtime.until_ended(*scripts)
    assert {message.outcome for message in ended.values()} == {"completed"}
    assert runtime.results.keys() == scripts.keys()
    assert_nothing_held(runtime)
    again = runtime.values("pid")
    assert again[1] != pids[1] and (again[0], again[2]) == (pids[0], pids[2])
    assert not psutil.pid_exists(int(str(pids[1])))
    events = {(fact.name, fact.rank) for fact in runtime.facts if isinstance(fact, RequestEvent)}
    assert {("rank_lost", 1), ("retry", -1)} <= events
    spans = [fact for fact in runtime.facts if isinstance(fact, TaskSpan)]
    lost = {span.task for span in spans if span.error.startswith("rank 1 was lost: ")}
    assert lost and lost <= {span.task for span in spans if span.attempt > 1 and not span.error}
    runtime.close()


@pytest.mark.thorough
def test_a_rank_that_is_stuck_in_a_task_is_replaced(tmp_path: Path) -> None:
    """Its heartbeat goes on, and its peers wait for it."""
    runtime = Runtime(payload=str(tmp_path).encode(), task_timeout_s=1.0, comm_timeout_s=1.0)
    runtime.wait_ready()
    pids = runtime.values("pid")
    runtime.submit("stuck-5-1", "encode@0 prepare@0 sp2@0,1 decode@0", payload="0.01", num_steps=8)
    runtime.submit("good", "encode@2 prepare@2 sp1@2 decode@2", payload="0.05", num_steps=100)
    ended = runtime.until_ended("stuck-5-1", "good")
    assert (tmp_path / "stuck-5-1").exists(), "it was stuck"
    assert {message.outcome for message in ended.values()} == {"completed"}
    assert_nothing_held(runtime)
    again = runtime.values("pid")
    assert again[1] != pids[1] and (again[0], again[2]) == (pids[0], pids[2]), "only the culprit"
    runtime.close()


def test_a_request_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    runtime = Runtime(checkpoint_every_steps=4, record_path=str(recording))
    runtime.wait_ready()
    pids = runtime.values("pid")
    runtime.submit("alone", "encode@1 prepare@1 sp1@1 decode@1", payload="0.02", num_steps=30)
    with RecordingReader(recording) as reader:
        ran: list[str] = []
        while "alone/denoise/10" not in ran:
            ran += [task.id for entry in reader.entries() if isinstance(entry, RunTask) for task in entry.tasks]
        os.kill(int(str(pids[1])), signal.SIGKILL)
        assert runtime.until_ended("alone")["alone"].outcome == "completed"
        ran += [task.id for entry in reader.entries() if isinstance(entry, RunTask) for task in entry.tasks]
    again = [task for task in dict.fromkeys(ran) if ran.count(task) > 1]
    assert again and int(again[0].rpartition("/")[2]) >= 4, f"{again[0]} is not from a checkpoint"
    assert_nothing_held(runtime)
    runtime.close()
    assert replay(recording).difference is None


def test_workers_end_when_no_control_process_takes_the_place_of_one_that_is_killed() -> None:
    runtime = Runtime(max_control_restarts=0)
    runtime.wait_ready()
    pids = [int(str(pid)) for pid in runtime.values("pid")]
    runtime.submit("long", "sp3@0,1,2", payload="0.05", num_steps=500)
    runtime.until_running()
    os.kill(runtime.client.pid, signal.SIGKILL)
    with pytest.raises(RuntimeDownError, match="the control process was ended by signal 9, and so did"):
        runtime.until_ended("long")
    runtime.close()
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    assert not any(psutil.pid_exists(pid) for pid in pids)


HANGS = {
    "in a loop": "while True: pass",
    "and catches errors": """
            while True:
                try:
                    sum(range(1000))
                except Exception:
                    pass""",
    "and catches whatever comes": """
            while True:
                try:
                    sum(range(1000))
                except BaseException:
                    pass""",
    "outside of Python": "import re; re.match('(a+)+b', 'a' * 60)",
}


@pytest.mark.parametrize("how", [*thorough(list(HANGS)[:3]), "outside of Python"])
def test_a_policy_that_never_answers_fails_no_request(tmp_path: Path, how: str) -> None:
    (tmp_path / "stuck.py").write_text(
        "from gfdit.policies.layout_script import LayoutScript\n"
        "class Stuck(LayoutScript):\n"
        "    def schedule(self, view):\n"
        "        if view.ready[0].request_id == 'poison':\n"
        f"            {HANGS[how]}\n"
        "        return super().schedule(view)\n"
    )
    runtime = Runtime(policy=f"{tmp_path / 'stuck.py'}:Stuck", control_timeout_s=2.0)
    runtime.wait_ready()
    runtime.submit("poison", "sp1@0", num_steps=1)
    runtime.submit("good", "sp1@0", num_steps=1)
    ended = runtime.until_ended("poison", "good")
    assert {end.outcome for end in ended.values()} == {"completed"}
    runtime.close()


def test_a_rank_that_fails_everything_is_replaced_and_no_request_fails() -> None:
    runtime = Runtime(policy="fcfs")
    runtime.wait_ready()
    pids = runtime.values("pid")
    runtime.call("become_faulty")
    names = [f"r{index}" for index in range(12)]
    for name in names:
        runtime.submit(name, "")
    ended = runtime.until_ended(*names)
    assert {end.outcome for end in ended.values()} == {"completed"}
    now = runtime.values("pid")
    assert (now[0], now[2]) == (pids[0], pids[2]) and now[1] != pids[1]
    assert_nothing_held(runtime)
    runtime.close()


def test_a_rank_that_does_not_return_is_told_of_and_not_called() -> None:
    """As on GPUs."""
    runtime = Runtime(policy="fcfs", restart_workers=False)
    runtime.wait_ready()
    pids = runtime.values("pid")
    os.kill(cast(int, pids[1]), signal.SIGKILL)
    ranks: list[tuple[bool, bool]] = []
    while (False, True) not in ranks:
        for message in runtime.client.receive(0.5):
            if isinstance(message, Snapshot):
                ranks = [(rank.up, rank.gone) for rank in message.ranks]
    assert ranks == [(True, False), (False, True), (True, False)]
    replies = runtime.call("pid").replies
    assert replies[1] == (True, msg.GONE)
    assert [pickle.loads(replies[rank][1]) for rank in (0, 2)] == [pids[0], pids[2]]
    runtime.submit("r", "sp2@0,2")
    assert runtime.until_ended("r")["r"].outcome == "completed"
    runtime.close()


def test_a_request_that_nobody_begins_is_turned_away() -> None:
    runtime = Runtime(policy="fcfs", max_queue_s=0.5)
    runtime.wait_ready()
    for index in range(3):
        runtime.submit(f"long{index}", "", payload="0.1", num_steps=20)
    runtime.until_running()
    runtime.submit("late", "")
    (end,) = runtime.until_ended("late").values()
    assert (end.outcome, end.status_code) == ("failed", 503) and "no rank was free for it for 0.5 s" in end.error
    assert runtime.until_ended("long0", "long1", "long2")
    runtime.close()


def test_nothing_outlives_an_engine_that_is_killed() -> None:
    code = (
        "import os, signal; from tests.runtime.test_runtime import Runtime; r = Runtime(); r.wait_ready();"
        "print(r.client.config.run_dir, *r.values('pid'), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with nothing_left() as left:
        engine = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=60
        )
        run_dir, *pids = engine.stdout.split()
        assert len(pids) == 3
        for pid in pids:
            left.watch(int(pid))
    assert not Path(run_dir).exists()


@pytest.mark.thorough
def test_workers_that_hang_while_they_load_outlive_nobody(tmp_path: Path) -> None:
    """Neither engine nor control process is there to end them."""
    code = (
        "import os, sys, time; from pathlib import Path; from tests.runtime.test_runtime import Runtime;"
        f"r = Runtime(payload=b'load for ever {tmp_path}'); print(r.client.pid, flush=True);"
        "sys.stdin.read()"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    control = int(engine.stdout.readline())
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, "the workers do not load")
    started = psutil.Process(engine.pid).children(recursive=True)
    assert len(started) >= 4
    os.kill(control, signal.SIGKILL)
    engine.kill()
    engine.communicate()
    _, left = psutil.wait_procs(started, timeout=HANG_S)
    assert not left
