"""`gfdit profile MODEL --ranks N --out C.json`: measure a cost table on a real server."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfdit.core import Shape
from gfdit.core.cost.table import MaskedSteps

if TYPE_CHECKING:
    from gfdit.cli.profile_plan import Kind, Profiler
    from gfdit.cli.profile_table import ProfileTable

# What the tiny checkpoints manage on a CPU, and what people ask an image model for.
CPU_SHAPES = ("128x128", "192x192", "256x256")
DEFAULT_SHAPES = ("512x512", "1024x1024", "1536x1536")
GUIDANCE = {"off": (False,), "on": (True,), "both": (False, True)}
INTERRUPTED = 130  # what a shell reports for Ctrl-C


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory or hub name vLLM-Omni can serve")
    parser.add_argument("--ranks", type=int, metavar="N", required=True, help="devices, one full replica on each")
    parser.add_argument("--out", metavar="C.json", type=Path, required=True, help="the table; added to if there")
    sizes = f"{' '.join(DEFAULT_SHAPES)}, on a CPU {' '.join(CPU_SHAPES)}"
    parser.add_argument(
        "--shape", metavar="HxW[xF]", type=parse_shape, nargs="+", help=f"sizes (default: {sizes})"
    )
    parser.add_argument("--input-image", metavar="PNG", type=Path, help="for models that edit or animate an image")
    parser.add_argument(
        "--extra-params", metavar="JSON", type=parse_params, default={}, help="for the model, with every request"
    )
    parser.add_argument("--cfg", choices=GUIDANCE, default="both", help="guidance, where the model has it")
    parser.add_argument("--batch", metavar="B", type=int, nargs="+", default=[1], help="sizes of batched steps")
    parser.add_argument(
        "--mask-ratio", metavar="R", type=float, nargs="+", help="measure edits under masks of such shares, too"
    )
    parser.add_argument("--model-name", metavar="NAME", help="what the table calls the model")
    parser.add_argument("--ring", action="store_true", help="measure what `gfdit serve --ring` offers")
    parser.add_argument("--idle", action="store_true", help="leave idle the ranks that a layout does not use")
    parser.add_argument("--spread", type=float, default=0.03, help="standard error of a median, relative to it")
    parser.add_argument("--min-reps", type=int, default=8, help="measure everything at least so often")
    parser.add_argument("--max-reps", type=int, default=60, help="measure no more once done so often")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest time one request may take")


def parse_shape(text: str) -> Shape:
    match = re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", text)
    shape = Shape(*(int(part or 1) for part in match.groups())) if match else None
    if shape is None or min(shape.height, shape.width, shape.num_frames) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES, e.g. 768x1024 or 480x832x81"
        )
    return shape


def parse_params(text: str) -> dict[str, Any]:
    try:
        params = json.loads(text)
    except ValueError:
        params = None
    if not isinstance(params, dict) or "gfdit" in params:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object of parameters of the model")
    return params


def run(args: argparse.Namespace) -> int:
    """Saves after every measurement: however a run ends, the next one goes on from there."""
    from gfdit.cli.profile_plan import Effort, Profiler
    from gfdit.cli.profile_server import MeasurementError, ProfileServer
    from gfdit.cli.profile_table import ProfileTable
    from gfdit.cli.server_process import ServerError

    if min(args.batch) < 1:
        raise ValueError(f"--batch must be at least 1, got {min(args.batch)}")
    ratios = args.mask_ratio or ()
    if any(not 0 < ratio <= 1 for ratio in ratios) or len(set(ratios)) in (1, 2):
        raise ValueError("--mask-ratio must be three numbers or more, above 0 and at most 1")
    effort = Effort(args.spread, args.min_reps, args.max_reps, busy=not args.idle)
    command = server_command(args)
    input_image = args.input_image.read_bytes() if args.input_image else None
    method = "gfdit profile, " + ("other ranks idle" if args.idle else "all ranks busy with all shapes")
    if args.extra_params:
        method += f", {json.dumps(args.extra_params, sort_keys=True)}"
    table = ProfileTable(args.out, hardware(), method)
    log_path = args.out.with_name(f"{args.out.name}.log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    print(f"starting {args.model} on {args.ranks} ranks (log: {log_path}) ...", flush=True)
    try:
        with ProfileServer(command, log_path, args.timeout_s, input_image, args.extra_params) as server:
            measure(args, Profiler(server, args.ranks, effort), table)
    except KeyboardInterrupt:
        print(f"interrupted: {args.out} keeps {len(table.entries)} entries; run again to go on", file=sys.stderr)
        return INTERRUPTED
    except (ServerError, MeasurementError) as error:
        raise ValueError(f"{str(error).splitlines()[0]} (the server's log is {log_path})") from error
    log_path.unlink(missing_ok=True)
    return 0


def server_command(args: argparse.Namespace) -> list[str]:
    """`gfdit serve` without a policy. Raises ``ValueError`` for what it would refuse itself."""
    from gfdit.cli import serve

    command = ["serve", args.model, "--ranks", str(args.ranks)]
    if args.model_name:
        command += ["--model-name", args.model_name]
    if args.ring:
        command.append("--ring")
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    namespace = parser.parse_args(command[1:])
    namespace.passthrough = args.passthrough
    serve.serve_command(namespace)
    return ["gfdit", *command, "--", *args.passthrough]


def hardware() -> str:
    """The devices by name, or the machine if it has none."""
    from gfdit.cli.provenance import machine
    from gfdit.omni.plugin import find_accelerator

    if find_accelerator() is None:
        return machine()
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else machine()


def measure(args: argparse.Namespace, profiler: "Profiler", table: "ProfileTable") -> None:
    """Everything that the table lacks, with a bar."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from gfdit.omni.plugin import find_accelerator

    names = CPU_SHAPES if find_accelerator() is None else DEFAULT_SHAPES
    shapes = args.shape or [parse_shape(name) for name in names]
    samples = profiler.server.samples
    kinds = []
    with tqdm(total=0, unit="entry") as bar:
        for cfg in GUIDANCE[args.cfg]:
            for shape in shapes:
                bar.set_description(f"{shape}{' cfg' if cfg else ''}")
                if (kind := profiler.explore(shape, cfg)) is None:
                    bar.write("the model has no guidance that could be measured")
                    break
                kinds.append(kind)
                if profiler.num_ranks > 1 and not table.has_sizes(kind.model, kind.shape, kind.cfg):
                    profiler.measure_copies(kind)
                    table.add_copies(samples)
        bar.set_description("")
        keys = table.missing(key for kind in kinds for key in kind.keys(sorted(set(args.batch))))
        bar.reset(total=len(keys))
        for key in profiler.measure(keys, kinds):
            bar.set_postfix_str(f"{key.shape} {key.kind} {key.parallel} batch {key.batch}")
            table.add(key, samples)
            table.save()
            bar.update()
    if args.mask_ratio and kinds:
        fit_masks(args.mask_ratio, profiler, max(kinds, key=lambda kind: kind.shape.num_tokens), table)
    if not table.entries:
        raise ValueError(f"{args.model} has no guidance that could be measured: nothing is written")
    if samples.task_s:
        print(f"to simulate this server: {table.remark(samples)}")
    table.save()
    print(f"{args.out}: {len(table.entries)} entries")


def fit_masks(ratios: Sequence[float], profiler: "Profiler", kind: "Kind", table: "ProfileTable") -> None:
    """A line through the times of steps that compute the tokens under a mask (FlashPS, section 4.4)."""
    from scipy.stats import linregress  # type: ignore[import-untyped]

    points = [profiler.measure_mask(kind, ratio) for ratio in ratios]
    fit = linregress(*zip(*points, strict=True))
    unmasked_share = min(1.0, max(0.0, fit.intercept / (fit.intercept + fit.slope)))
    table.add_masked_steps(MaskedSteps(kind.model, round(unmasked_share, 4), round(fit.rvalue**2, 4)))
    print(
        f"steps of {kind.shape} under a mask: {1e3 * fit.intercept:.2f} ms and {1e3 * fit.slope:.2f} ms times the "
        f"mask ratio, R² {fit.rvalue**2:.4f}"
    )
