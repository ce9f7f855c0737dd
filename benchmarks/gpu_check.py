"""One command that checks and times the collectives on a machine with a GPU; torch and triton are all it needs.

On one GPU the ranks are virtual: a stream each. Every kernel and path is compared bit by bit with references; then
come graph capture, containment of failures, kernels with a safeguard taken out, which must be seen to fail, and
times. With ``--heap torch_symmetric`` each rank has a GPU of its own, and NCCL is measured beside. Writes a dated
JSON file and its Markdown; the exit status is 1 if a check failed. ``--interpret`` runs the same checks on a CPU,
by Triton's interpreter: that says whether this program works, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HEAPS = ("local", "torch_symmetric", "shared_memory")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    # Virtual ranks: more than eight streams run side by side, and no kernel is loaded while another one waits.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    try:
        report = check_all(args)
    except (ValueError, OSError) as error:
        print(f"gpu_check: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    from benchmarks.gpu.report import markdown
    from gfdit.cli.provenance import write_report

    name = "gpu_check" if report["on_gpu"] else "gpu_check_interpreted"
    for path in write_report(args.out, name, report, markdown(report)):
        print(path)
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    print(f"{len(report['checks'])} checks, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def check_all(args: argparse.Namespace) -> dict[str, Any]:
    """The whole report. Raises ValueError if the heap cannot be had here."""
    from benchmarks.gpu.checks import all_checks
    from benchmarks.gpu.ranks import Where
    from gfdit.cli.provenance import provenance

    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    where = Where("interpreted" if args.interpret else args.heap, args.ranks)
    kind = {"interpreted": "interpreted", "local": "virtual", "torch_symmetric": "GPU"}[where.heap]
    where.check()
    checks = []
    for name, check in all_checks(where, args.quick):
        if not args.only or any(word in name for word in args.only):
            checks.append(run_check(name, check))
    return source | {
        "where": f"{args.ranks} {kind} ranks",
        "on_gpu": where.on_gpu,
        "device": device_name(where.on_gpu),
        "versions": source["versions"] | {"triton": triton_version()},
        "checks": checks,
        "timings": measure_all(where, args) if args.times else [],
    }


def run_check(name: str, check: Callable[[], str]) -> dict[str, Any]:
    begin, passed = time.monotonic(), True
    try:
        detail = check()
    except Exception as error:
        passed, detail = False, f"{type(error).__name__}: {error}".replace("\n", " ")
        traceback.print_exc()
    seconds = time.monotonic() - begin
    print(f"{'passed' if passed else 'FAILED'} {name}: {detail} ({seconds:.1f} s)", flush=True)
    return {"name": name, "passed": passed, "seconds": seconds, "detail": detail}


def measure_all(where: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.gpu.timings import nccl_timings, timings

    rows = timings(where, args.sizes, args.groups or [args.ranks], args.rounds)
    if where.heap == "torch_symmetric":
        with tempfile.TemporaryDirectory() as directory:
            rows += nccl_timings(where, directory, args.sizes, args.rounds)
    return rows


def device_name(on_gpu: bool) -> str:
    if not on_gpu:
        return "no GPU"
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()} ({major}.{minor})"


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heap", choices=HEAPS, default="local", help="virtual ranks, or a GPU per rank")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, by Triton's interpreter")
    parser.add_argument("--ranks", type=int, metavar="N", default=4)
    parser.add_argument(
        "--groups", type=int, nargs="+", metavar="N", help="group sizes to time; default: all ranks"
    )
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="to time; default: 1 KiB to 64 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions of every check")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only checks with one of these in their name")
    parser.add_argument("--no-times", dest="times", action="store_false", help="only check")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    if args.interpret != (args.heap == "shared_memory"):
        parser.error("--interpret and --heap shared_memory go together")
    if args.ranks < 4:
        parser.error("--ranks must be at least 4")
    args.sizes = args.sizes or [1 << power for power in (range(10, 27, 2) if not args.interpret else (10,))]
    return args


if __name__ == "__main__":
    sys.exit(main())
