"""`gfdit tiny-model FAMILY DIR`: a small random checkpoint of a real model family."""

import argparse
import time
from pathlib import Path

from gfdit.adapters.tiny_models import DTYPES, FAMILIES, TinyModelSpec, build


def configure(parser: argparse.ArgumentParser) -> None:
    default = TinyModelSpec()
    parser.add_argument("family", metavar="FAMILY", choices=FAMILIES, help=f"one of: {', '.join(FAMILIES)}")
    parser.add_argument("dir", metavar="DIR", type=Path, help="where to write it; must be absent or empty")
    parser.add_argument("--seed", type=int, default=default.seed, help="the same seed gives the same bytes")
    parser.add_argument("--layers", type=int, default=default.num_layers, help="transformer blocks")
    parser.add_argument(
        "--heads", type=int, default=default.num_heads, help="attention heads: bounds the SP degree"
    )
    parser.add_argument("--head-dim", type=int, default=default.head_dim, help="width of a head")
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="of the weights")


def run(args: argparse.Namespace) -> int:
    from gfdit.omni.plugin import prepare_cpu_process

    prepare_cpu_process()
    from transformers.utils import logging

    logging.disable_progress_bar()
    started_s = time.monotonic()
    spec = TinyModelSpec(
        seed=args.seed,
        num_layers=args.layers,
        num_heads=args.heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
    )
    build(args.family, args.dir, spec)
    num_bytes = sum(path.stat().st_size for path in args.dir.rglob("*") if path.is_file())
    seconds = time.monotonic() - started_s
    print(f"{args.family}: {num_bytes / 1e6:.1f} MB in {args.dir} ({seconds:.1f} s)")
    return 0
