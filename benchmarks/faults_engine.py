"""Ranks and control process of the real engine killed and stopped under load; images against undisturbed ones."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import TARGET_S, Moments, Strike, gaps, times_of
from gfdit.cli.main import main as gfdit
from gfdit.cli.provenance import provenance, write_report
from gfdit.omni.plugin import prepare_cpu_process
from tests.support.images import Engine, ImageRequest

NUM_RANKS = 4
HEARTBEAT_TIMEOUT_S = 3.0
BACK_S = 180.0
STRIKE_S = (0.2, 2.0)  # after the requests were sent
NUM_UNDISTURBED = 10  # rounds without a strike: how long the next completion takes then


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="strikes, one by one (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    report["result"] = result = measure(args.times, args.seed)
    for path in write_report(args.out, "faults_engine", report, markdown(report)):
        print(path)
    print(markdown(report))
    return 0 if result["wrong"] == result["failed"] == result["unhealthy"] == 0 and result["nothing_held"] else 1


def measure(times: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    prepare_cpu_process()
    with tempfile.TemporaryDirectory() as folder:
        model, recording = Path(folder) / "qwen-image", Path(folder) / "recording.jsonl"
        gfdit(["tiny-model", "qwen-image", str(model)])
        settings = {
            "ranks": NUM_RANKS,
            "policy": "equipartition",
            "threads_per_rank": 1,
            "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            "control_timeout_s": HEARTBEAT_TIMEOUT_S,
            "record": str(recording),
        }
        backend = "gfdit.omni.engine.ElasticDiffusionEngine"
        engine = Engine(model, engine_backend=backend, additional_config={"gfdit": settings})
        try:
            requests = [ImageRequest(256, 256, steps=12, seed=seed) for seed in range(6)]
            expected = [image.tobytes() for image in engine.images(requests)]
            strikes: list[Strike] = []
            moments, replaced_s = Moments(recording), list[float]()
            undisturbed_s: list[float] = []
            for _ in range(NUM_UNDISTURBED):
                undisturbed_s.append(time.monotonic() + draw.uniform(*STRIKE_S))
                engine.images(requests)
            moments.read()
            health = Health(engine)
            wrong = failed = 0
            for index in range(times):
                number = (signal.SIGKILL, signal.SIGSTOP)[index % 2]
                at_control = index % 5 >= 3
                pid = _control_pid() if at_control else _pids(engine)[draw.randrange(NUM_RANKS)]
                arguments = (pid, number, at_control, strikes)
                striker = threading.Timer(draw.uniform(*STRIKE_S), _strike, arguments)
                striker.start()
                try:
                    images = [image.tobytes() for image in engine.images(requests)]
                    wrong += sum(image != right for image, right in zip(images, expected, strict=True))
                except Exception as error:
                    print(error)
                    failed += 1
                striker.join()
                while (pid == _control_pid()) if at_control else (pid in _pids(engine)):
                    time.sleep(0.2)
                if at_control:
                    replaced_s.append(time.monotonic() - _age_s(_control_pid()))
                moments.read()
                print(f"{index + 1} struck, {wrong} wrong", flush=True)
            drained, unhealthy = engine.drained(), health.stop()
        finally:
            engine.close()
        return {
            "images": times * len(requests),
            "wrong": wrong,
            "failed": failed,
            "unhealthy": unhealthy,
            "nothing_held": drained,
            "undisturbed_to_next_completion_s": gaps(undisturbed_s, moments.completed_s),
            **times_of(strikes, moments, replaced_s),
        }


class Health(threading.Thread):
    """Asks all the time what ``/health`` asks: the server goes on, so it has to say so."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(daemon=True)
        self._engine = engine
        self._stopping = threading.Event()
        self._num_unhealthy = 0
        self.start()

    def run(self) -> None:
        while not self._stopping.wait(0.02):
            self._num_unhealthy += not self._engine.is_healthy()

    def stop(self) -> int:
        """How often it was not healthy."""
        self._stopping.set()
        self.join()
        return self._num_unhealthy


def _strike(pid: int, number: signal.Signals, at_control: bool, strikes: list[Strike]) -> None:
    strikes.append(Strike(number.name, time.monotonic(), at_control))
    os.kill(pid, number)


def _age_s(pid: int) -> float:
    """To 10 ms; what psutil says is rounded to seconds, as the time of booting is."""
    started_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - (started_ticks + 1) / os.sysconf("SC_CLK_TCK")  # not too old


def _control_pid() -> int:
    """Of the control process, once there is one."""
    while True:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "gfdit.runtime.control_process" in child.cmdline():
                    return child.pid
        time.sleep(0.02)


def _pids(engine: Engine) -> list[int]:
    """Of all ranks, once all are there."""
    deadline_s = time.monotonic() + BACK_S
    while time.monotonic() < deadline_s:
        answer = engine.call("gfdit_describe")  # by rank, or what went wrong
        if isinstance(answer, list):
            return [described["pid"] for described in answer]
        time.sleep(0.5)
    raise TimeoutError(f"a rank did not come back: {answer}")


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Ranks of the real engine killed and stopped under load",
        "",
        f"`{report['command']}`, {report['date']}, commit {report['commit']}, {report['machine']}.",
        "",
        f"Tiny Qwen-Image on {NUM_RANKS} CPU ranks, six requests of 12 steps at once; a rank that is silent for",
        f"{HEARTBEAT_TIMEOUT_S:g} s hangs. Target: the next completion {TARGET_S:g} s after detection. All are",
        'sent at once, so that it can be far away without a strike, too: the row "undisturbed" says how far.',
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {name.replace('_', ' ')} | {value} |" for name, value in report["result"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
