"""The headline: published workloads on gfdit's policies, on the stock engine, and on stock replicas, one per rank.

Every server gets the same traces from ``gfdit bench serve``: the GF-DiT paper's two workloads, squeezed to
``--trace-s`` seconds, with deadlines from one cost table per model. Stock runs at a static degree of sequence
parallelism, with guidance on two halves of the ranks, and as a replica on each rank behind HAProxy: with the
least connections, and with one queue for all of them.

What is done is kept in ``--work``, so a run that was cut (``--limit-s``) goes on where it ended. Run it with
``python -m benchmarks.headline``; on a GPU server name the model, its ranks and its sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.quiet import Watch
from gfdit.cli.bench_compare import Compared, largest_difference, picture_sheet
from gfdit.cli.main import main as gfdit
from gfdit.cli.profile import parse_shape
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.replay import ReplayOptions, replay
from gfdit.cli.server_process import ServerError, ServerProcess, free_port, start_server
from gfdit.core import Shape
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.omni.plugin import find_accelerator
from gfdit.sim.compare import Job, PolicyChoice, simulate
from gfdit.sim.estimates import estimate
from gfdit.sim.options import SimulationOptions
from gfdit.sim.trace import TraceRequest, write_trace
from gfdit.sim.workloads import PATTERNS, Workload, generate, workload_classes

WORKLOADS = ("short", "foreground-burst")  # of the paper's main results
ALL = "both"
OURS = "gfdit "
POLICIES = ("triage", "edf", "srtf", "tetriserve", "fcfs")
BASE = f"{OURS}triage"  # what all others are compared with
ONE_QUEUE, LEAST = "replicas, one queue", "replicas, least connections"
TINY_FLAGS = ("--dtype", "float32", "--enforce-eager")
TINY_WIDTH = ("--layers", "4", "--heads", "8", "--head-dim", "64")
METRICS = {
    "in time, %": ("slo_attainment_grace", 100.0, 1),
    "mean, s": ("mean_latency_s", 1.0, 2),
    "p95, s": ("p95_latency_s", 1.0, 2),
    "requests/s": ("throughput_rps", 1.0, 3),
}
CPU_REMARK = (
    "Between CPU ranks stock's collectives go over gloo and it decodes on every rank; gfdit's go over shared "
    "memory and it decodes on one. So stock at SP and CFG is slower here than its schedule alone makes it; by how "
    "much was not separated, and that part foretells nothing about GPUs. Replicas have no collectives: against "
    "them only scheduling counts, and what gfdit itself takes. Router, API servers, control process and client "
    "share the cores with the ranks."
)
OTHER_SEEDS = 100  # those at which loads are chosen begin here
HAPROXY = """\
global
    maxconn 2000
defaults
    mode http
    timeout connect 10s
    timeout client 1h
    timeout server 1h
    timeout queue 1h
    retries 0
frontend front
    bind 127.0.0.1:{port}
    default_backend replicas
backend replicas
    balance leastconn
{servers}
"""


@dataclass(frozen=True, slots=True)
class Model:
    """``name`` is a tiny family or what vLLM-Omni serves; ``grace_s`` is how late still counts as in time."""

    name: str
    shapes: tuple[Shape, ...]
    num_steps: int
    load: float
    grace_s: float
    tiny: bool

    @property
    def folder(self) -> str:
        return self.name.strip("/").replace("/", "_")


# So large that a step takes tens to hundreds of milliseconds of arithmetic on a core.
TINY = {
    "qwen-image": Model("qwen-image", (Shape(128, 128), Shape(192, 192), Shape(256, 256)), 8, 0.9, 0.2, True),
    "wan2.2-t2v-a14b": Model(
        "wan2.2-t2v-a14b", (Shape(96, 96, 5), Shape(96, 96, 9), Shape(160, 160, 9)), 8, 0.9, 0.2, True
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One trace on one server: where its result is kept."""

    model: Model
    server: str
    workload: str
    seed: int
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / self.server.replace(" ", "_").replace(",", "") / f"{self.workload}-{self.seed}.json"

    @property
    def pictures(self) -> Path | None:
        """Of the first trace only."""
        return self.path.with_suffix("") if (self.workload, self.seed) == (WORKLOADS[0], 0) else None


def main() -> int:
    args = parse_args()
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    end_s = time.monotonic() + args.limit_s
    try:
        runs = [run for model in models_of(args) for run in runs_of(model, args)]
        for model in models_of(args):
            prepare(model, args)
        if args.choose_load:
            for model in models_of(args):
                print(simulated_loads(model, args))
            return 0
        measure_all(runs, args, end_s)
    except (ServerError, subprocess.CalledProcessError) as error:
        print(f"headline: {error}", file=sys.stderr)
        return 1
    done = [run for run in runs if run.path.exists()]
    print(f"{len(done)} of {len(runs)} runs are done")
    if len(done) < len(runs) and not args.partial:
        return 0
    report = source | make_report(done, args)
    for path in write_report(args.out, "headline", report, markdown(report)):
        print(path)
    plot(report, args.out / f"headline_{report['date'][:10]}.png")
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", nargs="+", choices=list(TINY), default=list(TINY), help="without --model")
    parser.add_argument("--model", help="a published checkpoint instead, for a GPU server")
    parser.add_argument("--shapes", type=parse_shape, nargs=3, metavar="HxW[xF]", help="small, medium, large")
    parser.add_argument("--steps", type=int, help="denoising steps; default: 8, of --model 50")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), help="of gfdit")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--no-cfg", dest="cfg", action="store_false", help="without guidance, and no stock CFG")
    parser.add_argument("--load", type=float, help="default: the model's own, of --model 0.9")
    parser.add_argument("--seeds", type=int, default=3, help="traces of each workload")
    parser.add_argument("--trace-s", type=float, default=40.0, help="length of a trace")
    parser.add_argument("--grace-s", type=float, help="default: 0.2; of --model 1, of videos 5, as in the paper")
    parser.add_argument(
        "--choose-load", action="store_true", help="only simulate, at several loads on other seeds"
    )
    parser.add_argument("--servers", nargs="+", help="only these, by name")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no trace after that")
    parser.add_argument("--partial", action="store_true", help="report what is there")
    parser.add_argument(
        "--work", type=Path, default=Path("out/headline"), help="checkpoints, traces, results, logs"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="of the report")
    parser.add_argument("vllm", nargs="*", metavar="FLAG", help="for every server, behind --")
    args = parser.parse_args()
    if args.model and not args.shapes:
        parser.error("--model needs --shapes")
    if not shutil.which("haproxy") and not args.choose_load:
        parser.error("HAProxy is needed: it is the router of the replicas")
    return args


def models_of(args: argparse.Namespace) -> list[Model]:
    if args.model:
        video = args.shapes[0].num_frames > 1
        found = [Model(args.model, tuple(args.shapes), 50, 0.9, 5.0 if video else 1.0, False)]
    else:
        found = [TINY[name] for name in args.tiny]
    given = {"num_steps": args.steps, "load": args.load, "grace_s": args.grace_s}
    if args.shapes:
        given["shapes"] = tuple(args.shapes)
    return [replace(one, **{name: value for name, value in given.items() if value is not None}) for one in found]


def server_names(args: argparse.Namespace) -> list[str]:
    names = [f"{OURS}{policy}" for policy in args.policies]
    names += [f"stock SP{args.ranks}", *([stock_cfg(args.ranks)] if args.cfg and args.ranks % 2 == 0 else [])]
    names += [f"{args.ranks} {how}" for how in (LEAST, ONE_QUEUE)]
    return [name for name in names if args.servers is None or name in args.servers]


def stock_cfg(num_ranks: int) -> str:
    return "stock CFG2" + (f" x SP{num_ranks // 2}" if num_ranks > 2 else "")


def runs_of(model: Model, args: argparse.Namespace) -> list[Run]:
    folder = args.work / model.folder
    return [
        Run(model, server, workload, seed, folder)
        for server, workload, seed in product(server_names(args), args.workloads, range(args.seeds))
    ]


# What servers are asked


def prepare(model: Model, args: argparse.Namespace) -> None:
    """The checkpoint, its costs and the traces, as far as they are not there."""
    folder = args.work / model.folder
    folder.mkdir(parents=True, exist_ok=True)
    command = Path(sys.executable).with_name("gfdit")
    if model.tiny and not checkpoint(model, args).exists():
        subprocess.run([command, "tiny-model", model.name, checkpoint(model, args), *TINY_WIDTH], check=True)
    if not (folder / "profiled").exists():
        shapes = [str(shape) for shape in model.shapes]
        argv = [str(command), "profile", str(checkpoint(model, args)), "--ranks", str(args.ranks)]
        argv += ["--model-name", model.name, "--cfg", "on" if args.cfg else "off", "--shape", *shapes]
        argv += ["--out", str(folder / "costs.json"), *(["--max-reps", "12"] if model.tiny else [])]
        subprocess.run([*argv, "--", *flags(model, args)], check=True)
        (folder / "profiled").touch()
    table = CostTable.load(folder / "costs.json")
    for workload, seed in product(args.workloads, range(args.seeds)):
        write_trace(trace_path(folder, workload, seed), make_trace(model, table, workload, seed, model.load, args))


def checkpoint(model: Model, args: argparse.Namespace) -> Path:
    return args.work / model.folder / "model" if model.tiny else Path(model.name)


def flags(model: Model, args: argparse.Namespace) -> list[str]:
    return [*(TINY_FLAGS if model.tiny else ()), *args.vllm]


def trace_path(folder: Path, workload: str, seed: int) -> Path:
    return folder / f"{workload}-{seed}.jsonl"


def make_trace(
    model: Model, table: CostTable, name: str, seed: int, load: float, args: argparse.Namespace
) -> list[TraceRequest]:
    workload = squeezed(PATTERNS[name], args.trace_s)
    classes = workload_classes(workload, TableCostModel(table), num_steps=model.num_steps)
    return generate(workload, classes, num_ranks=args.ranks, seed=seed, load=load)


def squeezed(workload: Workload, duration_s: float) -> Workload:
    """The same phases in another time."""
    ratio = duration_s / workload.duration_s
    return replace(
        workload, phases=tuple(replace(phase, duration_s=ratio * phase.duration_s) for phase in workload.phases)
    )


def simulated_loads(model: Model, args: argparse.Namespace) -> str:
    """Attainment by load, on seeds that are not measured: where policies differ, without looking at results."""
    table = CostTable.load(args.work / model.folder / "costs.json")
    policies = [PolicyChoice(policy) for policy in args.policies]
    policies.append(PolicyChoice("fcfs", (("group_size", str(args.ranks)),)))
    rows = [
        f"{model.name}, simulated, % in time",
        f"{'workload':18} {'load':>5}" + "".join(f"{p.label:>20}" for p in policies),
    ]
    for workload, load in product(args.workloads, (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)):
        cells = []
        for policy in policies:
            met = []
            for seed in range(OTHER_SEEDS, OTHER_SEEDS + 8):
                trace = make_trace(model, table, workload, seed, load, args)
                job = Job(policy, tuple(trace), table, SimulationOptions(args.ranks, run_ahead=1), model.grace_s)
                met.append(simulate(job).result["slo_attainment_grace"])
            cells.append(f"{100 * statistics.fmean(met):>20.1f}")
        rows.append(f"{workload:18} {load:>5g}" + "".join(cells))
    return "\n".join(rows)


# Servers


@contextmanager
def serving(run: Run, args: argparse.Namespace) -> Iterator[str]:
    """The server of ``run``, ready to be asked; its address."""
    model = str(checkpoint(run.model, args))
    log = run.folder / f"{run.path.parent.name}.log"
    with ExitStack() as stack:
        if run.server.startswith(OURS):
            command = ["gfdit", "serve", model, "--ranks", str(args.ranks), "--model-name", run.model.name]
            command += ["--policy", run.server.removeprefix(OURS), "--costs", str(run.folder / "costs.json")]
            command += ["--", *flags(run.model, args)]
            yield stack.enter_context(start_server(command, free_port(), log)).base_url
        elif run.server.endswith((LEAST, ONE_QUEUE)):
            replicas = [
                stack.enter_context(
                    start_server(
                        stock_command(run.model, [], args),
                        free_port(),
                        log.with_suffix(f".{rank}.log"),
                        env=devices(rank),
                    )
                )
                for rank in range(args.ranks)
            ]
            limit = 1 if run.server.endswith(ONE_QUEUE) else None
            yield stack.enter_context(router([replica.port for replica in replicas], limit, log))
        else:
            degree = args.ranks
            options = []
            if run.server == stock_cfg(args.ranks):
                options, degree = ["--cfg-parallel-size", "2"], degree // 2
            options += ["--ulysses-degree", str(degree)] if degree > 1 else []
            command = stock_command(run.model, options, args)
            yield stack.enter_context(start_server(command, free_port(), log)).base_url


def stock_command(model: Model, options: Sequence[str], args: argparse.Namespace) -> list[str]:
    """On a CPU in the ways in which stock runs there."""
    command = ["vllm", "serve", str(checkpoint(model, args)), "--omni", *options]
    if find_accelerator() is None:
        by_step = model.name == "qwen-image"
        command += ["--step-execution"] if by_step else ["--worker-extension-cls", "gfdit.omni.request_mode.OnCpu"]
    return [*command, *flags(model, args)]


def devices(rank: int) -> Mapping[str, str]:
    return {} if find_accelerator() is None else {"CUDA_VISIBLE_DEVICES": str(rank)}


@contextmanager
def router(ports: Sequence[int], limit: int | None, log: Path) -> Iterator[str]:
    """HAProxy before servers on ``ports``: each request to the one with the least under way, or no more than
    ``limit`` to each, the others waiting in one queue."""
    port = free_port()
    config = log.with_suffix(".haproxy")
    config.write_text(haproxy_config(port, ports, limit))
    with log.with_suffix(".haproxy.log").open("wb") as output:
        process = subprocess.Popen(
            ["haproxy", "-db", "-f", str(config)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    with ServerProcess(process, port, log.with_suffix(".haproxy.log")) as server:
        server.wait_healthy(60)
        yield server.base_url


def haproxy_config(port: int, ports: Sequence[int], limit: int | None) -> str:
    most = "" if limit is None else f" maxconn {limit}"
    lines = [f"    server replica{rank} 127.0.0.1:{each}{most}" for rank, each in enumerate(ports)]
    return HAPROXY.format(port=port, servers="\n".join(lines))


# Measuring


def measure_all(runs: Sequence[Run], args: argparse.Namespace, end_s: float) -> None:
    """Servers one after the other, each with all traces that have no result yet."""
    for server in dict.fromkeys((run.model, run.server) for run in runs):
        todo = [run for run in runs if (run.model, run.server) == server and not run.path.exists()]
        if not todo or time.monotonic() > end_s:
            continue
        print(f"{server[0].name}, {server[1]}: {len(todo)} traces", flush=True)
        with serving(todo[0], args) as base_url:
            warm_up(base_url, todo[0], args)
            for run in todo:
                if time.monotonic() <= end_s:
                    measure(run, base_url)


def warm_up(base_url: str, run: Run, args: argparse.Namespace) -> None:
    """Requests of each class, as many at once as there are ranks, twice: every replica gets some."""
    for turn, shape in product(range(2), run.model.shapes):
        requests = [
            TraceRequest(
                f"warm-up-{turn}-{rank}",
                0.0,
                run.model.name,
                shape.height,
                shape.width,
                shape.num_frames,
                2,
                cfg=args.cfg,
                slo_class="warm-up",
            )
            for rank in range(args.ranks)
        ]
        for outcome in replay(requests, ReplayOptions(base_url)):
            if not outcome.completed:
                raise ServerError(f"{run.server}: a warm-up request failed: {outcome.error}")


def measure(run: Run, base_url: str) -> None:
    """With ``gfdit bench serve``; written whole or not at all."""
    run.path.parent.mkdir(parents=True, exist_ok=True)
    part = run.path.with_suffix(".part")
    argv = [
        "bench",
        "serve",
        "--base-url",
        base_url,
        "--trace",
        str(trace_path(run.folder, run.workload, run.seed)),
    ]
    argv += [
        "--label",
        run.server,
        "--grace-s",
        str(run.model.grace_s),
        "--timeout-s",
        "3600",
        "--json",
        str(part),
    ]
    if run.server.startswith(OURS):
        argv.append("--slo")
    if run.pictures:
        argv += ["--images", str(run.pictures)]
    watch = Watch()
    if gfdit(argv) != 0:
        raise ServerError(f"{run.server}: no result of {run.workload}, seed {run.seed}")
    result = json.loads(part.read_text()) | {"others_share": watch.others_share()}
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.rename(run.path)


# The report


def make_report(done: Sequence[Run], args: argparse.Namespace) -> dict[str, Any]:
    models = {}
    for model in dict.fromkeys(run.model for run in done):
        runs = [run for run in done if run.model == model]
        table = CostTable.load(runs[0].folder / "costs.json")
        servers: dict[str, dict[str, dict[str, Any]]] = {}
        for run in runs:
            servers.setdefault(run.server, {})[f"{run.workload}-{run.seed}"] = kept(
                json.loads(run.path.read_text())
            )
        models[model.name] = {
            "shapes": [str(shape) for shape in model.shapes],
            "steps": model.num_steps,
            "load": model.load,
            "grace_s": model.grace_s,
            "profile": table.source,
            "step_ms": step_times_ms(table),
            "servers": servers,
            "pictures": compare_pictures(runs, args),
        }
    return {
        "settings": {
            "ranks": args.ranks,
            "seeds": args.seeds,
            "trace_s": args.trace_s,
            "cfg": args.cfg,
            "workloads": args.workloads,
            "accelerator": find_accelerator(),
        },
        "models": models,
    }


def kept(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of a result file: its numbers, and of requests only what a distribution needs."""
    numbers = {field: result[field] for field, _, _ in METRICS.values()}
    classes = {name: one["slo_attainment_grace"] for name, one in result["per_class"].items()}
    return numbers | {
        "num_requests": result["num_requests"],
        "num_completed": result["num_completed"],
        "in_time_by_class": classes,
        "latencies_s": [None if r["latency_s"] is None else round(r["latency_s"], 3) for r in result["requests"]],
        "client_was_bottleneck": result["client"]["was_bottleneck"],
        "others_share": round(result["others_share"], 3),
        "figures": result.get("server", {}).get("figures"),
        "date": result["source"]["date"],
    }


def step_times_ms(table: CostTable) -> dict[str, dict[str, float]]:
    """By shape and degree; of decoding the least."""
    found: dict[str, dict[str, float]] = {}
    for entry in table.entries:
        name = str(entry.parallel) if entry.task == "denoise" else f"{entry.task}, {entry.parallel}"
        found.setdefault(str(entry.shape), {})[name] = round(1e3 * entry.seconds, 1)
    return found


def compare_pictures(runs: Sequence[Run], args: argparse.Namespace) -> dict[str, Any] | None:
    """How far the pictures of the first trace are from those of the first stock server; a sheet of some beside."""
    servers = [
        Compared(run.server, json.loads(run.path.read_text()), run.pictures)
        for run in runs
        if run.pictures is not None
    ]
    servers.sort(key=lambda server: server.label.startswith(OURS))
    ids = [r["id"] for r in servers[0].result["requests"]] if len(servers) > 1 else []
    ids = [name for name in ids if all(server.picture(name) for server in servers)]
    if not ids:
        return None
    picture_sheet(servers, ids[:6], runs[0].folder / "pictures.png")
    first = servers[0]
    return {
        "reference": first.label,
        "num_pictures": len(ids),
        "differences": {
            other.label: [largest_difference(first.picture(name), other.picture(name)) for name in ids]
            for other in servers[1:]
        },
    }


def by_trace(servers: Mapping[str, Mapping[str, Any]], server: str, workload: str) -> dict[str, dict[str, Any]]:
    """Its results on the traces of ``workload``."""
    return {name: one for name, one in servers[server].items() if workload in (ALL, name.rpartition("-")[0])}


def cell(servers: Mapping[str, Mapping[str, Any]], server: str, workload: str, metric: str) -> str:
    field, scale, digits = METRICS[metric]
    found = [one[field] for one in by_trace(servers, server, workload).values() if one[field] is not None]
    return estimate(found).shown(scale, digits) if found else "-"


def lead(servers: Mapping[str, Mapping[str, Any]], server: str, workload: str) -> str:
    """By how many points the default policy has more in time, trace by trace."""
    base, other = (by_trace(servers, name, workload) if name in servers else {} for name in (BASE, server))
    field = METRICS["in time, %"][0]
    found = [base[name][field] - other[name][field] for name in other if name in base]
    if server == BASE or not found:
        return ""
    return f"{'+' if statistics.fmean(found) >= 0 else ''}{estimate(found).shown(100)}"


def markdown(report: dict[str, Any]) -> str:
    settings = report["settings"]
    workloads = [*settings["workloads"], *([ALL] if len(settings["workloads"]) > 1 else [])]
    guided = " with guidance" if settings["cfg"] else ""
    lines = [
        "# The headline: gfdit against stock, static and replicated",
        "",
        *source_lines(report),
        f"- {settings['ranks']} ranks; {settings['seeds']} traces of {settings['trace_s']:g} s of each workload, "
        "those of the GF-DiT paper squeezed to that time, with its deadlines. ± is a 95 % confidence interval "
        "over traces (Student's t), *lead* by how many points `triage` has more in time, trace by trace",
    ]
    if settings["accelerator"] is None:
        lines += ["", CPU_REMARK]
    for name, model in report["models"].items():
        servers = model["servers"]
        counts = [one["num_requests"] for one in next(iter(servers.values())).values()]
        lines += [
            "",
            f"## {name}",
            "",
            f"{', '.join(model['shapes'])}, {model['steps']} steps{guided}; load {model['load']:g}; "
            f"{min(counts)} to {max(counts)} requests a trace; up to {model['grace_s']:g} s late is in time.",
            "",
            *step_table(model["step_ms"]),
        ]
        for workload in workloads:
            lines += [
                "",
                f"| {workload} | {' | '.join(METRICS)} | lead, points |",
                "|---|" + "---|" * (len(METRICS) + 1),
            ]
            lines += [
                f"| {server} | {' | '.join(cell(servers, server, workload, metric) for metric in METRICS)} | "
                f"{lead(servers, server, workload)} |"
                for server in servers
            ]
        lines += ["", *pictures_lines(model["pictures"]), "", agreement_line(servers)]
        shares = [one["others_share"] for by in servers.values() for one in by.values()]
        lost = sum(one["num_requests"] - one["num_completed"] for by in servers.values() for one in by.values())
        lines += [
            "",
            f"Other processes took {100 * statistics.median(shares):.0f} % of the machine (median; at most "
            f"{100 * max(shares):.0f} %) while a trace ran. {lost} requests failed.",
        ]
    return "\n".join(lines) + "\n"


def step_table(step_ms: Mapping[str, Mapping[str, float]]) -> list[str]:
    columns = list(dict.fromkeys(name for times in step_ms.values() for name in times))
    return [
        f"| ms | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
        *(
            f"| {shape} | {' | '.join(str(times.get(name, '')) for name in columns)} |"
            for shape, times in step_ms.items()
        ),
    ]


def pictures_lines(pictures: Mapping[str, Any] | None) -> list[str]:
    if pictures is None:
        return ["Pictures were not compared."]
    parts = []
    for label, found in pictures["differences"].items():
        known = [value for value in found if value is not None]
        parts.append(f"{label} {known.count(0)} ({max(known, default=0)})")
    return [
        f"Of {pictures['num_pictures']} pictures of the first trace so many have the values of those of "
        f"{pictures['reference']} (in brackets the largest difference of a value, of 255): {', '.join(parts)}."
    ]


def agreement_line(servers: Mapping[str, Mapping[str, Any]]) -> str:
    """Client against server. Behind a router there are only the counts of whichever replica is asked for them."""
    counts: list[float] = []
    means: dict[str, float] = {}
    for server, by in servers.items():
        figures = (
            [] if server.endswith((LEAST, ONE_QUEUE)) else [f for one in by.values() for f in one["figures"] or ()]
        )
        for figure in figures:
            if figure["difference"] is None:
                continue
            if "mean" in figure["figure"]:
                name = f"`{figure['metric']}`"
                means[name] = max(means.get(name, 0.0), abs(figure["difference"]))
            else:
                counts.append(figure["difference"])
    if not counts:
        return "No server told its own counts."
    differ = ", ".join(f"{name} {100 * value:.1f} %" for name, value in means.items())
    return (
        f"Of {len(counts)} counts of the servers {len(counts) - counts.count(0.0)} differ from the client's; "
        f"their mean latencies differ from its own by at most: {differ}."
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """In time, and mean latency: a row of panels each, a panel per model and workload, a bar per server."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(product(report["models"], report["settings"]["workloads"]))
    metrics = ("in time, %", "mean, s")
    figure = Figure(figsize=(1.2 + 3.2 * len(panels), 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(metrics), len(panels), squeeze=False, sharey=True)
    names = list(dict.fromkeys(server for model in report["models"].values() for server in model["servers"]))
    for (row, metric), (column, (model, workload)) in product(enumerate(metrics), enumerate(panels)):
        axes, servers = grid[row][column], report["models"][model]["servers"]
        field, scale, _ = METRICS[metric]
        for at, name in enumerate(names):
            if name not in servers:
                continue
            values = [scale * one[field] for one in by_trace(servers, name, workload).values()]
            axes.barh(at, statistics.fmean(values), color="#4477aa" if name.startswith(OURS) else "#bbbbbb")
            axes.plot(values, [at] * len(values), "k.", ms=4)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(f"{model}: {workload}", loc="left", fontsize=9)
        axes.set_xlabel(f"{metric} (points: single traces)", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
    grid[0][0].invert_yaxis()
    figure.savefig(path, format="png")


if __name__ == "__main__":
    sys.exit(main())
