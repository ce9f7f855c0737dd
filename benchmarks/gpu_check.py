"""One command that checks and times the collectives on a machine with a GPU, made for a short lease.

    python benchmarks/gpu_check.py --budget-s 540 --out DIR

needs torch, triton and numpy, nothing installed of this repository, and no network. It runs parts, the most
telling first (``--list``), each in a process of its own with a share of the time. After every part the report in
DIR is whole: JSON, Markdown, and a log of what the parts printed; also when the command is interrupted or killed,
and when a part breaks, which is said with its place. The exit status is 1 if anything failed.

On one GPU ranks are virtual, a stream each, or processes that share it; with a GPU for every rank (``--ranks``)
they have one each, and NCCL is measured beside. ``--interpret`` runs every part that does not need a device on a
CPU, by Triton's interpreter: that says whether this program works, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.job import Spec
from benchmarks.gpu.machine import Machine, look, versions
from benchmarks.gpu.plan import PARTS, Part
from benchmarks.gpu.report import ReportFiles
from benchmarks.gpu.runner import Result, Runner
from gfdit.cli.provenance import provenance

BUDGET_S = 540.0
# Kept for the report at the end.
_RESERVE_S = 2.0


def main(argv: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    end = time.monotonic() - _RESERVE_S
    args = parse_args(argv)
    end += args.budget_s
    chosen = [part for part in parts if not args.only or any(word in part.name for word in args.only)]
    if args.list:
        print("\n".join(f"{part.name}: {part.tells}" for part in chosen))
        return 0
    # First of all: the checkout may move on during the run.
    source = provenance(["benchmarks/gpu_check.py", *_recorded(sys.argv[1:] if argv is None else argv)])
    with tempfile.TemporaryDirectory(prefix="gfdit-gpu-check-", ignore_cleanup_errors=True) as scratch:
        environment = environment_of(args.interpret, Path(scratch))
        try:
            if not chosen:
                raise ValueError(f"no part is named like {' or '.join(args.only)}; there are: {_names(parts)}")
            heap, machine = find_heap(args, environment)
            args.out.mkdir(parents=True, exist_ok=True)
        except (ValueError, OSError) as error:
            print(f"gpu_check: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        files = ReportFiles(args.out, "gpu_check_interpreted" if args.interpret else "gpu_check", source["date"])
        head = source | {
            "where": where_of(heap, args.ranks),
            "on_gpu": not args.interpret,
            "device": machine.text,
            "versions": versions(),
            "budget_s": args.budget_s,
        }
        begin = time.monotonic()

        def changed(results: Sequence[Result]) -> None:
            report: dict[str, Any] = head | {"seconds": round(time.monotonic() - begin, 1), "parts": results}
            files.write(report)

        spec = Spec(
            interpret=args.interpret,
            heap=heap,
            ranks=args.ranks,
            limit_s=0.0,
            results="",
            quick=args.quick,
            rounds=args.rounds,
            sizes=tuple(args.sizes),
            capability=machine.capability,
            found=(*machine.tools, *(["several_gpus"] if heap == "torch_symmetric" else [])),
        )
        runner = Runner(spec, environment, Path(scratch), files.log, changed)
        before = {number: signal.signal(number, runner.interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            results = runner.run(chosen, end)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    for result in results:
        print(f"{result['state']:8} {result['name']} ({result['seconds']:.0f} s) {result['reason']}".rstrip())
    print("\n".join(map(str, files.paths)))
    if runner.interrupted:
        return 128 + runner.interrupted
    return 1 if any(result["state"] == "failed" for result in results) else 0


def find_heap(args: argparse.Namespace, environment: dict[str, str]) -> tuple[str, Machine]:
    """Where ranks live. Raises ValueError if the machine has not what was asked for."""
    if args.interpret:
        return "interpreted", Machine(0, "", 0, ())
    machine = look(environment)
    heap = args.heap or ("torch_symmetric" if machine.num_devices >= args.ranks else "local")
    if heap == "torch_symmetric" and machine.num_devices < args.ranks:
        raise ValueError(f"{args.ranks} ranks need as many CUDA devices, torch sees {machine.num_devices}")
    return heap, machine


def where_of(heap: str, ranks: int) -> str:
    kind = {"interpreted": "interpreted ranks", "local": "virtual ranks of one GPU", "torch_symmetric": "GPUs"}
    return f"{ranks} {kind[heap]}"


def environment_of(interpret: bool, scratch: Path) -> dict[str, str]:
    """Of the parts: what CUDA, Triton and torch read there and nowhere else."""
    environment = dict(os.environ)
    # Virtual ranks: more than eight streams run side by side, and no kernel is loaded while another one waits.
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    # Compiled once, by the first part, for all others.
    environment |= {"TRITON_CACHE_DIR": str(scratch / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "torch")}
    environment |= {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if interpret:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _recorded(argv: Sequence[str]) -> list[str]:
    """The command without where its report was put, which says nothing about it."""
    words = list(argv)
    for index, word in enumerate(words):
        if word == "--out":
            return words[:index] + words[index + 2 :]
        if word.startswith("--out="):
            return words[:index] + words[index + 1 :]
    return words


def _names(parts: Sequence[Part]) -> str:
    return ", ".join(shlex.quote(part.name) for part in parts)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help="for everything")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, by Triton's interpreter")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only parts with one of these in their name")
    parser.add_argument("--list", action="store_true", help="only say which parts there are")
    parser.add_argument("--ranks", type=int, metavar="N", default=4)
    heaps = ("local", "torch_symmetric")
    parser.add_argument("--heap", choices=heaps, help="virtual ranks, or a GPU per rank; default: by the GPUs")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="to time; default: 1 KiB to 64 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions of every check")
    args = parser.parse_args(argv)
    if args.interpret and args.heap:
        parser.error("--interpret has ranks of its own: leave --heap out")
    if args.ranks < 4:
        parser.error("--ranks must be at least 4")
    if args.budget_s <= 0:
        parser.error("--budget-s must be positive")
    args.sizes = args.sizes or [1 << power for power in (range(10, 27, 2) if not args.interpret else (10,))]
    return args


if __name__ == "__main__":
    sys.exit(main())
