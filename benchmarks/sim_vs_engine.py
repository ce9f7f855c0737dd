"""The simulator against the real engine: the trace of `make demo` under every policy on two CPU ranks.

Replays the trace over HTTP under each policy for a few rounds. Between them a second server is profiled, since
the speed of a shared machine changes from minute to minute. The simulator gets the task times of a policy's own
profile, the dispatch latency and jitter measured with them, and what a request takes outside the engine, measured
on requests sent alone. Compared are deadlines met and latencies, per policy.

A second simulation gets the mean task times of the rounds themselves: what is left then is the simulator's own
error, not that of costs measured some seconds before and after. Run with ``python -m benchmarks.sim_vs_engine``.
"""

import argparse
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.quiet import Quiet
from gfdit.cli import profile
from gfdit.cli.bench_serve import replay_with_progress
from gfdit.cli.profile_plan import Effort, Profiler
from gfdit.cli.profile_server import ProfileServer
from gfdit.cli.profile_table import ProfileTable
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.replay import Outcome, ReplayOptions
from gfdit.cli.server_process import ServerError, ServerProcess, free_port, start_server
from gfdit.core import Shape
from gfdit.core.commands import CompleteRequest
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import CostKey
from gfdit.core.events import RequestArrived
from gfdit.core.policy.loading import load_policy
from gfdit.observe.recording import RecordingReader, TimedEvent
from gfdit.observe.samples import Samples
from gfdit.sim.simulator import SimulationOptions, Simulator
from gfdit.sim.trace import TraceRequest

NUM_RANKS = 2
MODEL = "qwen-image"
POLICIES = ("fcfs", "equipartition", "static", "srtf", "edf", "rssp", "tetriserve", "triage")
MAX_ATTAINMENT_ERROR = 0.03
MAX_LATENCY_ERROR = 0.10
ALONE = 3  # requests of each size sent alone
VLLM_FLAGS = ("--dtype", "float32", "--enforce-eager")
DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
DEMO_STEP_S = {"S": 0.14, "M": 0.21, "L": 0.165}  # which the demo measures; fixed here, so that runs compare


@dataclass(frozen=True, slots=True)
class Profiled:
    """A cost table with what else the simulator is told."""

    table: CostTable
    dispatch_latency_s: float
    jitter: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """The rounds of one policy, what was profiled before, between and after them, and their own task times.

    ``overhead_s``: latency minus time in the engine, of requests sent alone. ``others_shares``: what other
    processes took of the machine during each round.
    """

    rounds: list[list[Outcome]]
    overhead_s: dict[str, list[float]]
    others_shares: list[float]
    profiled: Profiled
    own: Profiled


def main() -> int:
    args = parse_args()
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    demo = runpy.run_path(str(DEMO), run_name="demo")
    trace: list[TraceRequest] = demo["demo_trace"](DEMO_STEP_S)
    quiet = Quiet(args.max_others, time.monotonic() + args.patience_s)
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            model = demo["build_model"](folder)
            with profile_server(model, folder) as server:
                costs = folder / "costs.json"
                profiler = profile_trace(server, trace, costs)
                replayed = {
                    name: replay_policy(name, model, trace, folder, args, quiet, profiler)
                    for name in args.policies
                }
                first = CostTable.load(costs)
        except (ServerError, subprocess.CalledProcessError) as error:
            print(f"sim_vs_engine: {error}", file=sys.stderr)
            return 1
    report = source | make_report(trace, first, replayed, args)
    for path in write_report(args.out, "sim_vs_engine", report, markdown(report)):
        print(path)
    print(headline(report))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="default: all")
    parser.add_argument("--rounds", type=int, default=4, help="replays of the trace under each policy")
    parser.add_argument("--seeds", type=int, default=40, help="simulations of each policy")
    parser.add_argument("--max-others", type=float, default=0.1, help="share of the machine others may take")
    parser.add_argument("--patience-s", type=float, default=0.0, help="how long to wait and repeat for that")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--logs", type=Path, help="keep cost tables, recordings and the servers' logs there")
    args = parser.parse_args()
    for name in args.policies:
        load_policy(name, {})
    return args


# Measuring


def profile_options(model: Path, trace: Sequence[TraceRequest], out: Path) -> argparse.Namespace:
    """Of `gfdit profile`, for the sizes of the trace without guidance."""
    pixels = dict.fromkeys((request.height, request.width) for request in trace)
    argv = [str(model), "--ranks", str(NUM_RANKS), "--model-name", MODEL, "--cfg", "off", "--out", str(out)]
    argv += ["--shape", *(f"{h}x{w}" for h, w in pixels)] if pixels else []
    parser = argparse.ArgumentParser()
    profile.configure(parser)
    options = parser.parse_args(argv)
    options.passthrough = list(VLLM_FLAGS)
    return options


def profile_server(model: Path, folder: Path) -> ProfileServer:
    options = profile_options(model, [], folder)
    return ProfileServer(profile.server_command(options), folder / "profile.log", options.timeout_s)


def profile_trace(server: ProfileServer, trace: Sequence[TraceRequest], out: Path) -> Profiler:
    """Run `gfdit profile` on a server that is up."""
    options = profile_options(Path(), trace, out)
    profiler = Profiler(server, NUM_RANKS, Effort(options.spread, options.min_reps, options.max_reps, busy=True))
    profile.measure(options, profiler, ProfileTable(out, profile.hardware(), "gfdit profile"))
    return profiler


def replay_policy(
    policy: str,
    model: Path,
    trace: Sequence[TraceRequest],
    folder: Path,
    args: argparse.Namespace,
    quiet: Quiet,
    profiler: Profiler,
) -> Replayed:
    recording = folder / f"{policy}.jsonl"
    first = folder / "costs.json"
    command = ["gfdit", "serve", str(model), "--ranks", str(NUM_RANKS), "--model-name", MODEL, "--policy", policy]
    command += ["--costs", str(first), "--record", str(recording), "--", *VLLM_FLAGS]
    each = one_of_each(trace)
    rounds, shares = [], []
    samples = profiler.server.samples = Samples()
    kinds = [kind for r in each if (kind := profiler.explore(Shape(r.height, r.width), cfg=False))]
    specs = list(dict.fromkeys(key.parallel for kind in kinds for key in kind.keys((1,))))
    with start_server(command, free_port(), folder / f"{policy}.log") as server:
        play(server, policy, [replace(request, num_steps=2) for request in each])
        alone = [play(server, policy, [request])[0] for _ in range(ALONE) for request in each]
        for index in range(args.rounds + 1):
            for spec in specs:
                profiler.run_mix(spec, kinds)
            if index < args.rounds:
                outcomes, share = quiet.run(lambda: play(server, policy, trace))
                rounds.append(outcomes)
                shares.append(share)
    table = ProfileTable(first, profile.hardware(), "gfdit profile")
    for key in table.entries:
        table.add(key, samples)
    costs = replace(CostTable.load(first), entries=tuple(table.entries.values()))
    overhead_s: dict[str, list[float]] = {}
    for outcome, engine_s in zip(alone, engine_latencies(recording)[len(each) :], strict=False):
        overhead_s.setdefault(outcome.slo_class, []).append(outcome.latency_s - engine_s)
    profiled = Profiled(costs, samples.dispatch_latency_s(), samples.jitter())
    own = own_times(recording, costs, skip=len(each) * (1 + ALONE))
    return Replayed(rounds, overhead_s, shares, profiled, own)


def own_times(recording: Path, costs: CostTable, skip: int) -> Profiled:
    """``costs`` with the mean times of the tasks in a recording, without its first ``skip`` requests."""
    samples, num_arrived = Samples(), 0
    with RecordingReader(recording) as reader:
        for entry in reader.entries():
            if isinstance(entry, TimedEvent) and isinstance(entry.event, RequestArrived):
                num_arrived += 1
                if num_arrived == skip + 1:
                    samples.task_s.clear()
                    samples.overhead_s.clear()
            samples.add([entry])
    entries = []
    for cost in costs.entries:
        key = CostKey(cost.model, cost.task, cost.shape, cost.cfg, cost.parallel, cost.batch)
        measured_s = samples.task_s.get(key)
        entries.append(replace(cost, seconds=statistics.fmean(measured_s)) if measured_s else cost)
    return Profiled(replace(costs, entries=tuple(entries)), samples.dispatch_latency_s(), samples.jitter())


def one_of_each(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The first request of each class, to be sent at once and without a deadline."""
    first = {request.slo_class: request for request in reversed(trace)}
    return [replace(request, arrival_s=0.0, deadline_s=None) for request in first.values()]


def play(server: ServerProcess, title: str, trace: Sequence[TraceRequest]) -> list[Outcome]:
    """Replay with deadlines; a failed request ends the benchmark."""
    outcomes = replay_with_progress(trace, ReplayOptions(server.base_url, send_slo=True), title)
    for outcome in outcomes:
        if outcome.error:
            raise ServerError(f"{title}: {outcome.id} failed: {outcome.error}")
    return outcomes


def engine_latencies(recording: Path) -> list[float]:
    """Seconds from arrival at the engine to completion there, in the order of arrival."""
    arrived_s: dict[str, float] = {}
    done_s: dict[str, float] = {}
    now_s = 0.0
    with RecordingReader(recording) as reader:
        for entry in reader.entries():
            if isinstance(entry, TimedEvent):
                now_s = entry.now_s
                if isinstance(entry.event, RequestArrived):
                    arrived_s[entry.event.request.id] = entry.event.request.arrival_s
            elif isinstance(entry, CompleteRequest):
                done_s[entry.request_id] = now_s
    return [done_s[name] - arrived_s[name] for name in arrived_s]


# Simulating


def simulate(
    policy: str, trace: Sequence[TraceRequest], profiled: Profiled, overhead_s: dict[str, float], num_seeds: int
) -> list[list[float]]:
    """Latencies of the requests, in the order of the trace, by seed."""
    runs = []
    for seed in range(num_seeds):
        # The server runs ahead by default.
        options = SimulationOptions(NUM_RANKS, profiled.dispatch_latency_s, profiled.jitter, seed, run_ahead=1)
        done = Simulator(load_policy(policy, {}), profiled.table, trace, options).run()
        if lost := [request.trace.id for request in done.requests if request.latency_s is None]:
            raise ServerError(f"{policy}: {lost[0]} did not complete in the simulation")
        runs.append(
            [r.latency_s + overhead_s[r.trace.slo_class] for r in done.requests if r.latency_s is not None]
        )
    return runs


# Comparing


def make_report(
    trace: Sequence[TraceRequest], first: CostTable, replayed: dict[str, Replayed], args: argparse.Namespace
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {}
    for one in replayed.values():
        for name, values in one.overhead_s.items():
            samples.setdefault(name, []).extend(values)
    overhead_s = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "settings": {"ranks": NUM_RANKS, "rounds": args.rounds, "seeds": args.seeds},
        "targets": {"attainment_error": MAX_ATTAINMENT_ERROR, "latency_error": MAX_LATENCY_ERROR},
        "overhead_s": overhead_s,
        "policies": {
            name: {
                **compare(trace, one, simulate(name, trace, one.profiled, overhead_s, args.seeds)),
                "own_times": in_short(trace, simulate(name, trace, one.own, overhead_s, args.seeds)),
                "dispatch_latency_s": one.profiled.dispatch_latency_s,
                "jitter": one.profiled.jitter,
                "speed": drift(first, one.profiled.table),
            }
            for name, one in replayed.items()
        },
    }


def drift(first: CostTable, table: CostTable) -> dict[str, float]:
    """Times of a policy's profile over those of the first one."""
    first_s = {(e.task, e.shape, e.parallel): e.seconds for e in first.entries}
    ratios = [e.seconds / first_s[e.task, e.shape, e.parallel] for e in table.entries]
    kinds = ("denoise", "decode")
    return spread([ratio for ratio, e in zip(ratios, table.entries, strict=True) if e.task in kinds])


def compare(trace: Sequence[TraceRequest], engine: Replayed, simulated: list[list[float]]) -> dict[str, Any]:
    """Errors are simulated minus real, latencies relative to the real ones."""
    real = [[outcome.latency_s for outcome in outcomes] for outcomes in engine.rounds]
    real_met = [attainment(trace, latencies) for latencies in real]
    simulated_met = statistics.mean(attainment(trace, latencies) for latencies in simulated)
    real_p50_s, simulated_p50_s = (statistics.median(map(statistics.median, runs)) for runs in (real, simulated))
    by_request = [
        statistics.median(ours) / statistics.median(theirs) - 1
        for ours, theirs in zip(zip(*simulated, strict=True), zip(*real, strict=True), strict=True)
    ]
    return {
        "attainment": {"engine": statistics.mean(real_met), "simulator": simulated_met},
        "attainment_error": simulated_met - statistics.mean(real_met),
        "p50_latency_s": {"engine": real_p50_s, "simulator": simulated_p50_s},
        "p50_latency_error": simulated_p50_s / real_p50_s - 1,
        "median_request_error": statistics.median(map(abs, by_request)),
        "request_errors": {request.id: error for request, error in zip(trace, by_request, strict=True)},
        "rounds": [
            {"attainment": met, "p50_latency_s": statistics.median(latencies), "others_share": share}
            for met, latencies, share in zip(real_met, real, engine.others_shares, strict=True)
        ],
    }


def in_short(trace: Sequence[TraceRequest], simulated: list[list[float]]) -> dict[str, float]:
    return {
        "attainment": statistics.mean(attainment(trace, latencies) for latencies in simulated),
        "p50_latency_s": statistics.median(map(statistics.median, simulated)),
    }


def attainment(trace: Sequence[TraceRequest], latencies_s: Sequence[float]) -> float:
    pairs = zip(trace, latencies_s, strict=True)
    return statistics.mean(r.deadline_s is None or latency_s <= r.deadline_s for r, latency_s in pairs)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def within_targets(result: dict[str, Any]) -> bool:
    errors = (abs(result["p50_latency_error"]), result["median_request_error"])
    return abs(result["attainment_error"]) <= MAX_ATTAINMENT_ERROR and max(errors) <= MAX_LATENCY_ERROR


def headline(report: dict[str, Any]) -> str:
    missed = [name for name, result in report["policies"].items() if not within_targets(result)]
    verdict = "every policy is within them" if not missed else f"outside: {', '.join(missed)}"
    return (
        f"Targets: deadlines met within {MAX_ATTAINMENT_ERROR:.0%} of the requests, median latency within "
        f"{MAX_LATENCY_ERROR:.0%}; {verdict}"
    )


def markdown(report: dict[str, Any]) -> str:
    settings = report["settings"]
    overheads = ", ".join(
        f"{name} {seconds * 1e3:.0f} ms" for name, seconds in sorted(report["overhead_s"].items())
    )
    lines = [
        "# The simulator against the real engine",
        "",
        f"{headline(report)}.",
        "",
        *source_lines(report),
        f"- The trace of the demo on {settings['ranks']} ranks: {settings['rounds']} rounds of the engine over "
        f"HTTP, {settings['seeds']} seeds of the simulator",
        "- Costs: what `gfdit profile` runs, on a second server, before, between and after the rounds of a policy",
        f"- Outside the engine a request alone takes: {overheads}",
        "",
        "Errors are simulator minus engine. The last column is the median over the requests of how far the median "
        "simulated latency of a request is from its median real one.",
        "",
        "| policy | deadlines met | simulated | error | median latency (s) | simulated | error | of a request |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in report["policies"].items():
        met, p50_s = result["attainment"], result["p50_latency_s"]
        lines.append(
            f"| {name} | {met['engine']:.1%} | {met['simulator']:.1%} | {result['attainment_error']:+.1%} | "
            f"{p50_s['engine']:.3f} | {p50_s['simulator']:.3f} | {result['p50_latency_error']:+.1%} | "
            f"{result['median_request_error']:.1%} |"
        )
    lines += [
        "",
        "The same with the mean task times of the rounds themselves, which leave the simulator's own error:",
        "",
        "| policy | deadlines met | error | median latency (s) | error |",
        "|---|---|---|---|---|",
    ]
    for name, result in report["policies"].items():
        own, met, p50_s = result["own_times"], result["attainment"]["engine"], result["p50_latency_s"]["engine"]
        lines.append(
            f"| {name} | {own['attainment']:.1%} | {own['attainment'] - met:+.1%} | {own['p50_latency_s']:.3f} | "
            f"{own['p50_latency_s'] / p50_s - 1:+.1%} |"
        )
    lines += [
        "",
        "The rounds of the engine, what other processes took of the machine, and the profile that belongs to "
        "them: times of steps and decoding relative to a first profile (median, least, most), latency and jitter.",
        "",
        "| policy | deadlines met | median latency (s) | others | relative times | dispatch latency | jitter |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in report["policies"].items():
        met, p50_s, shares = zip(*(entry.values() for entry in result["rounds"]), strict=True)
        cells = [" ".join(f"{value:.2f}" for value in row) for row in (met, p50_s, shares)]
        speed = " ".join(f"{value:.2f}" for value in result["speed"].values())
        latency_ms = result["dispatch_latency_s"] * 1e3
        cells += [speed, f"{latency_ms:.2f} ms", f"{result['jitter']:.3f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
