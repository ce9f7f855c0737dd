"""Ranks and the control process killed and stopped under load: what is lost or wrong, how soon it goes on.

Real processes, sockets and shared memory, with an executor that needs no model: an artifact is a number that every
step changes, a group task is a barrier. So a result shows whether each step ran once, and on the right input.
"""

from __future__ import annotations

import argparse
import bisect
import math
import os
import pickle
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from gfdit.cli.provenance import provenance, write_report
from gfdit.comm import GroupFreeComm, SharedMemoryHeap
from gfdit.core import ExecutionLayout, ParallelSpec, Request, Shape, Task, TaskKind, trajectory
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.views import ArtifactView, FieldView
from gfdit.core.events import MemoryPoint, MemoryUse
from gfdit.migration.parts import ArtifactParts
from gfdit.observe.recording import RecordingReader, TimedEvent
from gfdit.runtime import messages as msg
from gfdit.runtime.client import ControlClient
from gfdit.runtime.config import RuntimeConfig, make_run_dir
from tests.support.endings import Ended

NUM_RANKS = 4
SPECS = (ParallelSpec(1), ParallelSpec(2), ParallelSpec(4))
IN_FLIGHT = 8
HEARTBEAT_TIMEOUT_S = 1.0
TARGET_S = 2.0  # from detection to the next completion
STUCK_S = 60.0
VIEW = ArtifactView((FieldView("value", "float64", 8, (2,)),))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100, help="strikes, one by one (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    report["result"] = result = measure(args.times, args.seed)
    for path in write_report(args.out, "faults", report, markdown(report)):
        print(path)
    print(markdown(report))
    return 0 if result["lost"] == result["wrong"] == result["left_behind"] == 0 else 1


# The ranks


class ChainExecutor:
    """Each task changes what its inputs say. ``payload`` of a request: its first value, and seconds a task."""

    device = torch.device("cpu")

    def __init__(self, rank: int, comm: GroupFreeComm) -> None:
        self.comm = comm
        self.artifacts: dict[str, torch.Tensor] = {}
        self.layouts: dict[str, ExecutionLayout] = {}  # under which it got them

    def execute(self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: Mapping[str, bytes]) -> Any:
        (task,) = tasks
        if task.inputs:
            inputs = torch.stack([self.artifacts[name] for name in task.inputs])
            value, task_s = (inputs.sum(0) / len(inputs)).tolist()
        else:
            value, task_s = map(float, payloads[task.request_id].decode().split())
        if len(layout.ranks) > 1:
            self.comm.barrier(self.comm.group(layout.ranks))
        time.sleep(task_s)
        if len(layout.ranks) > 1:
            self.comm.barrier(self.comm.group(layout.ranks))
        made = torch.tensor([step(value, task), task_s], dtype=torch.float64)
        self.artifacts |= dict.fromkeys(task.outputs, made)
        self.layouts |= dict.fromkeys(task.outputs, layout)
        if task.kind is not TaskKind.DECODE or self.comm.rank != layout.ranks[0]:
            return dict
        return lambda: {task.request_id: repr(float(made[0])).encode()}

    def output_views(self, tasks: tuple[Task, ...]) -> tuple[tuple[str, ArtifactView], ...]:
        return tuple((name, VIEW) for task in tasks for name in task.outputs)

    def memory_use(self) -> MemoryUse | None:
        return None

    def memory_points(self) -> tuple[MemoryPoint, ...]:
        return ()

    def reclaim(self) -> None:
        pass

    def export_artifact(self, artifact: str) -> ArtifactParts:
        return ArtifactParts(b"", {"value": self.artifacts[artifact]})

    def import_artifact(self, artifact: str, parts: ArtifactParts, view: ArtifactView) -> None:
        self.artifacts[artifact] = parts.tensors["value"]
        self.layouts[artifact] = ExecutionLayout((self.comm.rank,))  # it is whole wherever it is

    def free(self, artifacts: tuple[str, ...]) -> None:
        for name in artifacts:
            self.artifacts.pop(name, None)
            self.layouts.pop(name, None)

    def holdings(self) -> tuple[msg.Holding, ...]:
        return tuple(msg.Holding(name, layout, VIEW) for name, layout in self.layouts.items())

    def probe(self) -> None:
        pass

    def call(self, method: str, payload: bytes) -> bytes:
        return pickle.dumps(os.getpid() if method == "pid" else sorted(self.artifacts))

    def close(self) -> None:
        pass


def step(value: float, task: Task) -> float:
    return value * 0.75 + task.step_index + len(task.kind)


def make_executor(rank: int, comm: GroupFreeComm, payload: bytes) -> ChainExecutor:
    torch.set_num_threads(1)
    return ChainExecutor(rank, comm)


# The server


@dataclass
class Load:
    """Keeps ``IN_FLIGHT`` requests alive until told to stop."""

    client: ControlClient
    draw: random.Random
    moments: Moments
    expected: dict[str, bytes] = field(default_factory=dict)
    results: dict[str, bytes] = field(default_factory=dict)
    endings: dict[str, list[Ended]] = field(default_factory=dict)
    calls: dict[int, msg.CallDone] = field(default_factory=dict)
    num_calls: int = 0
    stopped: bool = False
    replaced_s: list[float] = field(default_factory=list)  # when a control process was
    epoch: int = 0

    @property
    def num_alive(self) -> int:
        return len(self.expected) - len(self.endings)

    def run_for(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            while not self.stopped and self.num_alive < IN_FLIGHT:
                self._submit()
            messages = self.client.receive(left_s)
            if self.client.config.epoch != self.epoch:
                self.epoch = self.client.config.epoch
                self.replaced_s.append(time.monotonic())
            for message in messages:
                if isinstance(message, msg.RequestEnd):
                    self.endings.setdefault(message.request_id, []).append(Ended.of(message))
                elif isinstance(message, msg.Result):
                    self.results[message.request_id] = message.value
                elif isinstance(message, msg.CallDone):
                    self.calls[message.call_id] = message

    def _submit(self) -> None:
        name, num_steps = f"r{len(self.expected)}", self.draw.randint(5, 30)
        value, task_s = self.draw.random(), self.draw.uniform(0.002, 0.02)
        request = Request(name, self.client.config.model, Shape(512, 512), num_steps, time.monotonic())
        graph = trajectory(name, num_steps, SPECS)
        self.expected[name] = outcome_of(graph.tasks, value)
        self.client.send(msg.Submit(request, graph, f"{value!r} {task_s!r}".encode()))

    def call(self, method: str) -> list[Any] | None:
        """Values by rank; None if a rank is lost."""
        self.num_calls += 1
        number = self.num_calls
        self.client.send(msg.CallWorkers(number, tuple(range(NUM_RANKS)), method, b""))
        deadline_s = time.monotonic() + STUCK_S
        while number not in self.calls:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{method} was not answered")
            self.run_for(0.02)
        replies = self.calls[number].replies
        return [pickle.loads(value) for _, value in replies] if all(ok for ok, _ in replies) else None

    def call_all(self, method: str) -> list[Any]:
        deadline_s = time.monotonic() + STUCK_S
        while (values := self.call(method)) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError("a rank did not come back")
        return values


def outcome_of(tasks: tuple[Task, ...], value: float) -> bytes:
    """What an undisturbed server makes of a request."""
    made: dict[str, float] = {}
    for task in tasks:
        if task.inputs:
            value = sum(made[name] for name in task.inputs) / len(task.inputs)
        value = step(value, task)
        made |= dict.fromkeys(task.outputs, value)
    return repr(value).encode()


def measure(times: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    run_dir = make_run_dir()
    heap = SharedMemoryHeap.create(NUM_RANKS).held_open()
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording.jsonl"
        (run_dir / "payload").write_bytes(b"")
        client = ControlClient(
            RuntimeConfig(
                run_dir=str(run_dir),
                num_ranks=NUM_RANKS,
                model="chain",
                policy="gfdit.policies.random_layout:RandomLayout",
                record_path=str(recording),
                worker="benchmarks.faults:make_executor",
                worker_payload_path=str(run_dir / "payload"),
                start_method="forkserver",
                preload=["benchmarks.faults"],
                heap=heap.to_json(),
                heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
                control_timeout_s=HEARTBEAT_TIMEOUT_S,
            )
        )
        try:
            client.wait_ready()
            load = Load(client, draw, Moments(recording))
            strikes = [_strike(load, index, draw) for index in range(times)]
            load.stopped = True
            deadline_s = time.monotonic() + STUCK_S
            while load.num_alive and time.monotonic() < deadline_s:
                load.run_for(0.1)
            while any(held := load.call_all("held")) and time.monotonic() < deadline_s:
                load.run_for(0.1)  # frees travel behind the last answer
            pids = load.call_all("pid")
        finally:
            client.close()
            heap.unlink()
        # Those that are not its children end on their own.
        _, running = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], STUCK_S)
        left = sum(map(len, held)) + len(running) + run_dir.exists()
        return {**_account(load), "left_behind": left, **times_of(strikes, load.moments, load.replaced_s)}


def _strike(load: Load, index: int, draw: random.Random) -> Strike:
    """Kill or stop a rank, or every third time the control process, and wait until everything is there again."""
    load.run_for(draw.uniform(0.1, 0.8))
    number = (signal.SIGKILL, signal.SIGSTOP)[index // (NUM_RANKS + 1) % 2]
    rank = index % (NUM_RANKS + 1)
    at_control, epoch = rank == NUM_RANKS, load.epoch
    pid = load.client.pid if at_control else load.call_all("pid")[rank]
    load.run_for(draw.uniform(0.0, 0.1))
    strike = Strike(number.name, time.monotonic(), at_control)
    os.kill(pid, number)
    if at_control:
        while load.epoch == epoch:
            load.run_for(0.02)
    else:
        while load.call_all("pid")[rank] == pid:
            pass
    load.moments.read()
    print(f"\r{index + 1} struck, {len(load.endings)} requests ended", end="", flush=True)
    return strike


class Strike(NamedTuple):
    signal: str
    at_s: float
    at_control: bool


def _account(load: Load) -> dict[str, Any]:
    outcomes = Counter(endings[0].outcome for endings in load.endings.values())
    completed = [name for name, endings in load.endings.items() if endings[0].outcome == "completed"]
    return {
        "requests": len(load.expected),
        "outcomes": dict(outcomes),
        "retryable": sum(e[0].outcome == "failed" and e[0].status_code == 503 for e in load.endings.values()),
        "lost": len(load.expected) - len(load.endings),
        "ended_twice": sum(len(endings) > 1 for endings in load.endings.values()),
        "without_result": sum(name not in load.results for name in completed),
        "wrong": sum(load.results.get(name, load.expected[name]) != load.expected[name] for name in completed),
    }


class Moments:
    """When ranks were lost and came back, and when requests completed, from the recording of a running server.

    Every control process writes a new one: to be read after each strike, before it is moved away.
    """

    def __init__(self, recording: Path) -> None:
        self.lost_s: list[float] = []
        self.joined_s: list[float] = []
        self.completed_s: list[float] = []
        self.finished_s: list[float] = []  # tasks
        self._recording = recording
        self._reader: RecordingReader | None = None
        self._inode = 0

    def read(self) -> None:
        """What has been written since; of an old file the rest, before the new one."""
        if self._reader is not None:
            self._take(self._reader)
        try:
            inode = self._recording.stat().st_ino
            if inode != self._inode:
                self._reader, self._inode = RecordingReader(self._recording), inode
                self._take(self._reader)
        except (FileNotFoundError, ValueError):
            return  # it is being made

    def _take(self, reader: RecordingReader) -> None:
        now_s = 0.0
        for entry in reader.entries():
            if isinstance(entry, TimedEvent):
                now_s = entry.now_s
                if isinstance(entry.event, ev.RankLost):
                    self.lost_s.append(now_s)
                elif isinstance(entry.event, ev.RankJoined):
                    self.joined_s.append(now_s)
                elif isinstance(entry.event, ev.TaskFinished):
                    self.finished_s.append(now_s)
            elif isinstance(entry, cmd.CompleteRequest):
                self.completed_s.append(now_s)


def times_of(strikes: list[Strike], moments: Moments, replaced_s: list[float]) -> dict[str, Any]:
    """``replaced_s``: when a control process was."""
    moments.read()
    found: dict[str, Any] = {"ranks_lost": len(moments.lost_s), "ranks_back": len(moments.joined_s)}
    found["control_processes_replaced"] = len(replaced_s)
    for whom, at_control, detected_s in (("rank", False, moments.lost_s), ("control", True, replaced_s)):
        for name in ("SIGKILL", "SIGSTOP"):
            struck_s = [each.at_s for each in strikes if (each.signal, each.at_control) == (name, at_control)]
            found[f"{whom}_{name}_strikes"] = len(struck_s)
            found[f"{whom}_{name}_to_detection_s"] = summary([_next(detected_s, at_s) - at_s for at_s in struck_s])
        found[f"{whom}_detection_to_next_task_s"] = gaps(detected_s, moments.finished_s)
        found[f"{whom}_detection_to_next_completion_s"] = gaps(detected_s, moments.completed_s)
    found["detection_to_rank_back_s"] = gaps(moments.lost_s, moments.joined_s)
    return found


def gaps(from_s: list[float], to_s: list[float]) -> dict[str, float]:
    """How long it takes from each of the first moments to the next one of the others."""
    return summary([_next(to_s, at_s) - at_s for at_s in from_s])


def _next(moments_s: list[float], at_s: float) -> float:
    index = bisect.bisect_left(moments_s, at_s)
    return moments_s[index] if index < len(moments_s) else at_s + STUCK_S


def summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return {"p50": round(statistics.median(values), 3), "p99": round(p99, 3), "max": round(ordered[-1], 3)}


def markdown(report: dict[str, Any]) -> str:
    result = report["result"]
    lines = [
        "# Ranks and control processes killed and stopped under load",
        "",
        f"`{report['command']}`, {report['date']}, commit {report['commit']}, {report['machine']}.",
        "",
        f"{NUM_RANKS} processes without a model, {IN_FLIGHT} requests at once, random layouts; a rank that is",
        f"silent for {HEARTBEAT_TIMEOUT_S:g} s hangs. Target: the next completion {TARGET_S:g} s after detection.",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in result.items()]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
