"""``python -m gfdit.adapters.testing MODEL_DIR``: all checks of an adapter, one line each."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from gfdit.adapters.testing.checks import CHECKS, TOLERANCE, check_adapter
from gfdit.adapters.testing.kit import AdapterKit
from gfdit.adapters.testing.processes import ChildError
from gfdit.adapters.testing.requests import KitRequest


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    started_s = time.monotonic()
    try:
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
    parser.add_argument("model", metavar="MODEL_DIR", help="a checkpoint small enough for a CPU")
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
    parser.add_argument("--checks", nargs="+", choices=CHECKS, metavar="CHECK", help=f"of: {', '.join(CHECKS)}")
    return parser


def _requests(args: argparse.Namespace) -> list[KitRequest]:
    images: tuple[Any, ...] = ()
    if args.image:
        from PIL import Image

        images = tuple(Image.open(path).convert("RGB") for path in args.image)
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


def _size(text: str) -> tuple[int, int, int]:
    try:
        height, width, *frames = map(int, text.split("x"))
        (num_frames,) = frames or (1,)
    except ValueError:
        raise ValueError(f"--size must be HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES, got {text!r}") from None
    return height, width, num_frames


if __name__ == "__main__":
    sys.exit(main())
