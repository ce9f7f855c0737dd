"""What metrics and traces cost, in pairs of runs with and without them.

By default CPU time per task of the real control process, its policy guarded and its messages encoded and decoded
as on sockets; workers answer at once, and for every request that ends another one comes. What sockets take would
only make the share smaller. ``python -m benchmarks.metrics_cost``

With ``--server`` throughput and CPU time of a whole server: `gfdit serve` with a tiny model. In one run of each
pair its metrics are scraped, its page is polled once a second and its traces go to a collector; in the other
nothing is counted at all. All of it shares the cores with what computes, as it does not on a machine with GPUs.
``python -m benchmarks.metrics_cost --server``
"""

import argparse
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from benchmarks.metrics_switch import PATH, switch_control
from benchmarks.quiet import Watch
from gfdit.cli.main import main as gfdit
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.server_process import ServerProcess, free_port, start_server
from gfdit.core import ParallelSpec, Request, Shape, trajectory
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.policy.loading import DEFAULT_POLICY
from gfdit.observe.snapshot import Snapshot
from gfdit.runtime import messages as msg
from gfdit.runtime.claims import Claims
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.control_process import ControlProcess
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


def of_control_process(args: argparse.Namespace) -> dict[str, Any]:
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
            traces=not args.no_traces,
        )
        # Of the time in which metrics are on, and of this thread: snapshots come as often as on a core of its own.
        on_s = 0.0
        claims = Claims.create(Path(config.claims_dir))
        control = ControlProcess(config, port, Supervisor(config), claims, clock=lambda: on_s)
        reports = control._task_reports

        def task_s(on: bool) -> float:
            """CPU time of a task."""
            switch_control(control, on, reports)
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


# A whole server


@contextmanager
def collector() -> Iterator[str]:
    """One that takes spans and drops them; the URL of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()


class Load:
    """Runs of the same requests against a server, with and without all that is measured."""

    def __init__(self, server: ServerProcess, switch: Path, num_requests: int, side: int) -> None:
        self._server = server
        self._switch = switch
        self._num_requests = num_requests
        self._body = {"prompt": "a", "size": f"{side}x{side}", "num_inference_steps": NUM_STEPS, "seed": 1}
        self._client = httpx.Client(base_url=server.base_url, timeout=600, trust_env=False)
        self._processes = [psutil.Process(server.process.pid)]
        self._processes += self._processes[0].children(recursive=True)

    def run(self, on: bool) -> tuple[float, float]:
        """Seconds, and seconds of CPU time of all processes of the server."""
        if on:
            self._switch.touch()
        else:
            self._switch.unlink(missing_ok=True)
        assert self._client.post(f"{PATH}?{'on' if on else 'off'}").is_success
        self._generate()  # and the control process has seen the switch
        over = threading.Event()
        polling = threading.Thread(target=self._poll, args=(over,))
        if on:
            polling.start()
        cpu_s, started_s = self._cpu_s(), time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: self._generate(), range(self._num_requests)))
        found = time.monotonic() - started_s, self._cpu_s() - cpu_s
        over.set()
        if on:
            polling.join()
        return found

    def num_spans(self) -> int:
        lines = self._client.get("/metrics").text.splitlines()
        (line,) = [one for one in lines if one.startswith('gfdit_spans_total{outcome="exported"}')]
        return int(float(line.split()[-1]))

    def _generate(self) -> None:
        answer = self._client.post("/v1/images/generations", json=self._body)
        if not answer.is_success:
            raise RuntimeError(answer.text)

    def _poll(self, over: threading.Event) -> None:
        """The page once a second, and a scrape every 15, as Prometheus does by default."""
        for number in range(1 << 30):
            assert self._client.get("/v1/gfdit/state").is_success
            if number % 15 == 0:
                assert self._client.get("/metrics").is_success
            if over.wait(1.0):
                return

    def _cpu_s(self) -> float:
        return sum([sum(process.cpu_times()[:2]) for process in self._processes])


def of_server(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, collector() as url:
        folder = Path(name)
        model, switch = folder / "model", folder / "on"
        assert gfdit(["tiny-model", "qwen-image", str(model)]) == 0
        argv = ["gfdit", "serve", str(model), "--ranks", "2", "--otlp-endpoint", url]
        argv += ["--policy", "benchmarks.metrics_switch:SwitchedPolicy"]
        argv += ["--policy-arg", f"switch={switch}", "--policy-arg", f"policy={args.policy}"]
        argv += ["--", "--enforce-eager", "--dtype", "float32"]
        argv += ["--middleware", "benchmarks.metrics_switch.SwitchedFront"]
        root = str(Path(__file__).resolve().parents[1])
        with start_server(argv, free_port(), folder / "log", env={"PYTHONPATH": root}) as server:
            load = Load(server, switch, args.requests, args.side)
            for on in (False, True):
                load.run(on)
            before, watch, end_s = load.num_spans(), Watch(), time.monotonic() + args.seconds
            pairs: list[dict[bool, tuple[float, float]]] = []
            while time.monotonic() < end_s or len(pairs) < 4:
                pairs.append({on: load.run(on) for on in ((False, True) if len(pairs) % 2 else (True, False))})
            num_spans = load.num_spans() - before
            others = watch.others_share()
    num_tasks = args.requests * (NUM_STEPS + 3)
    return {
        "num_pairs": len(pairs),
        "tasks_per_s": num_tasks / statistics.median([pair[False][0] for pair in pairs]),
        "throughput": of_pairs([pair[True][0] / pair[False][0] for pair in pairs]),
        "cpu": of_pairs([pair[True][1] / pair[False][1] for pair in pairs]),
        "num_spans": num_spans,
        "others_share": others,
        "pairs": [[*pair[False], *pair[True]] for pair in pairs],
    }


def of_pairs(ratios: Sequence[float]) -> dict[str, float]:
    """Mean of what is left without the highest and lowest tenth, less 1, and its standard error."""
    cut = len(ratios) // 10
    kept = sorted(ratios)[cut : len(ratios) - cut]
    return {"overhead": statistics.fmean(kept) - 1, "error": statistics.stdev(kept) / math.sqrt(len(kept))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=2000, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=31, help="pairs of measurements")
    parser.add_argument("--no-traces", action="store_true", help="metrics alone")
    parser.add_argument("--server", action="store_true", help="of a whole server, for --seconds")
    parser.add_argument("--seconds", type=float, default=400, help="with --server: of all pairs together")
    parser.add_argument("--requests", type=int, default=16, help="with --server: of each run, four at a time")
    parser.add_argument("--side", type=int, default=256, help="with --server: of the images")
    parser.add_argument("--out", type=Path, help="write dated JSON and Markdown there")
    args = parser.parse_args()
    found = of_server(args) if args.server else of_control_process(args)
    report = provenance(sys.argv) | {"settings": {k: str(v) for k, v in vars(args).items()}} | found
    line = server_line(args, report) if args.server else control_line(args, report)
    print(line)
    if args.out is not None:
        name = "observability_cost" if args.server else "metrics_cost"
        text = "\n".join(["# Cost of metrics, page and traces", "", line, "", *source_lines(report)])
        write_report(args.out, name, report, text + "\n")
    return 0


def control_line(args: argparse.Namespace, report: dict[str, Any]) -> str:
    what = "metrics" if args.no_traces else "metrics and traces"
    return (
        f"{args.policy}, {args.ranks} ranks, {args.in_flight} requests alive: "
        f"{report['us_per_task_without']:.1f} us of CPU of the control process per task without {what}, "
        f"{report['us_per_task_with']:.1f} us with; median of {args.rounds} paired runs "
        f"{report['overhead']:+.2%}; a snapshot has {report['snapshot_bytes']} bytes"
    )


def server_line(args: argparse.Namespace, report: dict[str, Any]) -> str:
    time_s, cpu_s = report["throughput"], report["cpu"]
    return (
        f"Metrics, page and traces, {args.policy}, 2 ranks, {report['tasks_per_s']:.0f} tasks per second: "
        f"throughput {-time_s['overhead']:+.2%} (standard error {time_s['error']:.2%}), CPU time of all processes "
        f"{cpu_s['overhead']:+.2%} (standard error {cpu_s['error']:.2%}), means of {report['num_pairs']} paired "
        f"runs of {args.requests} requests without their highest and lowest tenth; target: at most {TARGET:.0%} "
        f"of throughput. {report['num_spans']} spans were exported. Others took {report['others_share']:.0%} of "
        "the machine."
    )


if __name__ == "__main__":
    sys.exit(main())
