"""`gfdit bench serve`: replay a trace against a running server and say how it did."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gfdit.cli.replay import Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", metavar="URL", required=True, help="the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--trace", metavar="T.jsonl", type=Path, required=True, help="requests and their arrivals")
    parser.add_argument(
        "--slo", action="store_true", help="tell the server deadlines and priorities (gfdit servers only)"
    )
    parser.add_argument("--label", default="unknown", help="the server's policy, for the result")
    parser.add_argument("--grace-s", type=float, default=0.0, help="how late still counts as nearly in time")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="give a request up after this long")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write the result there")
    parser.add_argument(
        "--input-image", metavar="PNG", type=Path, help="an image to edit, or to begin videos with"
    )
    parser.add_argument("--images", metavar="DIR", type=Path, help="write each image there, by request id")


def run(args: argparse.Namespace) -> int:
    from gfdit.cli.replay import ReplayOptions
    from gfdit.cli.replay_report import summarize
    from gfdit.sim.trace import read_trace

    trace = read_trace(args.trace)
    options = ReplayOptions(
        args.base_url,
        send_slo=args.slo,
        request_timeout_s=args.timeout_s,
        input_image=args.input_image.read_bytes() if args.input_image else None,
    )
    outcomes = replay_with_progress(trace, options, "replay")
    result = summarize(outcomes, label=args.label, grace_s=args.grace_s)
    print(describe(result))
    for outcome in outcomes:
        if outcome.error:
            print(f"{outcome.id}: status {outcome.status}: {outcome.error}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.images is not None:
        write_images(outcomes, args.images)
    return 0 if all(outcome.completed for outcome in outcomes) else 1


def replay_with_progress(trace: Sequence[Any], options: Any, title: str) -> list["Outcome"]:
    """`replay`, with a bar that also counts failures and missed deadlines."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from gfdit.cli.replay import replay

    missed = failed = 0
    with tqdm(total=len(trace), desc=title, unit="request") as bar:

        def on_done(outcome: "Outcome") -> None:
            nonlocal missed, failed
            failed += not outcome.completed
            missed += outcome.completed and not outcome.met_deadline()
            bar.set_postfix({"late": missed, "failed": failed}, refresh=False)
            bar.update()

        return replay(trace, options, on_done)


def describe(result: dict[str, Any]) -> str:
    """The headline numbers in one line."""
    parts = [f"{result['num_completed']}/{result['num_requests']} completed"]
    if result["num_completed"]:
        parts += [
            f"{result['throughput_rps']:.2f} requests/s",
            f"latency mean {result['mean_latency_s']:.2f} s",
            f"p50 {result['p50_latency_s']:.2f} s",
            f"p95 {result['p95_latency_s']:.2f} s",
        ]
    return ", ".join([*parts, f"deadlines met {result['slo_attainment']:.0%}"])


def write_images(outcomes: Sequence["Outcome"], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        if outcome.image is not None:
            # An id is the trace author's: keep it from leaving the folder.
            name = re.sub(r"[^\w.-]", "_", outcome.id)
            suffix = "mp4" if outcome.image[4:8] == b"ftyp" else "png"
            (directory / f"{name}.{suffix}").write_bytes(outcome.image)
