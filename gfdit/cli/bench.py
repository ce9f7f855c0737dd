"""`gfdit bench TARGET`: one module per target, with `configure(parser)` and `run(args) -> exit status`."""

import argparse
import importlib

TARGETS = {
    "comm": (
        "gfdit.cli.bench_comm",
        "measure collectives, and the table by which kernels choose how to move data",
    ),
    "serve": ("gfdit.cli.bench_serve", "send requests to a running server when they are due, and say how it did"),
    "compare": ("gfdit.cli.bench_compare", "what several servers did with the same requests, side by side"),
    "migration": (
        "gfdit.cli.bench_migration",
        "measure artifacts on their way from layout to layout, against gloo",
    ),
    "control": ("gfdit.cli.bench_control", "measure simulations, the control plane and the policies"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    for name, (module, summary) in TARGETS.items():
        target = targets.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        importlib.import_module(module).configure(target)


def run(args: argparse.Namespace) -> int:
    module, _ = TARGETS[args.target]
    return int(importlib.import_module(module).run(args))
