"""What metrics cost the control process: CPU time per task with and without them, in turns.

The real control process, its policy guarded and its messages encoded and decoded as on sockets; workers answer at
once, and for every request that ends another one comes. What sockets take would only make the share smaller.
``python -m benchmarks.metrics_cost``
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.core import ParallelSpec, Request, Shape, trajectory
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.policy.loading import DEFAULT_POLICY
from gfdit.observe.snapshot import Snapshot
from gfdit.runtime import messages as msg
from gfdit.runtime.claims import Claims
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.control_process import ControlProcess
from gfdit.runtime.policy_guard import GuardedPolicy
from gfdit.runtime.sockets import Arrived, Queue
from gfdit.runtime.supervisor import Supervisor

NUM_STEPS = 20
SPECS = tuple([ParallelSpec(sp) for sp in (1, 2, 4)])
TARGET = 0.01
WARM_UP_ROUNDS = 5


class Loopback:
    """A port whose workers have done everything by the next turn, and whose engine always has another request."""

    def __init__(self, in_flight: int) -> None:
        self.num_tasks = 0
        self.snapshot_bytes = 0
        self._decode_worker = msg.Decoder(msg.WorkerMessage)
        self._decode_engine = msg.Decoder(msg.EngineMessage)
        self._decode_command = msg.Decoder(msg.ComputeMessage | msg.FreeArtifacts | msg.Migrate)
        self._from_workers: list[bytes] = []
        self._from_engine: list[bytes] = []
        self._num_requests = 0
        for _ in range(in_flight):
            self._submit()

    def _submit(self) -> None:
        self._num_requests += 1
        name = f"r{self._num_requests}"
        side = 512 if self._num_requests % 2 else 1024
        request = Request(name, "m", Shape(side, side), NUM_STEPS, time.monotonic())
        self._from_engine.append(msg.encode(msg.Submit(request, trajectory(name, NUM_STEPS, SPECS), b"")))

    def wait(self, timeout_s: float | None, sentinels: Iterable[int]) -> Arrived:
        workers, engine = self._from_workers, self._from_engine
        self._from_workers, self._from_engine = [], []
        return Arrived([self._decode_worker.decode(one) for one in workers], list(map(self._read, engine)))

    def _read(self, data: bytes) -> Any:
        return self._decode_engine.decode(data)

    def send(self, queue: Queue, ranks: Sequence[int], message: msgspec.Struct) -> None:
        msg.encode(message)
        if isinstance(message, cmd.RunTask):
            self.num_tasks += 1
            for rank in ranks:
                self._from_workers.append(msg.encode(ev.TaskStarted(message.dispatch_id, rank)))
                self._from_workers.append(msg.encode(ev.TaskFinished(message.dispatch_id, rank, 0.01)))
        elif isinstance(message, cmd.Migrate):
            for rank in ranks:
                self._from_workers.append(msg.encode(ev.MigrationFinished(message.migration_id, rank, 1e-3, 1000)))

    def tell(self, message: msg.ControlMessage) -> None:
        data = msg.encode(message)
        if isinstance(message, cmd.CompleteRequest):
            self._submit()
        elif isinstance(message, Snapshot):
            self.snapshot_bytes = len(data)
        elif isinstance(message, (cmd.FailRequest, msg.Fatal)):
            raise ValueError(f"the control process says {message}")

    def renew(self, rank: int, config: RuntimeConfig) -> None: ...

    def close(self) -> None: ...


class Switched(ControlProcess):
    """Metrics can be switched off and on, so that both are measured on one state."""

    def switch(self, on: bool) -> None:
        self._is_on = on
        self.plane.on_task_done = self._meter.task_done if on else None
        assert isinstance(self.plane.policy, GuardedPolicy)
        self.plane.policy.seconds = self._meter.decisions_s if on else None

    def _report(self, *, is_quiet: bool) -> None:
        if self._is_on:
            super()._report(is_quiet=is_quiet)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Pairs of times with and without, of which each goes first in turn."""
    port = Loopback(args.in_flight)
    with tempfile.TemporaryDirectory() as folder:
        config = RuntimeConfig(
            run_dir=folder,
            num_ranks=args.ranks,
            model="m",
            policy=args.policy,
            worker="",
            worker_payload_path="",
            run_ahead=0,
        )
        # Of the time in which metrics are on, and of this thread: snapshots come as often as on a core of its own.
        on_s = 0.0
        claims = Claims.create(Path(config.claims_dir))
        control = Switched(config, port, Supervisor(config), claims, clock=lambda: on_s)

        def task_s(on: bool) -> float:
            """CPU time of a task."""
            control.switch(on)
            before, started_s = port.num_tasks, time.thread_time()
            nonlocal on_s
            last_s = started_s
            while port.num_tasks < before + args.tasks:
                control.turn()
                now_s = time.thread_time()
                on_s, last_s = on_s + on * (now_s - last_s), now_s
            return (last_s - started_s) / (port.num_tasks - before)

        pairs = []
        for number in range(args.rounds + WARM_UP_ROUNDS):
            seconds = {on: task_s(on) for on in ((False, True) if number % 2 else (True, False))}
            pairs.append((seconds[False], seconds[True]))
    pairs = pairs[WARM_UP_ROUNDS:]
    return {
        "us_per_task_without": 1e6 * statistics.median([pair[0] for pair in pairs]),
        "us_per_task_with": 1e6 * statistics.median([pair[1] for pair in pairs]),
        "overhead": statistics.median([pair[1] / pair[0] - 1 for pair in pairs]),
        "snapshot_bytes": port.snapshot_bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=2000, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=31, help="pairs of measurements")
    parser.add_argument("--out", type=Path, help="write dated JSON and Markdown there")
    args = parser.parse_args()
    report = provenance(sys.argv) | {"settings": {k: str(v) for k, v in vars(args).items()}} | measured(args)
    line = (
        f"{args.policy}, {args.ranks} ranks, {args.in_flight} requests alive: "
        f"{report['us_per_task_without']:.1f} us of CPU per task without metrics, "
        f"{report['us_per_task_with']:.1f} us with; median of {args.rounds} paired runs "
        f"{report['overhead']:+.2%} (target: at most {TARGET:.0%}); "
        f"a snapshot has {report['snapshot_bytes']} bytes"
    )
    print(line)
    if args.out is not None:
        text = "\n".join(["# Cost of metrics", "", line, "", *source_lines(report)])
        write_report(args.out, "metrics_cost", report, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
