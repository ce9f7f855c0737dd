"""gfdit pinned to FIFO and the full machine against the stock engine at the same static degree, on one trace.

What task-by-task execution costs where it cannot help (the paper's Figure 8): both run one request at a time,
in order of arrival, on both ranks. The ranks have a core each and the tiny model is heavy enough that
computing dominates. Both servers stay up, and while one is measured the other is frozen: rounds are short and
alternate which goes first, so that a disturbance of the machine meets both.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfdit.cli.bench_serve import in_one_line, replay_with_progress
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.replay import Outcome, ReplayOptions
from gfdit.cli.replay_report import summarize
from gfdit.cli.server_process import ServerError, ServerProcess, free_port, start_server
from gfdit.observe.timeline import MIGRATE, Span, read_timeline
from gfdit.sim.trace import TraceRequest

NUM_RANKS = 2
TARGET_RATIO = 1.01
STOCK, OURS = "stock", "gfdit"
METRICS = ("mean_latency_s", "p50_latency_s", "p95_latency_s")
VLLM_FLAGS = ("--dtype", "float32", "--enforce-eager")
# No request of a trace has as many steps, so it can be told from them on the timeline.
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """One server's half of a round. ``alone_s`` is the mean latency of requests sent one after the other."""

    outcomes: list[Outcome]
    summary: dict[str, Any]
    load_average: float
    alone_s: float


Round = dict[str, Measured]


def main() -> int:
    args = parse_args()
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            rounds, interval_s = run_rounds(build_model(Path(scratch), args), folder, args)
        except ServerError as error:
            print(f"fifo_vs_stock: {error}", file=sys.stderr)
            return 1
        outcomes = [outcome for results in rounds for outcome in results[OURS].outcomes]
        where_s = where_time_goes(read_timeline(folder / "timeline.json"), outcomes, args.steps)
    report = source | make_report(rounds, where_s, args, interval_s)
    for path in write_report(args.out, "fifo_vs_stock", report, markdown(report)):
        print(path)
    print(headline(report))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="each measures both servers once")
    parser.add_argument("--requests", type=int, default=8, help="length of the trace of a round")
    parser.add_argument("--pixels", type=int, nargs="+", default=[256, 320], help="image sizes, in turn")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps of a request")
    parser.add_argument("--load", type=float, default=0.7, help="share of the time the stock engine is busy")
    parser.add_argument("--interval-s", type=float, help="mean time between arrivals, instead of --load")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks of the tiny model")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the traces")
    parser.add_argument("--quick", action="store_true", help="two rounds of four requests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--logs", type=Path, help="keep the servers' logs and the timeline there")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests = 2, 4
    return args


def build_model(folder: Path, args: argparse.Namespace) -> Path:
    model = folder / "model"
    shape = ["--layers", str(args.layers), "--heads", str(args.heads), "--head-dim", str(args.head_dim)]
    gfdit = Path(sys.executable).with_name("gfdit")
    subprocess.run([gfdit, "tiny-model", "qwen-image", model, *shape], check=True)
    return model


def run_rounds(model: Path, folder: Path, args: argparse.Namespace) -> tuple[list[Round], float]:
    """Start both servers, warm them up, and measure them in turn. Returns the interval of arrivals too."""
    servers: dict[str, ServerProcess] = {}
    with ExitStack() as stack:
        for name in (STOCK, OURS):
            command = server_command(name, model, folder / "timeline.json")
            server = stack.enter_context(start_server(command, free_port(), folder / f"{name}.log"))
            print(f"{name}: ready after {server.startup_s:.0f} s", flush=True)
            servers[name] = server
            with awake(server):
                ready = one_of_each_size(args, "warm-up", WARM_UP_STEPS)
                play(server, name, [ready, one_of_each_size(args, "again", WARM_UP_STEPS)])
                if name == STOCK:
                    service_s = measure_alone(server, name, args, 0)
        interval_s = args.interval_s or service_s / args.load
        rounds = []
        for number in range(1, args.rounds + 1):
            order = (STOCK, OURS) if number % 2 else (OURS, STOCK)
            results = {name: measure(servers[name], name, args, number, interval_s) for name in order}
            rounds.append(results)
            for name in order:
                print(f"round {number}, {name}: {in_one_line(results[name].summary)}", flush=True)
    return rounds, interval_s


def server_command(name: str, model: Path, timeline: Path) -> list[str]:
    if name == STOCK:
        degree = ["--ulysses-degree", str(NUM_RANKS), "--step-execution"]
        return ["vllm", "serve", str(model), "--omni", *degree, *VLLM_FLAGS]
    policy = ["--policy", "fcfs", "--policy-arg", f"group_size={NUM_RANKS}"]
    ours = ["gfdit", "serve", str(model), "--ranks", str(NUM_RANKS), *policy, "--timeline", str(timeline)]
    return [*ours, "--", *VLLM_FLAGS]


@contextmanager
def awake(server: ServerProcess) -> Iterator[None]:
    server.resume()
    try:
        yield
    finally:
        server.pause()


def measure(
    server: ServerProcess, name: str, args: argparse.Namespace, number: int, interval_s: float
) -> Measured:
    load_average = os.getloadavg()[0]
    with awake(server):
        alone_s = measure_alone(server, name, args, number)
        outcomes = play(server, name, [make_trace(args, number, interval_s)])
    return Measured(outcomes, summarize(outcomes, label=name), load_average, alone_s)


def measure_alone(server: ServerProcess, name: str, args: argparse.Namespace, number: int) -> float:
    """Mean seconds of one request of each size, each sent when the one before it is done."""
    # One step more than the trace's requests have, so that it can be told from them on the timeline.
    requests = one_of_each_size(args, f"alone-{number}", args.steps + 1)
    return statistics.mean(outcome.latency_s for outcome in play(server, name, [[r] for r in requests]))


def play(server: ServerProcess, name: str, traces: Sequence[Sequence[TraceRequest]]) -> list[Outcome]:
    """Replay the traces one after the other; a failed request ends the benchmark."""
    outcomes = [
        outcome
        for trace in traces
        for outcome in replay_with_progress(trace, ReplayOptions(server.base_url), name)
    ]
    for outcome in outcomes:
        if outcome.error:
            raise ServerError(f"{name}: {outcome.id} failed: {outcome.error}")
    return outcomes


def make_trace(args: argparse.Namespace, number: int, interval_s: float) -> list[TraceRequest]:
    """Poisson arrivals, sizes in turn; the same for the same round and arguments."""
    rng = random.Random(f"{args.seed}/{number}")
    arrival_s, trace = 0.0, []
    for index in range(args.requests):
        pixels = args.pixels[index % len(args.pixels)]
        trace.append(request(f"{number}-{index:02}", pixels, args.steps, arrival_s))
        arrival_s += rng.expovariate(1 / interval_s)
    return trace


def one_of_each_size(args: argparse.Namespace, name: str, steps: int) -> list[TraceRequest]:
    return [request(f"{name}-{pixels}", pixels, steps, 0.0) for pixels in args.pixels]


def request(name: str, pixels: int, steps: int, arrival_s: float) -> TraceRequest:
    return TraceRequest(name, arrival_s, "qwen-image", pixels, pixels, 1, steps, slo_class=str(pixels))


def where_time_goes(spans: Sequence[Span], outcomes: Sequence[Outcome], steps: int) -> dict[str, float]:
    """Mean seconds a request of gfdit spends in each kind of task, between its tasks, and outside the ranks.

    "between tasks" is where the control plane works; "outside" is the queue and all around the engine.
    """
    by_name = {outcome.id: outcome for outcome in outcomes}
    # Each round's clock starts anew, but rounds follow each other in the order given.
    done = sorted(outcomes, key=lambda outcome: (int(outcome.id.split("-")[0]), outcome.finish_s))
    tasks = [span for span in spans if span.kind != MIGRATE]
    names = match_requests(tasks, [outcome.id for outcome in done], steps)
    total_s: dict[str, float] = defaultdict(float)
    for server_id, name in names.items():
        parts = time_by_part(tasks, server_id)
        parts["outside"] = by_name[name].latency_s - sum(parts.values())
        for part, seconds in parts.items():
            total_s[part] += seconds
    return {part: seconds / len(names) for part, seconds in total_s.items()}


def match_requests(tasks: Sequence[Span], finished: Sequence[str], num_steps: int) -> dict[str, str]:
    """The server's request ids with the client's, which a server does not learn.

    ``finished`` has the client's ids in the order the answers came: that of the requests' last tasks. Requests
    with another number of steps are left out.
    """
    last_end_s: dict[str, float] = {}
    steps: dict[str, set[int]] = {}
    for span in tasks:
        last_end_s[span.request] = max(span.end_s, last_end_s.get(span.request, span.end_s))
        if span.kind == "denoise":
            steps.setdefault(span.request, set()).add(span.step)
    ended = sorted(last_end_s, key=lambda request: last_end_s[request])
    return dict(zip((name for name in ended if len(steps.get(name, ())) == num_steps), finished, strict=False))


def time_by_part(tasks: Iterable[Span], request: str) -> dict[str, float]:
    """Seconds a request spent in tasks of each kind, and "between tasks" from its first task to its last.

    A task lasts from the first of its ranks to begin to the last one to end.
    """
    ranks_of: dict[str, list[Span]] = {}
    for span in tasks:
        if span.request == request:
            ranks_of.setdefault(span.task, []).append(span)
    times = [
        (members[0].kind, min(span.start_s for span in members), max(span.end_s for span in members))
        for members in ranks_of.values()
    ]
    parts: dict[str, float] = {}
    for kind, start_s, end_s in times:
        parts[kind] = parts.get(kind, 0.0) + end_s - start_s
    if times:
        window_s = max(end_s for _, _, end_s in times) - min(start_s for _, start_s, _ in times)
        parts["between tasks"] = window_s - sum(parts.values())
    return parts


def make_report(
    rounds: Sequence[Round], where_s: dict[str, float], args: argparse.Namespace, interval_s: float
) -> dict[str, Any]:
    ratios = {metric: [r[OURS].summary[metric] / r[STOCK].summary[metric] for r in rounds] for metric in METRICS}
    ratios["alone_s"] = [r[OURS].alone_s / r[STOCK].alone_s for r in rounds]
    return {
        "settings": {
            "ranks": NUM_RANKS,
            "model": f"tiny qwen-image, {args.layers} layers, {args.heads} heads of {args.head_dim}",
            "pixels": args.pixels,
            "steps": args.steps,
            "requests": args.requests,
            "interval_s": interval_s,
            "seed": args.seed,
        },
        "target_mean_latency_ratio": TARGET_RATIO,
        "ratios": {metric: spread(values) | {"rounds": values} for metric, values in ratios.items()},
        "where_s": where_s,
        "rounds": [
            {
                "first": next(iter(results)),
                **{
                    name: {
                        **{metric: result.summary[metric] for metric in METRICS},
                        "throughput_rps": result.summary["throughput_rps"],
                        "alone_s": result.alone_s,
                        "load_average_before": result.load_average,
                    }
                    for name, result in results.items()
                },
            }
            for results in rounds
        ],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def headline(report: dict[str, Any]) -> str:
    ratio = report["ratios"]["mean_latency_s"]
    verdict = "within" if ratio["median"] <= TARGET_RATIO else "above"
    return (
        f"gfdit / stock mean latency: median {ratio['median']:.3f} "
        f"({ratio['min']:.3f} to {ratio['max']:.3f}), {verdict} the target of {TARGET_RATIO}"
    )


def markdown(report: dict[str, Any]) -> str:
    settings = report["settings"]
    lines = [
        "# FIFO and the full machine: gfdit against the stock engine",
        "",
        f"{headline(report)}.",
        "",
        *source_lines(report),
        f"- {settings['model']} on {settings['ranks']} ranks, one thread each; {settings['requests']} requests of "
        f"{settings['steps']} steps at {' and '.join(f'{p}x{p}' for p in settings['pixels'])}, "
        f"Poisson arrivals {settings['interval_s']:.2f} s apart on average",
        "",
        "| gfdit / stock | median | min | max |",
        "|---|---|---|---|",
    ]
    for metric, values in report["ratios"].items():
        name = {"alone_s": "latency of a request sent alone"}.get(
            metric, metric.removesuffix("_s").replace("_", " ")
        )
        lines.append(f"| {name} | {values['median']:.3f} | {values['min']:.3f} | {values['max']:.3f} |")
    lines += [
        "",
        "| round | first | stock mean (s) | gfdit mean (s) | ratio | load average before |",
        "|---|---|---|---|---|---|",
    ]
    for number, entry in enumerate(report["rounds"], start=1):
        stock, ours = entry[STOCK], entry[OURS]
        lines.append(
            f"| {number} | {entry['first']} | {stock['mean_latency_s']:.3f} | {ours['mean_latency_s']:.3f} | "
            f"{ours['mean_latency_s'] / stock['mean_latency_s']:.3f} | "
            f"{stock['load_average_before']:.1f} / {ours['load_average_before']:.1f} |"
        )
    lines += ["", "Where the time of a request of the traces goes in gfdit, on average:", ""]
    lines += [f"- {part}: {seconds * 1e3:.1f} ms" for part, seconds in report["where_s"].items()]
    lines += [
        "",
        "Between CPU ranks the stock engine's collectives go over gloo, and it decodes on every rank; gfdit's go "
        "over shared memory, and it decodes on one. A ratio below 1 most likely comes from there (the two were "
        "not separated) and foretells nothing "
        "about GPUs.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
