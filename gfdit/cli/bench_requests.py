"""What `gfdit bench serve` sends: a trace, a workload by name, or requests of one kind at a rate."""

import argparse
import contextlib
import io
import itertools
import math
import random
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gfdit.cli import workload
from gfdit.sim.arrivals import arrival_times
from gfdit.sim.request_classes import DEFAULT_STEPS
from gfdit.sim.trace import TraceRequest, read_trace

DEFAULT_NUM_PROMPTS = 1000  # as `vllm bench serve`
DEFAULT_SIDE = 1024  # pixels
DEFAULT_NUM_FRAMES = 81
NUM_TEMPLATES = 16  # input images of --task i2i and i2v: few enough to be made beforehand
TASKS = ("t2i", "i2i", "t2v", "i2v")
_HOUR_S = 3600.0


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("requests: --trace, --workload, or those of one kind")
    what.add_argument("--trace", metavar="T.jsonl", type=Path, help="requests and their arrivals")
    what.add_argument(
        "--workload",
        metavar="'NAME …'",
        help="what `gfdit workload` makes of these words, e.g. 'short --costs C.json --ranks 4 --load 0.9'",
    )
    what.add_argument("--task", choices=TASKS, help="images or videos, from text or from an image; default: t2i")
    what.add_argument("--width", type=int, help=f"pixels; default: {DEFAULT_SIDE}")
    what.add_argument("--height", type=int, help=f"pixels; default: {DEFAULT_SIDE}")
    what.add_argument("--num-frames", type=int, help=f"of a video; default: {DEFAULT_NUM_FRAMES}")
    what.add_argument("--num-inference-steps", type=int, metavar="N", help=f"default: {DEFAULT_STEPS}")
    what.add_argument("--mask-ratio", type=float, metavar="SHARE", help="i2i: paint only this share of the image")
    what.add_argument("--cfg", action="store_true", default=None, help="with classifier-free guidance")
    what.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"requests; default: {DEFAULT_NUM_PROMPTS}, of a trace or workload all",
    )
    when = parser.add_argument_group("arrivals")
    when.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="per second; default: the trace's, without one inf (at once)",
    )
    when.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier",
    )
    when.add_argument("--seed", type=int, default=0, help="of the arrivals")


def requests_of(args: argparse.Namespace) -> list[TraceRequest]:
    """Raises ``ValueError`` naming the option that is out of range, or not for these requests."""
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    if args.trace is None and args.workload is None:
        requests, rate = _of_one_kind(args), math.inf
    else:
        requests, rate = _written(args)[: args.num_prompts], None
    rate = rate if args.request_rate is None else args.request_rate
    if rate is None:
        return requests
    times_s = arrivals(len(requests), rate, args.burstiness, args.seed)
    return [replace(request, arrival_s=at_s) for request, at_s in zip(requests, times_s, strict=True)]


def arrivals(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which requests arrive at ``rate`` per second, all at 0 if that is infinite.

    Gaps are gamma distributed with shape ``burstiness``. Raises ``ValueError`` for numbers that are not positive.
    """
    for name, value in (("--request-rate", rate), ("--burstiness", burstiness)):
        if not value > 0:
            raise ValueError(f"{name} must be a positive number, got {value}")
    if math.isinf(rate):
        return [0.0] * num_requests
    if math.isinf(burstiness):
        raise ValueError("--burstiness must be finite")
    times_s = arrival_times([(_HOUR_S, rate)], random.Random(seed), cv=burstiness**-0.5)
    return list(itertools.islice(times_s, num_requests))


def _written(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace is not None and args.workload is not None:
        raise ValueError("--trace and --workload are two traces: give one of them")
    for option in ("task", "width", "height", "num_frames", "num_inference_steps", "mask_ratio", "cfg"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} is not for a trace, which says so of each request")
    trace = read_trace(args.trace) if args.workload is None else workload_trace(args.workload)
    if not trace:
        raise ValueError(f"{args.trace}: the trace has no requests")
    return trace


def workload_trace(words: str) -> list[TraceRequest]:
    """What ``gfdit workload`` writes when it is given ``words``. Raises ``ValueError`` for what it refuses."""
    parser = _WorkloadParser(prog="gfdit workload", allow_abbrev=False)
    workload.configure(parser)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        args = parser.parse_args([*shlex.split(words), "--out", str(path)])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            workload.run(args)
        print(said.getvalue().replace(f"{path}: ", "workload: "), end="")
        return read_trace(path)


class _WorkloadParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"--workload: {message}")


def _of_one_kind(args: argparse.Namespace) -> list[TraceRequest]:
    task = args.task or "t2i"
    is_video = task.endswith("v")
    if args.mask_ratio is not None and task != "i2i":
        raise ValueError(f"--mask-ratio is for --task i2i, got {task}")
    if args.mask_ratio is not None and not 0 < args.mask_ratio <= 1:
        raise ValueError(f"--mask-ratio must be above 0 and at most 1, got {args.mask_ratio}")
    if args.num_frames is not None and not is_video:
        raise ValueError(f"--num-frames is for --task t2v and i2v, got {task}")
    sizes = {
        "width": (args.width, DEFAULT_SIDE, 1),
        "height": (args.height, DEFAULT_SIDE, 1),
        "num_frames": (args.num_frames, DEFAULT_NUM_FRAMES if is_video else 1, 1 + is_video),
        "num_inference_steps": (args.num_inference_steps, DEFAULT_STEPS, 1),
    }
    chosen = {}
    for name, (given, default, least) in sizes.items():
        chosen[name] = default if given is None else given
        if chosen[name] < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {given}")
    count = args.num_prompts or DEFAULT_NUM_PROMPTS
    return [
        TraceRequest(
            id=f"r{index:0{len(str(count - 1))}}",
            arrival_s=0.0,
            model=args.model or "",
            height=chosen["height"],
            width=chosen["width"],
            num_frames=chosen["num_frames"],
            num_steps=chosen["num_inference_steps"],
            cfg=bool(args.cfg),
            slo_class=task,
            mask_ratio=args.mask_ratio,
            template=f"image-{index % NUM_TEMPLATES}" if task.startswith("i") else None,
        )
        for index in range(count)
    ]


def with_deadline(requests: Sequence[TraceRequest], deadline_s: float) -> list[TraceRequest]:
    return [replace(request, deadline_s=deadline_s) for request in requests]
