"""The simulator against the real engine: the trace of `make demo` under every policy on two CPU ranks.

Profiles a server, replays the trace over HTTP under each policy for a few rounds, and profiles again. The
simulator gets the task times of both profiles, the dispatch latency and jitter they measured, and what a request
takes outside the engine, measured on requests sent alone. Compared are deadlines met and latencies, per policy.
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

from gfdit.cli import profile
from gfdit.cli.bench_serve import replay_with_progress
from gfdit.cli.profile_plan import Effort, Profiler
from gfdit.cli.profile_server import ProfileServer
from gfdit.cli.profile_table import ProfileTable
from gfdit.cli.replay import Outcome, ReplayOptions
from gfdit.cli.server_process import ServerError, ServerProcess, free_port, start_server
from gfdit.core.commands import CompleteRequest
from gfdit.core.cost_file import CostTable
from gfdit.core.events import RequestArrived
from gfdit.core.policy_loading import load_policy
from gfdit.observe.provenance import provenance, write_report
from gfdit.observe.quiet import Quiet
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


@dataclass(frozen=True, slots=True)
class Profiled:
    """A cost table with what else the simulator is told."""

    table: CostTable
    dispatch_latency_s: float
    jitter: float
    others_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """The rounds of one policy. ``overhead_s``: latency minus time in the engine, of requests sent alone.

    ``others_shares``: what other processes took of the machine during each round.
    """

    rounds: list[list[Outcome]]
    overhead_s: dict[str, list[float]]
    others_shares: list[float]


def main() -> int:
    args = parse_args()
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    demo = runpy.run_path(str(DEMO), run_name="demo")
    trace: list[TraceRequest] = demo["demo_trace"]()
    quiet = Quiet(args.max_others, time.monotonic() + args.patience_s)
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            model = demo["build_model"](folder)
            before = run_profile(model, trace, folder, "before", args, quiet)
            replayed = {name: replay_policy(name, model, trace, folder, args, quiet) for name in args.policies}
            after = run_profile(model, trace, folder, "after", args, quiet)
        except (ServerError, subprocess.CalledProcessError) as error:
            print(f"sim_vs_engine: {error}", file=sys.stderr)
            return 1
    report = source | make_report(trace, before, after, replayed, args)
    for path in write_report(args.out, "sim_vs_engine", report, markdown(report)):
        print(path)
    print(headline(report))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="default: all")
    parser.add_argument("--rounds", type=int, default=4, help="replays of the trace under each policy")
    parser.add_argument("--seeds", type=int, default=40, help="simulations of each policy")
    parser.add_argument("--spread", type=float, default=0.01, help="of the profile, see gfdit profile")
    parser.add_argument("--max-reps", type=int, default=60, help="of the profile, see gfdit profile")
    parser.add_argument("--idle", action="store_true", help="profile with the other ranks idle")
    parser.add_argument("--max-others", type=float, default=0.1, help="share of the machine others may take")
    parser.add_argument("--patience-s", type=float, default=0.0, help="how long to wait and repeat for that")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--logs", type=Path, help="keep cost tables, recordings and the servers' logs there")
    args = parser.parse_args()
    for name in args.policies:
        load_policy(name, {})
    return args


# Measuring


def run_profile(
    model: Path, trace: Sequence[TraceRequest], folder: Path, name: str, args: argparse.Namespace, quiet: Quiet
) -> Profiled:
    """The sizes of the trace without guidance, by what `gfdit profile` runs."""
    pixels = dict.fromkeys((request.height, request.width) for request in trace)
    argv = [str(model), "--ranks", str(NUM_RANKS), "--model-name", MODEL, "--cfg", "off"]
    argv += ["--out", str(folder / f"costs-{name}.json"), "--shape", *(f"{h}x{w}" for h, w in pixels)]
    argv += ["--spread", str(args.spread), "--max-reps", str(args.max_reps), *(["--idle"] if args.idle else [])]
    parser = argparse.ArgumentParser()
    profile.configure(parser)
    options = parser.parse_args(argv)
    options.passthrough = list(VLLM_FLAGS)
    effort = Effort(options.spread, options.min_reps, options.max_reps, busy=not options.idle)
    command = profile.server_command(options)

    with ProfileServer(command, folder / f"profile-{name}.log", options.timeout_s) as server:

        def measure() -> None:
            server.samples = Samples()
            options.out.unlink(missing_ok=True)
            table = ProfileTable(options.out, profile.hardware(), "gfdit profile")
            profile.measure(options, Profiler(server, NUM_RANKS, effort), table)

        _, share = quiet.run(measure)
    samples = server.samples
    return Profiled(CostTable.load(options.out), samples.dispatch_latency_s(), samples.jitter(), share)


def replay_policy(
    policy: str, model: Path, trace: Sequence[TraceRequest], folder: Path, args: argparse.Namespace, quiet: Quiet
) -> Replayed:
    recording = folder / f"{policy}.jsonl"
    command = ["gfdit", "serve", str(model), "--ranks", str(NUM_RANKS), "--model-name", MODEL, "--policy", policy]
    command += ["--costs", str(folder / "costs-before.json"), "--record", str(recording), "--", *VLLM_FLAGS]
    each = one_of_each(trace)
    rounds, shares = [], []
    with start_server(command, free_port(), folder / f"{policy}.log") as server:
        play(server, policy, [replace(request, num_steps=2) for request in each])
        alone = [play(server, policy, [request])[0] for _ in range(ALONE) for request in each]
        for _ in range(args.rounds):
            outcomes, share = quiet.run(lambda: play(server, policy, trace))
            rounds.append(outcomes)
            shares.append(share)
    in_engine_s = engine_latencies(recording)[len(each) :]
    overhead_s: dict[str, list[float]] = {}
    for outcome, engine_s in zip(alone, in_engine_s, strict=False):
        overhead_s.setdefault(outcome.slo_class, []).append(outcome.latency_s - engine_s)
    return Replayed(rounds, overhead_s, shares)


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


def merged(before: Profiled, after: Profiled) -> Profiled:
    """What lies between the two profiles; the machine may have become slower or faster from one to the other."""
    entries = tuple(
        replace(one, seconds=(one.seconds * other.seconds) ** 0.5)
        for one, other in zip(before.table.entries, after.table.entries, strict=True)
    )
    latency_s = statistics.mean((before.table.migration_latency_s, after.table.migration_latency_s))
    return Profiled(
        replace(before.table, entries=entries, migration_latency_s=latency_s),
        statistics.mean((before.dispatch_latency_s, after.dispatch_latency_s)),
        statistics.mean((before.jitter, after.jitter)),
    )


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
    trace: Sequence[TraceRequest],
    before: Profiled,
    after: Profiled,
    replayed: dict[str, Replayed],
    args: argparse.Namespace,
) -> dict[str, Any]:
    profiled = merged(before, after)
    samples: dict[str, list[float]] = {}
    for one in replayed.values():
        for name, values in one.overhead_s.items():
            samples.setdefault(name, []).extend(values)
    overhead_s = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "settings": {
            "ranks": NUM_RANKS,
            "rounds": args.rounds,
            "seeds": args.seeds,
            "profile": profiled.table.source.partition(";")[0],
        },
        "targets": {"attainment_error": MAX_ATTAINMENT_ERROR, "latency_error": MAX_LATENCY_ERROR},
        "dispatch_latency_s": profiled.dispatch_latency_s,
        "jitter": profiled.jitter,
        "overhead_s": overhead_s,
        "profile_drift": drift(before.table, after.table),
        "profile_others_shares": [before.others_share, after.others_share],
        "policies": {
            name: compare(trace, one, simulate(name, trace, profiled, overhead_s, args.seeds))
            for name, one in replayed.items()
        },
    }


def drift(before: CostTable, after: CostTable) -> dict[str, float]:
    """Times of the second profile over those of the first."""
    pairs = zip(before.entries, after.entries, strict=True)
    return spread([other.seconds / one.seconds for one, other in pairs if one.task in ("denoise", "decode")])


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
    settings, drifted = report["settings"], report["profile_drift"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    overheads = ", ".join(
        f"{name} {seconds * 1e3:.0f} ms" for name, seconds in sorted(report["overhead_s"].items())
    )
    lines = [
        "# The simulator against the real engine",
        "",
        f"{headline(report)}.",
        "",
        f"- Date: {report['date']}, commit {report['commit']}",
        f"- Command: `{report['command']}`",
        f"- Machine: {report['machine']}; {versions}",
        f"- The trace of the demo on {settings['ranks']} ranks: {settings['rounds']} rounds of the engine over "
        f"HTTP, {settings['seeds']} seeds of the simulator",
        f"- Costs: {settings['profile']}, before and after the rounds. The second time steps and decoding took "
        f"{drifted['median']:.3f} times as long ({drifted['min']:.3f} to {drifted['max']:.3f}); the simulator "
        "gets the geometric mean. Other processes took "
        + " and ".join(f"{share:.0%}" for share in report["profile_others_shares"])
        + " of the machine meanwhile",
        f"- Dispatch latency {report['dispatch_latency_s'] * 1e3:.2f} ms and jitter {report['jitter']:.3f}, as "
        f"profiled; outside the engine a request alone takes: {overheads}",
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
        "The rounds of the engine:",
        "",
        "| policy | deadlines met | median latency (s) | taken by other processes |",
    ]
    lines.append("|---|---|---|---|")
    for name, result in report["policies"].items():
        met, p50_s, shares = zip(*(entry.values() for entry in result["rounds"]), strict=True)
        cells = (
            " ".join(f"{value:.{digits}f}" for value in row) for row, digits in ((met, 2), (p50_s, 2), (shares, 2))
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
