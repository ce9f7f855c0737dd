"""`gfdit bench migration`: artifacts from layout to layout between CPU ranks, against gloo's point-to-point.

The same bytes go between the same ranks, in one run and alternating order.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gfdit.cli.provenance import provenance, source_lines, write_report

TARGET_RATIO = 1.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="each measures everything once")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write dated JSON and Markdown there")


def run(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    from gfdit.cli.migration_speed import CASES, NUM_RANKS, measure
    from gfdit.comm import spawn

    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    load_average = os.getloadavg()[0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    by_rank = spawn(measure, NUM_RANKS, args=(store.port, args.rounds), timeout_s=3600)
    entries = [_entry(case, [seconds[index] for seconds in by_rank]) for index, case in enumerate(CASES)]
    report = {
        **source,
        "load_average_before": load_average,
        "ranks": NUM_RANKS,
        "rounds": args.rounds,
        "migrations": entries,
    }
    print("\n".join(_lines(entries)))
    if args.out is not None:
        for path in write_report(args.out, "migration", report, _markdown(report)):
            print(path)
    return 0


def _entry(case: Any, by_rank: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """A round takes as long as its slowest rank; ratios are gloo's time over ours, round by round."""
    ways = zip(*(seconds.values() for seconds in by_rank), strict=True)
    ours, gloo, bare = ([max(values) for values in zip(*ranks, strict=True)] for ranks in ways)
    return {
        "artifact": case.size.name,
        "bytes": case.size.num_bytes,
        "migration": case.move.name,
        "gfdit_ms": _spread([1e3 * value for value in ours]),
        "gloo_ms": _spread([1e3 * value for value in gloo]),
        "gloo_bare_ms": _spread([1e3 * value for value in bare]),
        "ratio": _spread([theirs / own for own, theirs in zip(ours, gloo, strict=True)]),
        "ratio_bare": _spread([theirs / own for own, theirs in zip(ours, bare, strict=True)]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


_TIMES, _RATIOS = ("gfdit_ms", "gloo_ms", "gloo_bare_ms"), ("ratio", "ratio_bare")
_TITLES = ["latents", "migration", "gfdit (ms)", "gloo (ms)", "bare (ms)", "gloo / gfdit", "bare / gfdit"]


def _cells(entry: dict[str, Any]) -> list[str]:
    spreads = [entry[name] for name in (*_TIMES, *_RATIOS)]
    return [
        entry["artifact"],
        entry["migration"],
        *(f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})" for spread in spreads),
    ]


def _lines(entries: Sequence[dict[str, Any]]) -> list[str]:
    rows = [_TITLES, *map(_cells, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _worst(entries: Sequence[dict[str, Any]], ratio: str) -> str:
    worst = min(entries, key=lambda entry: entry[ratio]["median"])
    return f"{worst[ratio]['median']:.2f} x our time ({worst['artifact']}, {worst['migration']}"


def _markdown(report: dict[str, Any]) -> str:
    entries = report["migrations"]
    reached = all(entry["ratio"]["median"] >= TARGET_RATIO for entry in entries)
    rows = [_TITLES, ["---"] * len(_TITLES), *map(_cells, entries)]
    lines = [
        "# Migration of artifacts between CPU ranks against gloo point-to-point",
        "",
        f"- Gloo takes at least {_worst(entries, 'ratio')}; target {TARGET_RATIO:.0f} x: "
        f"{'reached' if reached else 'missed'})",
        f"- Gloo with nothing but the bare tensors takes at least {_worst(entries, 'ratio_bare')})",
        *source_lines(report, f"Python {report['python']}", f"load average {report['load_average_before']:.1f}"),
        f"- Median of {report['rounds']} rounds (smallest to largest), each way in each round, the slowest of "
        f"{report['ranks']} ranks, one torch thread each",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "All ways move the same bytes of the same tensors between the same ranks. gfdit: a whole migration as "
        "workers do it, with metadata pickled and unpickled, new tensors made and filled. gloo: the same plan and "
        "metadata by `isend` and `irecv`, all at once, into memory that is there. bare: gloo without metadata, "
        "nothing put together. Migrations follow each other without waiting for the slowest rank. Nothing here "
        "foretells anything about GPUs.",
    ]
    return "\n".join(lines) + "\n"
