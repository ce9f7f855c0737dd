"""One trace, two servers: stock vLLM-Omni with static sequence parallelism, and gfdit.

Starts both on this machine, one after the other, with a tiny Qwen-Image on four ranks, replays requests of
three sizes over HTTP, and shows how the running requests shared the ranks. Run it with `make demo`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gfdit.cli.bench_serve import replay_with_progress, write_images
from gfdit.cli.replay import Outcome, ReplayOptions
from gfdit.cli.replay_report import summarize
from gfdit.cli.server_process import ServerError, free_port, start_server
from gfdit.core import ExecutionLayout, ParallelSpec
from gfdit.observe.analysis import busiest_moment, degree_history, find_degree_change, match_requests
from gfdit.observe.images import ImagePair, contact_sheet, largest_difference
from gfdit.observe.plot import plot_comparison, plot_timeline
from gfdit.observe.timeline import MIGRATE, Span, TimelineWriter, read_timeline
from gfdit.sim.trace import TraceRequest, write_trace

NUM_RANKS = 4
POLICY = "equipartition"
# Big enough that a step computes for longer than it is organised.
MODEL_OPTIONS = ("--layers", "3", "--heads", "8", "--head-dim", "64")
VLLM_FLAGS = ("--dtype", "float32", "--enforce-eager")
STOCK_FLAGS = ("--ulysses-degree", str(NUM_RANKS), "--step-execution", *VLLM_FLAGS)


@dataclass(frozen=True, slots=True)
class SizeClass:
    pixels: int
    num_steps: int
    deadline_s: float


SIZES = {"S": SizeClass(128, 6, 2.5), "M": SizeClass(192, 8, 5.0), "L": SizeClass(256, 24, 12.0)}
# No request of the trace has as many steps, so it can be told from them on the timeline.
WARM_UP_STEPS = 2
# Bursts around a large request: the others come to share the ranks with it, and leave again.
ARRIVALS = (
    *((0.0, "L"), (0.6, "S"), (0.8, "M"), (1.0, "S")),
    *((7.0, "L"), (7.1, "M"), (7.2, "S"), (7.3, "S")),
    *((14.0, "M"), (14.1, "S"), (14.2, "S"), (14.3, "L")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One replay. ``spans`` is empty for the stock engine, which does not tell what ran where."""

    name: str
    outcomes: list[Outcome]
    spans: list[Span]


def demo_trace() -> list[TraceRequest]:
    return [
        TraceRequest(
            id=f"{name}{number:02}",
            arrival_s=arrival_s,
            model="qwen-image",
            height=SIZES[name].pixels,
            width=SIZES[name].pixels,
            num_frames=1,
            num_steps=SIZES[name].num_steps,
            cfg=False,
            slo_class=name,
            deadline_s=SIZES[name].deadline_s,
            priority=0,
        )
        for number, (arrival_s, name) in enumerate(ARRIVALS, start=1)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for everything it writes")
    parser.add_argument("--only", choices=("stock", "gfdit"), help="run one of the two servers")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    trace = demo_trace()
    write_trace(out / "trace.jsonl", trace)
    try:
        model = build_model(out)
        runs = []
        if args.only != "gfdit":
            command = ["vllm", "serve", str(model), "--omni", *STOCK_FLAGS]
            runs.append(run_server("stock", command, trace, out))
        if args.only != "stock":
            raw = out / "gfdit_server_timeline.json"
            command = ["gfdit", "serve", str(model), "--ranks", str(NUM_RANKS), "--policy", POLICY]
            run = run_server("gfdit", [*command, "--timeline", str(raw), "--", *VLLM_FLAGS], trace, out)
            runs.append(replace(run, spans=named_spans(read_timeline(raw), run.outcomes, trace)))
    except (ServerError, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    report(runs, out)
    return 0 if all(outcome.completed for run in runs for outcome in run.outcomes) else 1


def build_model(out: Path) -> Path:
    """The checkpoint: made once, kept for the next run."""
    model = out / "-".join(["model", *MODEL_OPTIONS[1::2]])
    if not model.exists():
        gfdit = Path(sys.executable).with_name("gfdit")
        subprocess.run([gfdit, "tiny-model", "qwen-image", model, *MODEL_OPTIONS], check=True)
    return model


def run_server(name: str, command: list[str], trace: Sequence[TraceRequest], out: Path) -> Run:
    log = out / f"{name}_server.log"
    print(f"\n{name}: {' '.join(command)}\nstarting (log: {log}) ...", flush=True)
    with start_server(command, free_port(), log) as server:
        print(f"ready after {server.startup_s:.0f} s", flush=True)
        options = ReplayOptions(server.base_url, send_slo=name == "gfdit")
        replay_with_progress(warm_up(trace), options, f"{name}, warm-up")
        outcomes = replay_with_progress(trace, options, name)
    for outcome in outcomes:
        if outcome.error:
            print(f"{outcome.id} failed with status {outcome.status}: {outcome.error}")
    write_images(outcomes, out / f"{name}_images")
    return Run(name, outcomes, [])


def warm_up(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """One short request of each size, so that neither server's first answers pay for its first allocations."""
    first = {request.slo_class: request for request in reversed(trace)}
    return [
        replace(request, id=f"warm-up-{name}", arrival_s=0.0, num_steps=WARM_UP_STEPS, deadline_s=None)
        for name, request in first.items()
    ]


def named_spans(spans: Sequence[Span], outcomes: Sequence[Outcome], trace: Sequence[TraceRequest]) -> list[Span]:
    """The spans under the trace's names, on the replay's clock; the warm-up is left out."""
    steps = {request.id: request.num_steps for request in trace}
    finished = sorted((o for o in outcomes if o.completed), key=lambda outcome: outcome.finish_s)
    names = match_requests(spans, [(outcome.id, steps[outcome.id]) for outcome in finished])
    known = [span for span in spans if span.request in names]
    if not known:
        return []
    shift_s = min(outcome.sent_s for outcome in outcomes) - known[0].start_s
    return [
        replace(
            span,
            request=names[span.request],
            task=span.task.replace(span.request, names[span.request]),
            start_s=span.start_s + shift_s,
            end_s=span.end_s + shift_s,
        )
        for span in known
    ]


def client_spans(outcomes: Sequence[Outcome]) -> list[Span]:
    """What the stock engine must have run when: it serves one request at a time, on all ranks, in order."""
    spans = []
    free_s = 0.0
    layout = tuple(range(NUM_RANKS))
    for outcome in sorted(outcomes, key=lambda outcome: outcome.finish_s):
        start_s = max(free_s, outcome.sent_s)
        free_s = outcome.finish_s
        spans += [
            Span(rank, outcome.id, outcome.id, "request", 0, NUM_RANKS, 1, layout, start_s, outcome.finish_s)
            for rank in layout
        ]
    return spans


def report(runs: Sequence[Run], out: Path) -> None:
    print("\n" + table(runs))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"{NUM_RANKS} ranks share {cores} CPU cores here, and the stock engine decodes on every rank: "
        "read the schedule, not a speed-up."
    )
    paths = [out / "trace.jsonl"]
    by_name = {run.name: run for run in runs}
    stock, ours = by_name.get("stock"), by_name.get("gfdit")
    if stock and ours:
        print(compare_images(stock.outcomes, ours.outcomes))
    paths.append(out / "images.png")
    contact_sheet(image_pairs(stock, ours), paths[-1], title="each request: stock left, gfdit right")
    if ours and ours.spans:
        paths.append(out / "timeline.json")
        write_spans(ours.spans, paths[-1])
        title = f"gfdit, policy {POLICY}: every step of every request is placed on its own"
        if stock:
            top = f"stock vLLM-Omni, static SP{NUM_RANKS}: one request at a time (from the client's times)"
            paths.append(out / "comparison.png")
            panels = {top: client_spans(stock.outcomes), title: ours.spans}
            plot_comparison(panels, paths[-1], num_ranks=NUM_RANKS)
        paths.append(out / "timeline.png")
        plot_timeline(ours.spans, paths[-1], title=title, num_ranks=NUM_RANKS)
        print(what_to_see(ours.spans))
    print("\nWritten (open timeline.json at https://ui.perfetto.dev):")
    for path in paths:
        print(f"  {path}")


def table(runs: Sequence[Run]) -> str:
    rows = [("", "requests/s", "mean latency", "p95 latency", "deadlines met")]
    for run in runs:
        result = summarize(run.outcomes, label=run.name)
        met = sum(outcome.met_deadline() for outcome in run.outcomes)
        mean_s, p95_s = result["mean_latency_s"], result["p95_latency_s"]
        rows.append(
            (
                run.name,
                f"{result['throughput_rps']:.2f}",
                "-" if mean_s is None else f"{mean_s:.2f} s",
                "-" if p95_s is None else f"{p95_s:.2f} s",
                f"{met} of {len(run.outcomes)}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def compare_images(stock: Sequence[Outcome], ours: Sequence[Outcome]) -> str:
    differences = [
        largest_difference(a.image, b.image) for a, b in zip(stock, ours, strict=True) if a.image and b.image
    ]
    if not differences:
        return "Images: nothing to compare."
    same = differences.count(0)
    return (
        f"Images: {same} of {len(differences)} are bit-identical to the stock engine's; "
        f"the largest pixel difference is {max(differences)}/255."
    )


def image_pairs(stock: Run | None, ours: Run | None) -> list[ImagePair]:
    images = [{outcome.id: outcome.image for outcome in run.outcomes} if run else {} for run in (stock, ours)]
    ids = dict.fromkeys(request_id for side in images for request_id in side)
    return [ImagePair(name, images[0].get(name), images[1].get(name)) for name in ids]


def write_spans(spans: Sequence[Span], path: Path) -> None:
    with TimelineWriter(path, NUM_RANKS, base_s=0.0) as writer:
        for span in spans:
            times = (span.start_s, span.end_s)
            if span.kind == MIGRATE:
                writer.record_migration(span.rank, span.task, span.request, span.ranks, *times)
            else:
                layout = ExecutionLayout(span.ranks, ParallelSpec(span.sp, span.cfg))
                writer.record(span.rank, span.task, span.request, span.kind, span.step, layout, *times)


def what_to_see(spans: Sequence[Span]) -> str:
    """One sentence on the timeline, from the timeline."""
    moment = busiest_moment(spans)
    sentence = f"See: at {moment.at_s:.1f} s, {len(moment.ranks_of)} requests run at once on disjoint ranks"
    request = find_degree_change(spans, (1, 2, 4))
    if request is None:
        return f"{sentence}; no request went from 1 to 2 to 4 ranks this time."
    steps = ", ".join(f"SP{degree} from step {step}" for step, degree in degree_history(spans, request))
    return f"{sentence}, and {request} goes from 1 to 2 to 4 ranks between its steps ({steps})."


if __name__ == "__main__":
    sys.exit(main())
