"""Five kernels under NVIDIA's tools: counters by Nsight Compute, checks by compute-sanitizer.

A profiler that runs one kernel at a time would wait for ever for one that waits for another rank's. So ranges are
profiled, in which kernels run as they do without it: a call of both ranks is a range, and the program is repeated
as often as the counters need. Without the tool the program runs by itself, which shows that it works.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.job import ROOT, Job, Spec
from benchmarks.gpu.ranks import Where, together
from gfdit.comm import GroupFreeComm
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES

METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory, % of peak",
    "lts__t_sector_hit_rate.pct": "L2 hits, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps, % of peak",
    "smsp__inst_executed.sum": "instructions",
}
_REPEATS = 3
# Reported lines of a tool that found something.
_MOST_LINES = 6
_FOUND = 99


def run_metrics(job: Job) -> None:
    if job.spec.interpret:
        job.check("the program that is profiled", lambda: _program(job.spec))
        return
    job.check("counters", partial(_counters, job))


def run_sanitizer(job: Job) -> None:
    # Finds nothing that the program does not do: a store far out of bounds must be found.
    job.check("memcheck finds a planted store out of bounds", partial(_sanitized, job, "memcheck", planted=True))
    for tool in ("synccheck", "memcheck"):
        job.check(tool, partial(_sanitized, job, tool))


def _program(spec: Spec) -> str:
    where = Where("interpreted" if spec.interpret else "local", 2)
    names = where.run(five_kernels, not where.on_gpu, sizes=DEVICE_SIZES if where.on_gpu else None)[0]
    return ", ".join(names)


def five_kernels(comm: GroupFreeComm, small: bool) -> list[str]:
    """Runs each with both ranks, as a range of its own. Returns their names, in the order of the ranges."""
    together(comm)
    calls = _calls(comm, small)
    for call in calls.values():
        call()  # once, outside of the ranges
    comm.synchronize()
    together(comm)
    profiles = comm.device.type == "cuda" and comm.rank == 0
    for call in calls.values():
        if profiles:
            torch.cuda.profiler.start()
        together(comm)
        for _ in range(1 if small else _REPEATS):
            call()
        comm.synchronize()
        together(comm)
        if profiles:
            torch.cuda.profiler.stop()
        together(comm)
    return list(calls)


def _calls(comm: GroupFreeComm, small: bool) -> dict[str, Callable[[], object]]:
    """By what is looked at; sizes of their own range."""
    group = comm.group((0, 1))
    few, many = (600, 5000) if small else (8 << 10, 32 << 20)
    tokens, heads, head_size = (8, 4, 16) if small else (2048, 24, 128)

    def memory(num_bytes: int) -> torch.Tensor:
        return torch.ones(num_bytes, dtype=torch.uint8, device=comm.device)

    x_few, out_few, x_many, out_many = memory(few), memory(2 * few), memory(2 * many), memory(2 * many)
    qkv = [torch.ones((1, tokens, heads, head_size), dtype=torch.bfloat16, device=comm.device) for _ in range(3)]
    scattered = [torch.empty((1, 2 * tokens, heads // 2, head_size), dtype=x.dtype, device=x.device) for x in qkv]
    return {
        "barrier": lambda: comm.barrier(group),
        "all-gather, low latency": lambda: comm.all_gather_into_tensor(out_few, x_few, group),
        "all-to-all, large": lambda: comm.all_to_all_single(out_many, x_many, group),
        "broadcast, large": lambda: comm.broadcast(x_many, 0, group),
        "scatter of heads": lambda: comm.scatter_heads(qkv, group, out=scattered),
    }


def _counters(job: Job) -> str:
    command = ["ncu", "--replay-mode", "app-range", "--target-processes", "all", "--clock-control", "none"]
    command += ["--metrics", ",".join(METRICS), "--csv", "--page", "raw"]
    done = _run([*command, *_self("--large")], job.left_s)
    rows = ranges(done.stdout)
    names = [line.removeprefix(_NAME) for line in done.stdout.splitlines() if line.startswith(_NAME)]
    # The program runs again for every pass, and tells its names each time.
    names = list(dict.fromkeys(names))
    if not rows or len(rows) != len(names):
        raise RuntimeError(f"{len(rows)} ranges for {len(names)} calls: {_last_lines(done)}")
    for name, row in zip(names, rows, strict=True):
        job.row(kernels=name, **{METRICS[metric]: row.get(metric, "") for metric in METRICS})
    return f"{len(rows)} ranges of {_REPEATS} calls by both ranks"


def ranges(text: str) -> list[dict[str, str]]:
    """Of ncu's raw page: a row per range, values with their units. Whatever else was printed is passed over."""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return []
    rows = list(csv.DictReader(line for line in lines[begin:] if line.startswith('"')))
    units = next((row for row in rows if not row["ID"]), {})
    return [
        {name: f"{value} {units.get(name) or ''}".strip() for name, value in row.items() if name}
        for row in rows
        if row["ID"]
    ]


def _sanitized(job: Job, tool: str, planted: bool = False) -> str:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "5"]
    done = _run([*command, *_self(*(["--planted"] if planted else []))], job.left_s)
    found = done.returncode == _FOUND
    if planted and found:
        return "found"
    if planted or done.returncode != 0:
        raise RuntimeError(f"{tool} ended with {done.returncode}: {_last_lines(done)}")
    return "nothing found"


_NAME = "range: "


def _self(*options: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.profiled", *options]


def _run(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """In this process group, which is ended with the part."""
    print(" ".join(command), flush=True)
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # The tools look at every module that is loaded, and nearly all of torch's are not needed.
    options["env"] = os.environ | {"CUDA_MODULE_LOADING": "LAZY"}
    done = subprocess.run(command, cwd=ROOT, timeout=max(limit_s - 1, 1), **options)
    print(done.stdout, flush=True)
    return done


def _last_lines(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip("= ") for line in done.stdout.splitlines() if line.strip("= ")]
    telling = [line for line in lines if "rror" in line or "nvalid" in line or "denied" in line]
    return "; ".join((telling or lines)[:_MOST_LINES]) or f"it printed nothing, status {done.returncode}"


def main(argv: list[str]) -> int:
    """The program under the tools; on one GPU, two virtual ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="sizes for counters; else small ones")
    parser.add_argument("--planted", action="store_true", help="only store out of bounds")
    args = parser.parse_args(argv)
    if args.planted:
        from benchmarks.gpu.planted import store_out_of_bounds

        store_out_of_bounds()
        return 0
    names = Where("local", 2).run(five_kernels, not args.large, sizes=DEVICE_SIZES)[0]
    print("\n".join(f"{_NAME}{name}" for name in names), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
