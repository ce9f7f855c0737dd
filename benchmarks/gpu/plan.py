"""The parts of the check, the most telling first, and what share of the time each may have.

Every part is a process of its own. A part's limit is its weight's share of the time that is left to it and those
after it, so what one does not use goes to the others, and one that hangs costs them nothing but its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """``run``: "module:function", called with a ``Job``. ``needs``: names of ``NEEDS`` that must all be there.

    ``weight``: of the time on a GPU; ``interpreted_weight``: in a run without one, None if the part needs a
    device. ``least_s``: with less time than this it is not begun.
    """

    name: str
    run: str
    tells: str
    weight: float
    interpreted_weight: float | None = None
    needs: tuple[str, ...] = ()
    least_s: float = 8.0


# What a machine may have, and how the report says that it has not.
NEEDS = {
    "several_gpus": "a GPU for every rank",
    "ncu": "ncu (Nsight Compute), which is not on the path",
    "compute_sanitizer": "compute-sanitizer, which is not on the path",
}

PARTS = (
    Part(
        "compiled ahead",
        "benchmarks.gpu.compile_ahead:run",
        "every kernel variant compiles on this machine; the other parts load them from the cache",
        weight=10,
        interpreted_weight=15,
    ),
    Part(
        "bits",
        "benchmarks.gpu.bits:run",
        "every kernel and path gives the bits of a reference that never communicates",
        weight=12,
        interpreted_weight=30,
    ),
    Part(
        "processes",
        "benchmarks.gpu.processes:run",
        "the heap between processes: rendezvous, memory mapped across them, writes seen by the other side",
        weight=12,
        interpreted_weight=10,
    ),
    Part(
        "head exchanges",
        "benchmarks.gpu.head_exchanges:run",
        "Ulysses at real shapes against unfused copies and the device's copy rate",
        weight=14,
        interpreted_weight=8,
    ),
    Part(
        "DiT block",
        "benchmarks.gpu.dit_block:run",
        "a block of real dimensions at every degree: eager, compiled and captured, bits compared",
        weight=18,
        interpreted_weight=12,
    ),
    Part(
        "failures",
        "benchmarks.gpu.bits:run_failures",
        "graphs are captured and replayed; peers that are late, confused or stopped end in errors in time",
        weight=7,
        interpreted_weight=8,
    ),
    Part(
        "beside compute",
        "benchmarks.gpu.beside:run",
        "what a migration and a ring cost a matrix product that runs meanwhile",
        weight=8,
        interpreted_weight=6,
    ),
    Part(
        "NCCL",
        "benchmarks.gpu.nccl:run",
        "the same exchanges by NCCL, plain and on symmetric memory",
        weight=10,
        needs=("several_gpus",),
    ),
    Part(
        "times",
        "benchmarks.gpu.timings:run",
        "every path from 1 KiB to 64 MiB against an empty handshake and the device's copy rate",
        weight=14,
        interpreted_weight=5,
    ),
    Part(
        "controls",
        "benchmarks.gpu.bits:run_mutants",
        "kernels with a safeguard taken out are seen to fail, so the checks above can",
        weight=8,
        interpreted_weight=12,
    ),
    Part(
        "metrics",
        "benchmarks.gpu.profiled:run_metrics",
        "what limits five of the kernels, by the device's own counters",
        weight=8,
        interpreted_weight=4,
        needs=("ncu",),
        least_s=20,
    ),
    Part(
        "sanitizer",
        "benchmarks.gpu.profiled:run_sanitizer",
        "no barrier that only some threads reach, no access out of bounds",
        weight=8,
        needs=("compute_sanitizer",),
        least_s=20,
    ),
)


def weight_of(part: Part, interpret: bool) -> float:
    return (part.interpreted_weight or 0.0) if interpret else part.weight


def lacking(part: Part, interpret: bool, found: Sequence[str]) -> str:
    """What ``part`` needs and the machine has not; "" if nothing. Interpreted, a part needs no tools."""
    if interpret:
        return "a GPU" if part.interpreted_weight is None else ""
    return ", ".join(NEEDS[need] for need in part.needs if need not in found)


def limit_s(part: Part, following: Sequence[Part], left_s: float, interpret: bool) -> float:
    """Seconds that ``part`` may take of the ``left_s`` for it and ``following``; 0: it is not worth to begin."""
    if left_s < part.least_s:
        return 0.0
    weights = [weight_of(other, interpret) for other in (part, *following)]
    return max(left_s * weights[0] / sum(weights), part.least_s)
