"""Speed of the template store on this host: keeping, reading, gathering rows, and loading from disk, in GB/s.

Run as `python -m benchmarks.template_store`; by default with a third of the blocks of FLUX, 4 of 24 heads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.rows import gather
from gfdit.templates.store import TemplateStore

RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=19)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=Path("out"), help="of the disk tier; a folder is made in it"
    )
    parser.add_argument("--shared", type=Path, default=Path("/dev/shm"), help="likewise, of the host tier")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    report["command"] = report["command"].replace("benchmarks/template_store.py", "-m benchmarks.template_store")
    args.folder.mkdir(parents=True, exist_ok=True)
    disk, shared = (Path(tempfile.mkdtemp(prefix="gfdit-store-", dir=at)) for at in (args.folder, args.shared))
    try:
        report["gb_per_s"] = measure(disk, shared, args)
    finally:
        for folder in (disk, shared):
            shutil.rmtree(folder)
    for path in write_report(args.out, "template_store", report, _markdown(report, args)):
        print(path)


def measure(disk: Path, shared: Path, args: Any) -> dict[str, float]:
    """GB/s by what was done: the median of the repetitions, of the bytes that came out."""
    values = torch.randn(args.blocks, 2, args.tokens, 128).bfloat16()
    room = 4 * args.heads * (values.nbytes + (1 << 20))
    spent: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def timed(what: str, num_bytes: int) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        spent.setdefault(what, []).append(num_bytes / (time.perf_counter() - start_s) / 1e9)

    def opened() -> TemplateStore:
        return TemplateStore(disk, shared, host_bytes=room, disk_bytes=room)

    heads, pass_bytes = range(args.heads), args.heads * values.nbytes
    for number in range(args.repeat + 1):
        exact, rounded = (_template(number, kind) for kind in ("exact", "rounded"))
        store, reader = opened(), opened()  # the reader knows none of the checksums yet
        with timed("put", pass_bytes):
            for head in heads:
                store.put(UnitKey(exact, 0, 0, head), values)
        with timed("put, rounded to fp8 (of bfloat16)", pass_bytes):
            for head in heads:
                store.put(UnitKey(rounded, 0, 0, head), values, "fp8")
        store.forget(rounded)
        with timed("save to disk", pass_bytes):
            store.save(exact).result()
        with reader.reading(exact) as reading:
            with timed("first map, with checksum", pass_bytes):
                units = reading.heads(0, 0, heads)
            assert units is not None
            for ratio in RATIOS:
                num_rows = round(args.tokens * (1 - ratio))
                rows = torch.randperm(args.tokens)[:num_rows].sort().values
                out = gather(units, rows)
                with timed(f"gather {num_rows} rows", out.nbytes):
                    gather(units, rows, out=out)
            del units
        _leave_memory(disk)
        for path in (shared / str(exact)).glob("*.kv"):
            path.unlink()
        with timed("warm from disk", pass_bytes):
            loaded = store.warm(exact).result()
        assert loaded
        store.forget(exact)
        store.close()
        reader.close()
        if number == 0:  # it has warmed up this process
            spent.clear()
    return {what: statistics.median(found) for what, found in spent.items()}


def _template(number: int, kind: str) -> TemplateKey:
    return TemplateKey.of(image=number, model=kind, size=(), sigmas=(), prompts=(), guidance=(), noise=0)


def _leave_memory(folder: Path) -> None:
    """So that the next one to read the files reads the disk."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _markdown(report: dict[str, Any], args: Any) -> str:
    mb = args.blocks * 2 * args.tokens * 128 * 2 / 1e6
    rows = [f"| {what} | {speed:.2f} |" for what, speed in report["gb_per_s"].items()]
    return "\n".join(
        [
            "# The template store",
            "",
            *source_lines(report),
            "",
            f"A pass of {args.heads} heads, {mb:.0f} MB each: {args.blocks} blocks, {args.tokens} tokens, head "
            f"size 128, bfloat16. One thread of Python; medians of {args.repeat}. Rows gathered are those of "
            f"unmasked tokens at mask ratios of {', '.join(map(str, RATIOS))}; their bytes are what comes out.",
            "",
            "| | GB/s |",
            "|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
