"""`gfdit bench comm`: how long collectives take here, and the table that lets kernels choose how to move data."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gfdit.cli.provenance import machine, provenance

HEAPS = ("shared_memory", "local", "torch_symmetric", "interpreted")
DEFAULT_SIZES = ("1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M")
INTERPRETED_SIZES = {
    "slot_bytes": 64 << 10,
    "low_latency_bytes": 4 << 10,
    "export_bytes": 64 << 10,
    "place_bytes": 64 << 10,
}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Result(NamedTuple):
    """``case``: of ``gfdit.comm.measure``. ``seconds`` by round; none where a rank took no part."""

    case: Any
    explanation: str
    seconds: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


class RankResults(NamedTuple):
    """``hardware`` is empty where the host moves the data."""

    hardware: str
    results: list[Result]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--heap",
        choices=HEAPS,
        default="shared_memory",
        help="CPU processes, virtual ranks of this process, one GPU each, or (for tests) interpreted kernels",
    )
    parser.add_argument("--ranks", type=int, metavar="N", default=2)
    parser.add_argument("--device", default="cpu", help="of --heap local: cpu or cuda")
    parser.add_argument("--groups", type=int, nargs="+", metavar="N", help="group sizes; default: all ranks")
    parser.add_argument("--operations", nargs="+", metavar="NAME", help="default: all that are measured")
    parser.add_argument(
        "--sizes", nargs="+", metavar="BYTES", default=list(DEFAULT_SIZES), help="per pair of ranks"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--table", type=Path, metavar="FILE", help="choose paths by this table, and say why")
    parser.add_argument("--save", type=Path, metavar="FILE", help="measure every way there is, write the table")
    parser.add_argument(
        "--host",
        action="store_true",
        help="what a collective costs the host on GPUs, the launch left out; no GPU needed",
    )


def run(args: argparse.Namespace) -> int:
    from gfdit.comm import spawn
    from gfdit.comm.selector_table import SelectorTable
    from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES

    for name in ("ranks", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.host:
        return run_host(args.rounds)
    has_kernels = args.heap in ("torch_symmetric", "interpreted") or (args.heap, args.device) == ("local", "cuda")
    if not has_kernels and (args.save or args.table):
        raise ValueError("only kernels have a choice: --heap torch_symmetric, or --heap local --device cuda")
    groups = args.groups or [args.ranks]
    if wrong := [size for size in groups if not 2 <= size <= args.ranks]:
        raise ValueError(f"--groups must be between 2 and --ranks {args.ranks}, got {wrong[0]}")
    if args.table is not None:
        SelectorTable.load(args.table)
    operations = [operation_named(name) for name in args.operations] if args.operations else None
    sizes = [parse_bytes(text) for text in args.sizes]
    # Ranks without a device of their own may be forked: then torch is imported once.
    options: dict[str, Any] = {"device": args.device} if args.heap == "local" else {}
    if args.heap not in ("local", "torch_symmetric"):
        options["start_method"] = "forkserver"
    if has_kernels:
        sizes_of_heap = INTERPRETED_SIZES if args.heap == "interpreted" else DEVICE_SIZES
        options |= {**sizes_of_heap, "selector_table": str(args.table or "")}
    source = provenance(sys.argv)
    by_rank = spawn(
        measure_rank,
        args.ranks,
        args.heap,
        (operations, groups, sizes, args.rounds, args.save is not None, 1 if args.heap == "interpreted" else 200),
        timeout_s=24 * 3600,
        **options,
    )
    results = slowest(by_rank)
    hardware = where(args.heap, args.ranks, by_rank[0].hardware)
    caution = ": these figures say nothing about a GPU" if args.heap == "interpreted" else ""
    print(f"{hardware}, load average {os.getloadavg()[0]:.1f}{caution}")
    for line in report(results, fastest_first=args.save is not None):
        print(line)
    if args.table is not None:
        print("\n".join(["", *(result.explanation for result in results)]))
    if args.save is not None:
        save(args.save, hardware, source, results)
        print(args.save)
    return 0


def run_host(rounds: int) -> int:
    from gfdit.comm.host_share import NUM_RANKS, measure_host
    from gfdit.comm.host_share import report as report_host

    print(f"one of {NUM_RANKS} ranks, kernels replaced by nothing, {machine()}, load {os.getloadavg()[0]:.1f}")
    for line in report_host(measure_host(rounds)):
        print(line)
    return 0


def measure_rank(
    comm: Any,
    operations: Any,
    groups: Sequence[int],
    sizes: Sequence[int],
    rounds: int,
    every_way: bool,
    max_repeats: int,
) -> RankResults:
    """Runs in every rank."""
    from gfdit.comm.measure import OPERATIONS, Case, measure

    places = comm.selector.site.layout.place_bytes if comm.selector else 0
    cases: list[Case] = []
    for operation in operations or OPERATIONS:
        for group_size in groups if operation.name != "SEND" else [2]:
            for num_bytes in sizes if operation.name != "BARRIER" else [0]:
                case = Case(operation, group_size, num_bytes, place_bytes=places)
                choices = [comm.selector.choose(case.situation)] if comm.selector else [None]
                if every_way:
                    choices = comm.selector.candidates(case.situation)
                cases += [replace(case, choice=choice) for choice in choices]
    why = [comm.selector.explain(case.situation) if comm.selector else "" for case in cases]
    seconds = measure(comm, cases, rounds, max_repeats)
    hardware = comm.selector.site.hardware if comm.selector else ""
    return RankResults(hardware, list(map(Result, cases, why, seconds)))


def slowest(by_rank: Sequence[RankResults]) -> list[Result]:
    """A round takes as long as its slowest rank."""
    combined = []
    for results in zip(*(ranks.results for ranks in by_rank), strict=True):
        taking_part = [result.seconds for result in results if result.seconds]
        combined.append(results[0]._replace(seconds=[max(values) for values in zip(*taking_part, strict=True)]))
    return combined


def report(results: Sequence[Result], fastest_first: bool) -> list[str]:
    """A line per case: median, smallest and largest round in us, and how the data went."""

    def order(result: Result) -> tuple[float, ...]:
        case = result.case
        return case.operation, case.group_size, case.num_bytes, result.median_s if fastest_first else 0.0

    lines = []
    for result in sorted(results, key=order):
        case, low, high = result.case, min(result.seconds) * 1e6, max(result.seconds) * 1e6
        rate = f"{case.num_bytes / result.median_s / 1e9:8.2f} GB/s per pair" if case.num_bytes else ""
        lines.append(
            f"{case.operation.name.lower():11} {case.group_size:2} ranks {case.num_bytes:10} bytes "
            f"{result.median_s * 1e6:10.1f} us ({low:.1f} to {high:.1f}) {rate:22} {case.choice or ''}".rstrip()
        )
    return lines


def save(path: Path, hardware: str, source: dict[str, Any], results: Sequence[Result]) -> None:
    from gfdit.comm.selector_table import SelectorTable, TableEntry

    entries = []
    for result in results:
        case = result.case
        entries.append(TableEntry(case.operation, case.group_size, case.num_bytes, case.choice, result.median_s))
    note = f"{source['command']}, commit {source['commit']}, {source['date']}"
    SelectorTable(hardware, note, tuple(entries)).save(path)


def where(heap: str, num_ranks: int, hardware: str) -> str:
    """What was measured on, so that nobody takes a figure for another machine's."""
    if not hardware:
        return f"{num_ranks} CPU ranks on {machine()}"
    if heap == "interpreted":
        return f"{hardware} on {machine()}"
    return f"{num_ranks} virtual ranks on one {hardware}" if heap == "local" else f"{num_ranks} x {hardware}"


def operation_named(name: str) -> Any:
    from gfdit.comm.measure import OPERATIONS

    known = {operation.name.lower(): operation for operation in OPERATIONS}
    if name not in known:
        raise ValueError(f"unknown operation {name!r}; known: {', '.join(known)}")
    return known[name]


def parse_bytes(text: str) -> int:
    """``64K``, ``1M`` or a plain number of bytes. Raises ValueError for anything else."""
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    if not number.isdecimal():
        raise ValueError(f"not a number of bytes: {text!r} (for example 4096, 64K or 1M)")
    return int(number) * unit
