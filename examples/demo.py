"""One trace, two servers: stock vLLM-Omni with static sequence parallelism, and gfdit with its default policy.

Starts both on this machine, one after the other, with a tiny Qwen-Image on four ranks, replays requests of three
sizes over HTTP, and shows what gfdit gains and how the running requests shared the ranks. Run it with `make demo`.
"""

import argparse
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from gfdit.cli.bench_serve import replay_with_progress, write_images
from gfdit.cli.replay import Outcome, ReplayOptions
from gfdit.cli.replay_report import summarize
from gfdit.cli.server_process import ServerError, ServerProcess, free_port, start_server
from gfdit.core.events import RequestArrived
from gfdit.observe.recording import RecordingReader, TimedEvent
from gfdit.observe.timeline import Span, read_timeline
from gfdit.sim.timeline_plot import plot_comparison
from gfdit.sim.trace import TraceRequest, write_trace

NUM_RANKS = 4
# Big enough that a step computes for longer than it is organised.
MODEL_OPTIONS = ("--layers", "3", "--heads", "8", "--head-dim", "64")
VLLM_FLAGS = ("--dtype", "float32", "--enforce-eager")
STOCK_FLAGS = ("--ulysses-degree", str(NUM_RANKS), "--step-execution", *VLLM_FLAGS)
STOCK, OURS = "stock", "gfdit"


@dataclass(frozen=True, slots=True)
class SizeClass:
    pixels: int
    num_steps: int


SIZES = {"S": SizeClass(128, 6), "M": SizeClass(192, 8), "L": SizeClass(256, 24)}
# A request's deadline is so many times what its steps take on the stock server when it is alone there.
SLO_SCALE = 3.0
# Bursts of L, M, S and S. The unit is what the stock server needs for one: it could just keep up.
ARRIVALS = (
    *((0.0, "L"), (0.1, "S"), (0.12, "M"), (0.15, "S")),
    *((1.0, "L"), (1.02, "M"), (1.04, "S"), (1.06, "S")),
    *((2.0, "M"), (2.02, "S"), (2.04, "S"), (2.06, "L")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for everything it writes")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    timeline, recording = out / "timeline.json", out / "recording.jsonl"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: ended"))  # so that its server ends, too
    stock_command = ["vllm", "serve", "MODEL", "--omni", *STOCK_FLAGS]
    command = ["gfdit", "serve", "MODEL", "--ranks", str(NUM_RANKS), "--timeline", str(timeline)]
    command += ["--record", str(recording), "--", *VLLM_FLAGS]
    try:
        model = build_model(out)
        with serve(STOCK, model, stock_command, out) as server:
            trace = demo_trace(measure_steps(server, STOCK))
            stock = play(server, STOCK, trace)
        with serve(OURS, model, command, out) as server:
            measure_steps(server, OURS)  # only for the same start: both servers have made every size twice
            ours = play(server, OURS, trace)
    except (ServerError, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    write_trace(out / "trace.jsonl", trace)
    report(stock, ours, named_spans(read_timeline(timeline), client_ids(recording), ours), out)
    return 0


def demo_trace(step_s: Mapping[str, float]) -> list[TraceRequest]:
    """All times follow from what a step of each size takes, so that a slow or busy machine is asked the same."""
    alone_s = {name: size.num_steps * step_s[name] for name, size in SIZES.items()}
    burst_s = alone_s["L"] + alone_s["M"] + 2 * alone_s["S"]
    return [
        replace(request(name, f"{name}{number:02}"), arrival_s=at * burst_s, deadline_s=SLO_SCALE * alone_s[name])
        for number, (at, name) in enumerate(ARRIVALS, start=1)
    ]


def request(size: str, name: str) -> TraceRequest:
    pixels = SIZES[size].pixels
    return TraceRequest(name, 0.0, "qwen-image", pixels, pixels, 1, SIZES[size].num_steps, slo_class=size)


def build_model(out: Path) -> Path:
    """The checkpoint: made once, kept for the next run."""
    model = out / "-".join(["model", *MODEL_OPTIONS[1::2]])
    if not model.exists():
        gfdit = Path(sys.executable).with_name("gfdit")
        subprocess.run([gfdit, "tiny-model", "qwen-image", model, *MODEL_OPTIONS], check=True)
    return model


def serve(name: str, model: Path, command: Sequence[str], out: Path) -> ServerProcess:
    command = [str(model) if word == "MODEL" else word for word in command]
    log = out / f"{name}_server.log"
    print(f"\n{name}: {' '.join(command)}\nstarting (log: {log}) ...", flush=True)
    server = start_server(command, free_port(), log)
    print(f"ready after {server.startup_s:.0f} s", flush=True)
    return server


def measure_steps(server: ServerProcess, name: str) -> dict[str, float]:
    """Seconds per step of each size, its share of encoding and decoding included, of a request that is alone.

    The faster of two: the first one pays for the server's first allocations.
    """
    took_s: dict[str, list[float]] = {}
    for size in (*SIZES, *SIZES):
        took_s.setdefault(size, []).append(play(server, name, [request(size, f"{size}-alone")])[0].latency_s)
    return {size: min(seconds) / SIZES[size].num_steps for size, seconds in took_s.items()}


def play(server: ServerProcess, name: str, trace: Sequence[TraceRequest]) -> list[Outcome]:
    """A failed request ends the demo. Only gfdit is told deadlines, and as a class the name: it is recorded."""
    title = f"{name}, {trace[0].id}" if len(trace) == 1 else name
    trace = [replace(request, slo_class=request.id) for request in trace]
    outcomes = replay_with_progress(trace, ReplayOptions(server.base_url, send_slo=name == OURS), title)
    for outcome in outcomes:
        if not outcome.completed:
            raise ServerError(f"{outcome.id} failed with status {outcome.status}: {outcome.error}")
    return outcomes


def client_ids(recording: Path) -> dict[str, str]:
    """The client's names of requests by those of the server, which knows them as classes."""
    with RecordingReader(recording) as reader:
        events = [entry.event for entry in reader.entries() if isinstance(entry, TimedEvent)]
    return {event.request.id: event.request.slo_class for event in events if isinstance(event, RequestArrived)}


def named_spans(spans: Sequence[Span], names: Mapping[str, str], outcomes: Sequence[Outcome]) -> list[Span]:
    """Those of the trace's requests, under the client's names and on the client's clock."""
    wanted = {outcome.id for outcome in outcomes}
    spans = [replace(span, request=names[span.request]) for span in spans if names.get(span.request) in wanted]
    shift_s = min(outcome.sent_s for outcome in outcomes) - min(span.start_s for span in spans)
    return [replace(span, start_s=span.start_s + shift_s, end_s=span.end_s + shift_s) for span in spans]


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


def report(stock: Sequence[Outcome], ours: Sequence[Outcome], spans: Sequence[Span], out: Path) -> None:
    print("\n" + table(stock, ours))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"A deadline is {SLO_SCALE:g} times what the request takes alone on the stock server.\n"
        f"{NUM_RANKS} ranks share {cores} CPU cores here, and the stock engine decodes on every rank: "
        "read the schedule, not a speed-up."
    )
    print(f"{compare_images(stock, ours)}\n{most_changes(spans)}")
    titles = (
        f"stock vLLM-Omni, static SP{NUM_RANKS}: one request at a time (from the client's times)",
        "gfdit: every step of every request is placed on its own",
    )
    panels = dict(zip(titles, (client_spans(stock), spans), strict=True))
    plot_comparison(panels, out / "timeline.png", num_ranks=NUM_RANKS)
    contact_sheet(stock, ours, out / "images.png")
    for name, outcomes in ((STOCK, stock), (OURS, ours)):
        write_images(outcomes, out / f"{name}_images")
    print(f"\nIn {out}: timeline.png, images.png, trace.jsonl; open timeline.json at https://ui.perfetto.dev")


def table(stock: Sequence[Outcome], ours: Sequence[Outcome]) -> str:
    """The two servers side by side, and in words what changes from one to the other."""
    before, after = (summarize(outcomes, label="") for outcomes in (stock, ours))
    met = [sum(outcome.met_deadline() for outcome in outcomes) for outcomes in (stock, ours)]
    rows = [
        ("", "stock", "gfdit", ""),
        ("deadlines met", *(f"{count} of {len(stock)}" for count in met), f"{met[1] - met[0]:+d}"),
    ]
    for title, key in (("mean latency", "mean_latency_s"), ("95th percentile of latency", "p95_latency_s")):
        ratio = after[key] / before[key]
        rows.append((title, f"{before[key]:.2f} s", f"{after[key]:.2f} s", f"{ratio:.2f} times stock's"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def compare_images(stock: Sequence[Outcome], ours: Sequence[Outcome]) -> str:
    pairs = [[np.asarray(picture(o), dtype=np.int16) for o in pair] for pair in zip(stock, ours, strict=True)]
    differences = [int(abs(one - other).max()) for one, other in pairs]
    return (
        f"Images: {differences.count(0)} of {len(pairs)} are bit-identical to the stock engine's; "
        f"the largest pixel difference is {max(differences)}/255."
    )


def contact_sheet(stock: Sequence[Outcome], ours: Sequence[Outcome], path: Path) -> None:
    """The stock engine's images, and gfdit's below them."""
    side, top = 128, 20
    sheet = Image.new("RGB", (len(stock) * side, top + 2 * side), "white")
    for column, pair in enumerate(zip(stock, ours, strict=True)):
        ImageDraw.Draw(sheet).text((column * side + 4, 4), f"{pair[0].id}: stock, gfdit", fill="black")
        for row, outcome in enumerate(pair):
            sheet.paste(picture(outcome).resize((side, side)), (column * side, top + row * side))
    sheet.save(path)


def picture(outcome: Outcome) -> Image.Image:
    assert outcome.image is not None
    return Image.open(io.BytesIO(outcome.image)).convert("RGB")


def most_changes(spans: Sequence[Span]) -> str:
    """One sentence on the request whose parallelism changed most often."""
    degrees: dict[str, dict[int, int]] = {}
    for span in spans:
        if span.kind == "denoise":
            degrees.setdefault(span.request, {})[span.step] = span.sp
    runs = {
        name: [(degree, next(steps)[0]) for degree, steps in groupby(sorted(by_step.items()), key=lambda s: s[1])]
        for name, by_step in degrees.items()
    }
    name = max(runs, key=lambda name: len(runs[name]))
    listed = ", ".join(f"SP{degree} from step {step}" for degree, step in runs[name])
    return f"{name} changed its parallelism {len(runs[name]) - 1} times while it ran: {listed}."


if __name__ == "__main__":
    sys.exit(main())
