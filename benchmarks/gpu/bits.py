"""Every kernel and path, compared bit by bit with references; then graphs and failures; then mutants."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.gpu import failures, graphs, operations
from benchmarks.gpu.controls import CONTROLS, Control, run_controls
from benchmarks.gpu.job import Job
from benchmarks.gpu.ranks import Where
from gfdit.comm.choice import Path

# On a GPU a failure is noticed at once; an interpreted poll takes milliseconds, on a busy machine many.
GPU_LATE_S, INTERPRETED_LATE_S = 0.1, 10.0

Check = Callable[[], str]


def run(job: Job) -> None:
    for name, check in _data_checks(Where.of(job), job.spec.quick):
        job.check(name, check)


def run_failures(job: Job) -> None:
    """With ``quick`` fewer repetitions, but every kind of failure."""
    where, quick = Where.of(job), job.spec.quick
    times, num_bytes = 5 if quick else 50, 3000 if where.on_gpu else 300
    if not where.on_gpu:
        times = min(times, 10)
    late_s, timeout_s = (GPU_LATE_S, 0.5) if where.on_gpu else (INTERPRETED_LATE_S, 1.0)
    job.check("graph capture", lambda: " ".join(set(where.run(graphs.replays, num_bytes, times))))
    job.check(
        "timeout",
        lambda: _first(_failing(where, failures.timeout, timeout_s, late_s, timeout_s=timeout_s)),
    )
    job.check("mismatch", lambda: _first(_failing(where, failures.mismatch)) or "told in both ranks")
    job.check("abort", lambda: _first(_failing(where, failures.abort, late_s)))
    again = 20 if where.on_gpu and not quick else 2
    job.check("reset, again and again", lambda: _first(_failing(where, failures.repeated, again)))


def run_mutants(job: Job) -> None:
    """Every mutant must be seen to fail, and the real kernels with the same stalls must not."""
    where = Where.of(job)
    for control in [CONTROLS[0], *CONTROLS[2:4]] if job.spec.quick else CONTROLS:
        job.check(control.name, partial(_control, where, control))


def _control(where: Where, control: Control) -> str:
    (text,) = run_controls(where, [control])
    if (text != "ok") != control.must_fail:
        raise AssertionError(f"must {'fail' if control.must_fail else 'be ok'}, but: {text}")
    return text


def _data_checks(where: Where, quick: bool) -> Iterator[tuple[str, Check]]:
    if where.on_gpu:
        sizes: tuple[int, ...] = (1, 37, 1000, 4096, 5000, 65_536 + 257, 300_000)
        path_sizes: tuple[int, ...] = (1, 16, 4000, 4096, 12_345, 200_000, 1 << 20)
    else:  # the interpreter pays by the operation
        sizes, path_sizes = (37, 900), (1, 1040) if quick else (1, 16, 1040, 9001)
    largest = 2 if quick else 4 if where.on_gpu else 3
    yield (
        f"ordered subsets of up to {largest} ranks",
        lambda: _counted(where.run(operations.ordered_subsets, largest, sizes)),
    )
    for path in Path:
        if quick and not where.on_gpu and path not in (Path.BARRIER, Path.LOW_LATENCY, Path.PUSH):
            continue
        for num_programs in (1, 8) if where.on_gpu else (1,):
            name = f"path {path}, {num_programs} program{'s' * (num_programs > 1)}"
            yield name, partial(_path, where, path, num_programs, path_sizes)
    yield "uneven parts", lambda: _counted(where.run(operations.uneven_check))
    elements = (1, 1000, 100_000) if where.on_gpu else (1, 100)
    yield "sums and heads", lambda: _counted(where.run(operations.sums_and_heads, elements))
    length = 2000 if where.on_gpu and not quick else 40
    yield (
        "random operations on two lanes",
        lambda: _counted(where.run(operations.random_sequence, 7, length, sizes)),
    )


def _path(where: Where, path: Path, num_programs: int, sizes: tuple[int, ...]) -> str:
    return _first(where.run(operations.path_check, path, num_programs, sizes))


def _failing(where: Where, fn: Callable[..., str], *args: object, timeout_s: float = 20.0) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        return where.run(fn, directory, *args, num_ranks=4, comm_timeout_s=timeout_s)


def _counted(counts: list[int]) -> str:
    if not all(counts):
        raise AssertionError(f"some ranks checked nothing: {counts}")
    return f"{sum(counts)} results right"


def _first(told: list[str]) -> str:
    return next((text for text in told if text), "")
