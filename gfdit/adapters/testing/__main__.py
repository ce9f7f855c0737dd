"""``python -m gfdit.adapters.testing MODEL_DIR``, or ``FILE.py``: all checks of an adapter, or of workflows."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import PIL.Image

from gfdit.adapters.testing.checks import CHECKS, TOLERANCE, check_adapter
from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.adapters.testing.kit import AdapterKit
from gfdit.adapters.testing.processes import ChildError, ForkServer
from gfdit.adapters.testing.requests import KitRequest
from gfdit.adapters.testing.workflow_checks import WORKFLOW_CHECKS, WorkflowRequest, check_workflows
from gfdit.workflow import Image


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    started_s = time.monotonic()
    try:
        if args.model.endswith(".py"):
            return _check_workflows(args)
        if args.workflow or args.input:
            raise ValueError("--workflow and --input are for workflows, in a file that ends in .py")
        requests = _requests(args)
        with AdapterKit(args.model, args.ranks, args.dtype, args.adapter) as kit:
            report = check_adapter(
                kit, requests, tolerance=args.tolerance, seed=args.seed, checks=args.checks or None
            )
    except (ValueError, OSError, ChildError) as error:
        print(f"gfdit.adapters.testing: {error}", file=sys.stderr)
        return 2
    print(report)
    print(f"{len(requests)} requests, {args.ranks} ranks, {time.monotonic() - started_s:.0f} s")
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gfdit.adapters.testing", description=__doc__)
    parser.add_argument(
        "model", metavar="MODEL_DIR|FILE.py", help="a checkpoint small enough for a CPU, or workflows"
    )
    parser.add_argument("--workflow", metavar="NAME", action="append", help="which in the file (default: all)")
    parser.add_argument(
        "--input", metavar="NAME=VALUE", action="append", default=[], help="of workflows, repeatable"
    )
    parser.add_argument("--adapter", metavar="MODULE:CLASS", help="instead of the pipeline's own")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--size",
        metavar="HxW[xF]",
        action="append",
        help="pixels and frames, repeatable (default: 128x128 144x208)",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompt", default="a red panda")
    parser.add_argument("--negative-prompt", help="adds a guided request of each size")
    parser.add_argument("--guidance-scale", type=float)
    parser.add_argument("--true-cfg-scale", type=float)
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help="input image, repeatable")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="between layouts (default: %(default)g)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random layouts")
    names = f"of: {', '.join(CHECKS)}; of workflows: {', '.join(WORKFLOW_CHECKS)}"
    parser.add_argument("--checks", nargs="+", choices={*CHECKS, *WORKFLOW_CHECKS}, metavar="CHECK", help=names)
    return parser


def _requests(args: argparse.Namespace) -> list[KitRequest]:
    images: tuple[Any, ...] = ()
    if args.image:
        images = tuple(PIL.Image.open(path).convert("RGB") for path in args.image)
    requests = []
    for number, text in enumerate(args.size or ("128x128", "144x208")):
        height, width, num_frames = _size(text)
        request = KitRequest(
            height,
            width,
            num_frames,
            args.steps,
            seed=number + 1,
            prompt=args.prompt,
            guidance_scale=args.guidance_scale,
            true_cfg_scale=args.true_cfg_scale,
            images=images,
        )
        requests.append(request)
        if args.negative_prompt is not None:
            requests.append(request.but(negative_prompt=args.negative_prompt, seed=number + 101))
    return requests


def _check_workflows(args: argparse.Namespace) -> int:
    from gfdit.adapters.workflow_requests import WorkflowAdapter

    adapter = WorkflowAdapter.load([args.model], args.ranks)
    names = args.workflow or adapter.workflows.names
    size = args.size[0] if args.size else "128x128"
    height, width, _ = _size(size)
    requests = []
    for number, name in enumerate(names):
        known = adapter.workflows.get(name, args.steps).workflow.inputs
        values: dict[str, Any] = {"prompt": args.prompt, "seed": number + 1, "height": height, "width": width}
        values["negative_prompt"] = args.negative_prompt
        values["guidance_scale"], values["true_cfg_scale"] = args.guidance_scale, args.true_cfg_scale
        values = {key: value for key, value in values.items() if key in known and value is not None}
        for said in args.input:
            key, equals, text = said.partition("=")
            if not equals:
                raise ValueError(f"--input must be NAME=VALUE, got {said!r}")
            if key in known:
                values[key] = _typed(text, known[key].type)
        values |= {one.name: _picture() for one in known.values() if one.type is Image and one.name not in values}
        requests.append(WorkflowRequest(args.model, name, values, args.steps))
    with ForkServer() as server, ComponentRanks(server, args.ranks, adapter.checkpoint) as ranks:
        report = check_workflows(
            ranks, args.ranks, requests, tolerance=args.tolerance, seed=args.seed, checks=args.checks
        )
    print(report)
    return 0 if report.passed else 1


def _typed(text: str, kind: type) -> Any:
    if kind is Image:
        return PIL.Image.open(text).convert("RGB")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"--input: {text!r} is no {kind.__name__}") from None


def _picture() -> PIL.Image.Image:
    return PIL.Image.linear_gradient("L").convert("RGB")


def _size(text: str) -> tuple[int, int, int]:
    try:
        height, width, *frames = map(int, text.split("x"))
        (num_frames,) = frames or (1,)
    except ValueError:
        raise ValueError(f"--size must be HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES, got {text!r}") from None
    return height, width, num_frames


if __name__ == "__main__":
    sys.exit(main())
