"""Every kernel variant into Triton's cache, one per core at a time; the other parts find them there."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.gpu.job import Job

# Compiled for where there is no GPU to ask.
CAPABILITY = 90


def run(job: Job) -> None:
    capability = job.spec.capability or CAPABILITY
    chosen = variants(capability, job.spec.ranks, one_each=job.spec.interpret)
    job.check("all variants", lambda: _compile_all(capability, job.spec.ranks, chosen))
    job.check("they are found again", lambda: _find_again(capability, job.spec.ranks, chosen))


def variants(capability: int, ranks: int, *, one_each: bool) -> list[int]:
    """Numbers of those to compile, in the order of ``_all``; one of each kernel will do without a GPU."""
    from gfdit.kernels.compiled import kernel_name

    first: dict[str, int] = {}
    everything = _all(capability, ranks)
    for number, variant in enumerate(everything):
        first.setdefault(kernel_name(variant.kernel), number)
    return list(first.values()) if one_each else list(range(len(everything)))


def _all(capability: int, ranks: int) -> list[Any]:
    from benchmarks.gpu.handshake import handshake_variant
    from gfdit.kernels.variants import all_variants

    return [handshake_variant(ranks, ptx=True), *all_variants(ranks, ptx=True, hopper=capability >= 90)]


def _compile_all(capability: int, ranks: int, numbers: Sequence[int]) -> str:
    num_processes = min(len(os.sched_getaffinity(0)), len(numbers))
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context) as pool:
        told = list(pool.map(_compile, [(capability, ranks, number) for number in numbers]))
    if failed := [text for text in told if text]:
        raise RuntimeError(f"{len(failed)} of {len(numbers)} do not compile: {'; '.join(failed)}")
    return f"{len(numbers)} in {time.monotonic() - begin:.1f} s, {num_processes} at a time"


def _compile(which: tuple[int, int, int]) -> str:
    """What is wrong with the variant; "" if nothing."""
    from triton.backends.compiler import GPUTarget

    from gfdit.kernels.compiled import compile_variant

    capability, ranks, number = which
    variant = _all(capability, ranks)[number]
    try:
        compiled = compile_variant(variant, GPUTarget("cuda", capability, 32))
    except Exception as error:
        return f"{variant}: {type(error).__name__}: {str(error)[-300:]}"
    return "" if compiled.asm["cubin"] else f"{variant}: no machine code"


def _find_again(capability: int, ranks: int, numbers: Sequence[int]) -> str:
    """In another order, by another process: nothing is compiled again."""
    import triton

    folder, begin = triton.knobs.cache.dir, time.monotonic()
    known, again = set(os.listdir(folder)), []
    for number in reversed(numbers):
        if text := _compile((capability, ranks, number)):
            raise RuntimeError(text)
        if fresh := set(os.listdir(folder)) - known:
            again.append(str(_all(capability, ranks)[number]))
            known |= fresh
    if again:
        raise AssertionError(f"compiled again, as every part would: {'; '.join(again)}")
    return f"all of them in {time.monotonic() - begin:.1f} s"
