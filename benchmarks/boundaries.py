"""How long a rank idles between two steps of a request that stays where it is, with run-ahead on and off.

Two servers of one tiny model, alike but for ``--run-ahead``, take turns: while one is measured the other is
frozen, and who goes first alternates. Requests come one after the other; the gaps are read from the servers'
timelines. With ``--api-load`` each round measures a second time while other clients poll ``/metrics`` without a
pause and decode large images: that keeps the API server busy, which must not delay a dispatch.
"""

import argparse
import io
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from PIL import Image

from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.replay import ReplayOptions, replay
from gfdit.cli.server_process import ServerError, ServerProcess, free_port, start_server
from gfdit.observe.timeline import MIGRATE, Span, read_timeline
from gfdit.sim.trace import TraceRequest

TARGET_RATIO = 0.02  # of a step
RUN_AHEAD = {"on": 1, "off": 0}
IDLE, LOADED = "idle", "under API load"
NUM_POLLERS = 2
POLLS_PER_IMAGE = 20
LARGE_PIXELS = 2048
VLLM_FLAGS = ("--dtype", "float32", "--enforce-eager")


def main() -> int:
    args = parse_args()
    source = provenance(sys.argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run_rounds(build_model(Path(scratch), args), folder, args)
        except ServerError as error:
            print(f"boundaries: {error}", file=sys.stderr)
            return 1
        spans = {mode: read_timeline(timeline_of(folder, mode)) for mode in RUN_AHEAD}
    report = source | make_report(spans, args)
    for path in write_report(args.out, "boundaries", report, markdown(report)):
        print(path)
    print(headline(report))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="every step runs on all of them")
    parser.add_argument("--rounds", type=int, default=4, help="each measures both servers")
    parser.add_argument("--requests", type=int, default=4, help="of a round, for each server")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps of a request")
    parser.add_argument("--pixels", type=int, default=192, help="image size; with the model's, length of a step")
    parser.add_argument("--api-load", action="store_true", help="measure under API load, too")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks of the tiny model")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--logs", type=Path, help="keep the servers' logs and the timelines there")
    return parser.parse_args()


def build_model(folder: Path, args: argparse.Namespace) -> Path:
    model = folder / "model"
    shape = ["--layers", str(args.layers), "--heads", str(args.heads), "--head-dim", str(args.head_dim)]
    gfdit = Path(sys.executable).with_name("gfdit")
    subprocess.run([gfdit, "tiny-model", "qwen-image", model, *shape], check=True)
    return model


def timeline_of(folder: Path, mode: str) -> Path:
    return folder / f"timeline-{mode}.json"


def run_rounds(model: Path, folder: Path, args: argparse.Namespace) -> None:
    servers: dict[str, ServerProcess] = {}
    with ExitStack() as stack:
        for mode, run_ahead in RUN_AHEAD.items():
            command = ["gfdit", "serve", str(model), "--ranks", str(args.ranks), "--run-ahead", str(run_ahead)]
            command += ["--policy", "fcfs", "--policy-arg", f"group_size={args.ranks}"]
            command += ["--timeline", str(timeline_of(folder, mode)), "--", *VLLM_FLAGS]
            server = stack.enter_context(start_server(command, free_port(), folder / f"{mode}.log"))
            print(f"run-ahead {mode}: ready after {server.startup_s:.0f} s", flush=True)
            servers[mode] = server
            with awake(server):
                play(server, [request("warm-up", args.pixels, 5)])
        for number in range(args.rounds):
            for mode in RUN_AHEAD if number % 2 else reversed(RUN_AHEAD):
                with awake(servers[mode]):
                    measure(servers[mode], args, num_steps(args, IDLE))
                    if args.api_load:
                        with api_load(servers[mode]):
                            measure(servers[mode], args, num_steps(args, LOADED))
            print(f"round {number + 1} of {args.rounds}", flush=True)


def num_steps(args: argparse.Namespace, load: str) -> int:
    """By their number of steps, requests of both kinds are told apart on the timeline."""
    return args.steps + (load == LOADED)


@contextmanager
def awake(server: ServerProcess) -> Iterator[None]:
    server.resume()
    try:
        yield
    finally:
        server.pause()


def measure(server: ServerProcess, args: argparse.Namespace, steps: int) -> None:
    for index in range(args.requests):
        play(server, [request(f"r{index}", args.pixels, steps)])


def play(server: ServerProcess, trace: Sequence[TraceRequest]) -> None:
    for outcome in replay(trace, ReplayOptions(server.base_url)):
        if outcome.error:
            raise ServerError(f"{outcome.id} failed: {outcome.error}")


def request(name: str, pixels: int, steps: int) -> TraceRequest:
    return TraceRequest(name, 0.0, "qwen-image", pixels, pixels, 1, steps)


@contextmanager
def api_load(server: ServerProcess) -> Iterator[None]:
    """Clients in processes of their own, until the body has ended."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    clients = [context.Process(target=poll, args=(server.base_url, stop)) for _ in range(NUM_POLLERS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


def poll(base_url: str, stop: Event) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    file = io.BytesIO()
    Image.effect_noise((LARGE_PIXELS, LARGE_PIXELS), 50).save(file, "PNG")
    while not stop.is_set():
        for _ in range(POLLS_PER_IMAGE):
            opener.open(f"{base_url}/metrics", timeout=30).read()
        Image.open(io.BytesIO(file.getvalue())).load()


def make_report(spans: dict[str, list[Span]], args: argparse.Namespace) -> dict[str, Any]:
    loads = [IDLE, LOADED] if args.api_load else [IDLE]
    return {
        "settings": {
            "ranks": args.ranks,
            "model": f"tiny qwen-image, {args.layers} layers, {args.heads} heads of {args.head_dim}",
            "pixels": args.pixels,
            "steps": args.steps,
            "requests": args.requests * args.rounds,
        },
        "target_ratio": TARGET_RATIO,
        "measured": {
            load: {mode: summary(gaps_of(spans[mode], num_steps(args, load))) for mode in RUN_AHEAD}
            for load in loads
        },
    }


@dataclass(frozen=True, slots=True)
class Boundary:
    """One rank between two consecutive tasks of a request on one layout: ``before`` and ``after``."""

    before: Span
    after: Span

    @property
    def idle_s(self) -> float:
        """How long the rank did nothing, from the end of one task to the start of the next."""
        return self.after.start_s - self.before.end_s


def boundaries(spans: Iterable[Span]) -> list[Boundary]:
    """Where a denoising step follows the one before on the same ordered ranks, with nothing between."""
    found = []
    by_rank: dict[int, Span] = {}
    for span in sorted((span for span in spans if span.kind != MIGRATE), key=lambda span: span.start_s):
        before, by_rank[span.rank] = by_rank.get(span.rank), span
        if (
            before is not None
            and (before.request, before.kind, before.ranks, before.sp)
            == (span.request, "denoise", span.ranks, span.sp)
            and (span.kind, span.step) == ("denoise", before.step + 1)
        ):
            found.append(Boundary(before, span))
    return found


def gaps_of(spans: Sequence[Span], steps: int) -> list[Boundary]:
    """Boundaries of the requests with so many steps."""
    last: dict[str, int] = {}
    for span in spans:
        if span.kind != MIGRATE:
            last[span.request] = max(last.get(span.request, 0), span.step)
    return [boundary for boundary in boundaries(spans) if last[boundary.after.request] == steps - 1]


def summary(gaps: Sequence[Boundary]) -> dict[str, float]:
    """Times in seconds; the ratios are of the median step."""
    idle_s = sorted(gap.idle_s for gap in gaps)
    step_s = statistics.median(gap.after.duration_s for gap in gaps)
    sent_s = sorted(gap.after.start_s - gap.after.decided_s for gap in gaps if gap.after.decided_s is not None)
    return {
        "boundaries": len(idle_s),
        "queued_ahead": sum(gap.after.run_ahead for gap in gaps),
        "step_s": step_s,
        "idle_p50_s": percentile(idle_s, 0.50),
        "idle_p99_s": percentile(idle_s, 0.99),
        "idle_p50_ratio": percentile(idle_s, 0.50) / step_s,
        "dispatch_to_start_p50_s": percentile(sent_s, 0.50),
        "dispatch_to_start_p99_s": percentile(sent_s, 0.99),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def headline(report: dict[str, Any]) -> str:
    on, off = (report["measured"][IDLE][mode] for mode in RUN_AHEAD)
    verdict = "within" if on["idle_p50_ratio"] <= TARGET_RATIO else "above"
    return (
        f"idle between steps, median of {on['boundaries']}: {on['idle_p50_s'] * 1e3:.3f} ms with run-ahead, "
        f"{off['idle_p50_s'] * 1e3:.3f} ms without; {on['idle_p50_ratio']:.1%} of a step of "
        f"{on['step_s'] * 1e3:.1f} ms, {verdict} the target of {TARGET_RATIO:.0%}"
    )


def markdown(report: dict[str, Any]) -> str:
    settings = report["settings"]
    lines = [
        "# Idle ranks between the steps of a request",
        "",
        f"{headline(report)}.",
        "",
        *source_lines(report),
        f"- {settings['model']} on {settings['ranks']} ranks, one thread each; {settings['requests']} requests of "
        f"{settings['steps']} steps at {settings['pixels']}x{settings['pixels']} for each column",
        "",
        "From the end of a step on a rank to the start of the next one there; and from the decision to the start, "
        "which with run-ahead spans most of a step.",
        "",
        "| load | run-ahead | boundaries | queued ahead | step (ms) | idle p50 (ms) | idle p99 (ms) "
        "| p50 of a step | decided to started p50 (ms) | p99 (ms) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for load, modes in report["measured"].items():
        for mode, values in modes.items():
            times = (values[name] * 1e3 for name in ("step_s", "idle_p50_s", "idle_p99_s"))
            sent = (values[f"dispatch_to_start_{share}_s"] * 1e3 for share in ("p50", "p99"))
            lines.append(
                f"| {load} | {mode} | {values['boundaries']} | {values['queued_ahead']} | "
                + " | ".join(f"{value:.3f}" for value in times)
                + f" | {values['idle_p50_ratio']:.1%} | "
                + " | ".join(f"{value:.3f}" for value in sent)
                + " |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
