"""gfdit pinned to FIFO and the full machine against the stock engine at the same static degree, on one trace.

What task-by-task execution costs where it cannot help (the paper's Figure 8): both run one request at a time,
in order of arrival, on both ranks. The ranks have a core each and the tiny model is heavy enough that
computing dominates. Rounds alternate which server goes first; only one is loaded at a time.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gfdit.cli.bench_serve import describe, replay_with_progress
from gfdit.cli.replay import Outcome, ReplayOptions
from gfdit.cli.replay_report import summarize
from gfdit.cli.server_process import ServerError, free_port, start_server
from gfdit.observe.analysis import match_requests
from gfdit.observe.provenance import provenance
from gfdit.observe.timeline import MIGRATE, Span, read_timeline
from gfdit.sim.trace import TraceRequest

NUM_RANKS = 2
TARGET_RATIO = 1.03
STOCK, OURS = "stock", "gfdit"
METRICS = ("mean_latency_s", "p50_latency_s", "p95_latency_s")
VLLM_FLAGS = ("--dtype", "float32", "--enforce-eager")
# No request of a trace has as many steps, so it can be told from them on the timeline.
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Replayed:
    """One server's replays within a round. ``where_s`` is gfdit's mean time per request by part."""

    summary: dict[str, Any]
    load_average: float
    service_s: float
    where_s: dict[str, float]


def main() -> int:
    args = parse_args()
    rounds: list[dict[str, Replayed]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = build_model(Path(scratch), args)
        try:
            interval_s = args.interval_s
            for index in range(args.rounds):
                order = (STOCK, OURS) if index % 2 == 0 else (OURS, STOCK)
                results = {}
                for name in order:
                    print(f"round {index + 1} of {args.rounds}: {name}", flush=True)
                    results[name], interval_s = measure(name, model, folder, args, interval_s)
                    print(f"  {describe(results[name].summary)}", flush=True)
                rounds.append(results)
        except ServerError as error:
            print(f"fifo_vs_stock: {error}", file=sys.stderr)
            return 1
    report = make_report(rounds, args, interval_s)
    for path in write_report(report, args.out):
        print(path)
    print(headline(report))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="each starts both servers once")
    parser.add_argument("--requests", type=int, default=12, help="length of the trace")
    parser.add_argument("--pixels", type=int, nargs="+", default=[256, 320], help="image sizes, mixed evenly")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps of a request")
    parser.add_argument("--load", type=float, default=0.7, help="share of the time the stock engine is busy")
    parser.add_argument("--interval-s", type=float, help="mean time between arrivals, instead of --load")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks of the tiny model")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--quick", action="store_true", help="two rounds of six requests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--logs", type=Path, help="keep the servers' logs and timelines there")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests = 2, 6
    return args


def build_model(folder: Path, args: argparse.Namespace) -> Path:
    model = folder / "model"
    shape = ["--layers", str(args.layers), "--heads", str(args.heads), "--head-dim", str(args.head_dim)]
    gfdit = Path(sys.executable).with_name("gfdit")
    subprocess.run([gfdit, "tiny-model", "qwen-image", model, *shape], check=True)
    return model


def server_command(name: str, model: Path, timeline: Path) -> list[str]:
    if name == STOCK:
        degree = ["--ulysses-degree", str(NUM_RANKS), "--step-execution"]
        return ["vllm", "serve", str(model), "--omni", *degree, *VLLM_FLAGS]
    policy = ["--policy", "fcfs", "--policy-arg", f"group_size={NUM_RANKS}"]
    ours = ["gfdit", "serve", str(model), "--ranks", str(NUM_RANKS), *policy, "--timeline", str(timeline)]
    return [*ours, "--", *VLLM_FLAGS]


def measure(
    name: str, model: Path, folder: Path, args: argparse.Namespace, interval_s: float | None
) -> tuple[Replayed, float]:
    """One server's turn. Where no interval is known yet, it follows from this server's own service time."""
    timeline = folder / "timeline.json"
    with start_server(server_command(name, model, timeline), free_port(), folder / f"{name}.log") as server:
        options = ReplayOptions(server.base_url)
        one_each = [request(f"warm-up-{pixels}", pixels, args.steps, 0.0) for pixels in args.pixels]
        replay_with_progress([replace(r, num_steps=WARM_UP_STEPS) for r in one_each], options, "warm-up")
        alone = [
            outcome
            for r in one_each
            for outcome in replay_with_progress([replace(r, num_steps=r.num_steps + 1)], options, "alone")
        ]
        service_s = statistics.mean(outcome.latency_s for outcome in alone)
        interval_s = interval_s or service_s / args.load
        trace = make_trace(args, interval_s)
        load_average = os.getloadavg()[0]
        outcomes = replay_with_progress(trace, options, name)
    for outcome in outcomes:
        if outcome.error:
            raise ServerError(f"{name}: {outcome.id} failed: {outcome.error}")
    where_s = where_time_goes(read_timeline(timeline), outcomes, args.steps) if name == OURS else {}
    return Replayed(summarize(outcomes, label=name), load_average, service_s, where_s), interval_s


def make_trace(args: argparse.Namespace, interval_s: float) -> list[TraceRequest]:
    """Poisson arrivals, sizes in turn; the same for the same arguments."""
    rng = random.Random(args.seed)
    arrival_s, trace = 0.0, []
    for index in range(args.requests):
        pixels = args.pixels[index % len(args.pixels)]
        trace.append(request(f"r{index:02}", pixels, args.steps, arrival_s))
        arrival_s += rng.expovariate(1 / interval_s)
    return trace


def request(name: str, pixels: int, steps: int, arrival_s: float) -> TraceRequest:
    return TraceRequest(
        id=name,
        arrival_s=arrival_s,
        model="qwen-image",
        height=pixels,
        width=pixels,
        num_frames=1,
        num_steps=steps,
        cfg=False,
        slo_class=str(pixels),
        deadline_s=None,
        priority=0,
    )


def where_time_goes(spans: Sequence[Span], outcomes: Sequence[Outcome], steps: int) -> dict[str, float]:
    """Mean seconds a request spends in each kind of task, between its tasks, and outside the ranks.

    "between tasks" is where the control plane works; "outside" is the queue and everything around the engine.
    """
    finished = sorted(outcomes, key=lambda outcome: outcome.finish_s)
    names = match_requests(spans, [(outcome.id, steps) for outcome in finished])
    latency_s = {outcome.id: outcome.latency_s for outcome in outcomes}
    total_s: dict[str, float] = defaultdict(float)
    for server_id, name in names.items():
        tasks: dict[str, tuple[str, float, float]] = {}
        for span in spans:
            if span.request == server_id and span.kind != MIGRATE:
                _, start_s, end_s = tasks.get(span.task, ("", span.start_s, span.end_s))
                tasks[span.task] = (span.kind, min(start_s, span.start_s), max(end_s, span.end_s))
        for kind, start_s, end_s in tasks.values():
            total_s[kind] += end_s - start_s
        window_s = max(end for _, _, end in tasks.values()) - min(start for _, start, _ in tasks.values())
        total_s["between tasks"] += window_s - sum(end - start for _, start, end in tasks.values())
        total_s["outside"] += latency_s[name] - window_s
    return {part: seconds / len(names) for part, seconds in total_s.items()}


def make_report(
    rounds: Sequence[dict[str, Replayed]], args: argparse.Namespace, interval_s: float | None
) -> dict[str, Any]:
    ratios = {metric: [r[OURS].summary[metric] / r[STOCK].summary[metric] for r in rounds] for metric in METRICS}
    ratios["service_s"] = [r[OURS].service_s / r[STOCK].service_s for r in rounds]
    return {
        **provenance(sys.argv),
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
        "rounds": [
            {
                "first": next(iter(results)),
                **{
                    name: {
                        **{metric: result.summary[metric] for metric in METRICS},
                        "throughput_rps": result.summary["throughput_rps"],
                        "service_s": result.service_s,
                        "load_average_before": result.load_average,
                        "where_s": result.where_s,
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
        f"- Date: {report['date']}, commit {report['commit']}",
        f"- Command: `{report['command']}`",
        f"- Machine: {report['machine']}; "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        f"- {settings['model']} on {settings['ranks']} ranks, one thread each; {settings['requests']} requests of "
        f"{settings['steps']} steps at {' and '.join(f'{p}x{p}' for p in settings['pixels'])}, "
        f"Poisson arrivals {settings['interval_s']:.2f} s apart on average",
        "",
        "| gfdit / stock | median | min | max |",
        "|---|---|---|---|",
    ]
    for metric, values in report["ratios"].items():
        name = {"service_s": "one request alone"}.get(metric, metric.removesuffix("_s").replace("_", " "))
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
    lines += ["", "Where a request's time goes in gfdit (mean over requests, median over rounds):", ""]
    parts = report["rounds"][0][OURS]["where_s"]
    for part in parts:
        seconds = statistics.median(entry[OURS]["where_s"][part] for entry in report["rounds"])
        lines.append(f"- {part}: {seconds * 1e3:.1f} ms")
    return "\n".join(lines) + "\n"


def write_report(report: dict[str, Any], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"fifo_vs_stock_{report['date'][:10]}"
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(report, indent=1) + "\n")
    paths[1].write_text(markdown(report))
    return paths


if __name__ == "__main__":
    sys.exit(main())
