"""Compile every kernel variant ahead of time, without a GPU, and record what each takes: ``make kernels``.

Writes ``docs/kernels.json`` (of which source they are, a line per variant) and the table in ``docs/kernels.md`` (a
line per kernel).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402 (needs the path above)
from triton.backends.compiler import GPUTarget  # noqa: E402

from gfdit.kernels.compiled import Variant, compile_variant, kernel_name  # noqa: E402
from gfdit.kernels.variants import all_variants  # noqa: E402
from tools.ptx import loaded_ahead  # noqa: E402
from tools.sass import copy_loops  # noqa: E402

CAPABILITIES = (80, 90, 100)
WORLD_SIZE = 8
# They stand or fall with latency: not a byte may go to the stack.
SMALL_PATHS = (
    "barrier",
    "low_latency_exchange",
    "low_latency_push",
    "low_latency_pull",
    "low_latency_all_reduce",
)
KERNELS = ROOT / "gfdit" / "kernels"
RECORD = ROOT / "docs" / "kernels.json"
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"


class Figures(NamedTuple):
    """Of one variant: registers of a thread, its stack, to which they spill, and shared memory of a program.

    ``flight_bytes``: what a program has loaded, or is loading, before it stores the first of it. Of the turn of a
    loop that copies, the instructions of a thread: of the loops that move the most, the one that takes the most.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    flight_bytes: int
    turn_instructions: int


class Compiled(NamedTuple):
    variant: str
    capability: int
    figures: Figures
    ptx: str


def variants_for(capability: int) -> list[Variant]:
    """All variants that a GPU of this compute capability (90: 9.0) may be asked to launch."""
    return list(all_variants(WORLD_SIZE, ptx=True, hopper=capability >= 90))


def every_job() -> list[tuple[int, int]]:
    """(capability, number) of all variants."""
    return [(capability, number) for capability in CAPABILITIES for number in range(len(variants_for(capability)))]


def selected_jobs(capability: int = 90) -> list[tuple[int, int]]:
    """Each kernel's first packed variant of the largest groups; of small paths all widths and dtypes."""
    chosen: dict[tuple[object, ...], int] = {}
    for number, variant in enumerate(variants_for(capability)):
        constants: dict[str, Any] = dict(variant.constants)
        if constants.get("PACKED", True) and constants.get("SIZE", WORLD_SIZE) == WORLD_SIZE:
            name = kernel_name(variant.kernel)
            if name in SMALL_PATHS:  # how large a block is follows from the size of the group, which grows
                chosen[name, constants.get("WIDTH"), constants.get("DTYPE")] = number
            else:
                chosen.setdefault((name, constants.get("TMA")), number)
    return [(capability, number) for number in chosen.values()]


def target_of(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


def compile_one(job: tuple[int, int]) -> Compiled:
    """Compile variant number ``job[1]`` for capability ``job[0]``."""
    capability, number = job
    variant = variants_for(capability)[number]
    compiled = compile_variant(variant, target_of(capability))
    registers, stack_bytes = usage_of(compiled.asm["cubin"])
    turns = copy_loops(compiled.asm["cubin"])
    largest = max((turn.stored_bytes for turn in turns), default=0)
    instructions = max((turn.num_instructions for turn in turns if turn.stored_bytes == largest), default=0)
    ptx, shared_bytes = compiled.asm["ptx"], compiled.metadata.shared
    by_tiles = dict(variant.constants).get("TMA", False)  # they are in shared memory
    in_flight = shared_bytes if by_tiles else 32 * variant.num_warps * loaded_ahead(ptx)
    return Compiled(
        str(variant), capability, Figures(registers, stack_bytes, shared_bytes, in_flight, instructions), ptx
    )


def usage_of(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread. Raises ValueError if the disassembler is not understood."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: re.search(rf"\b{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL")}
    if not all(found.values()):
        raise ValueError(f"no figures in {text!r}")
    registers, stack, local = (int(match[1]) for match in found.values() if match)
    return registers, stack + local


def compile_all(jobs: Sequence[tuple[int, int]], num_processes: int) -> Iterator[Compiled]:
    """Compile (capability, number) in processes of their own, with a cache that is not kept."""
    with tempfile.TemporaryDirectory() as cache:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_processes, context, _use_cache, (cache,)) as pool:
            yield from pool.map(compile_one, jobs)


def _use_cache(directory: str) -> None:
    triton.knobs.cache.dir = directory


def to_record(results: Iterable[Compiled]) -> dict[str, Any]:
    variants: dict[str, dict[str, list[int]]] = {}
    for result in results:
        variants.setdefault(result.variant, {})[str(result.capability)] = list(result.figures)
    head = {"triton": triton.__version__, "sources": sources_digest(), "figures": list(Figures._fields)}
    return {**head, "variants": variants}


def sources_digest() -> str:
    """Of all that the kernels are made from, without lines that are blank or a comment."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(KERNELS.glob("*.py")):
        lines = [line.rstrip() for line in path.read_text().splitlines()]
        code = [line for line in lines if line and not line.lstrip().startswith("#")]
        digest.update("\n".join([path.name, *code, ""]).encode())
    return digest.hexdigest()


def write_record(record: dict[str, Any]) -> None:
    head = {key: value for key, value in record.items() if key != "variants"}
    lines = [f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in sorted(record["variants"].items())]
    variants = ",\n".join(lines)
    RECORD.write_text(f'{json.dumps(head)[:-1]}, "variants": {{\n{variants}\n}}}}\n')


def to_table(record: dict[str, Any]) -> str:
    """A line per kernel: number of variants, and the range of each figure by capability."""
    kernels: dict[str, list[dict[str, list[int]]]] = {}
    for name, rows in record["variants"].items():
        kernels.setdefault(name.split("(")[0], []).append(rows)
    heads = [f"registers, {capability // 10}.{capability % 10}" for capability in CAPABILITIES]
    heads += ["spilled bytes", "shared bytes", "bytes in flight", "instructions a turn"]
    lines = ["| kernel | variants | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for kernel, variants in sorted(kernels.items()):
        cells = [kernel, str(len(variants))]
        cells += [_range(rows[str(c)][0] for rows in variants if str(c) in rows) for c in CAPABILITIES]
        cells += [_range(figures[at] for rows in variants for figures in rows.values()) for at in (1, 2, 3, 4)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _range(values: Iterable[int]) -> str:
    numbers = sorted(set(values))
    return "none" if not numbers else str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def write_table(record: dict[str, Any]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{to_table(record)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    jobs = every_job()
    results = []
    for done, result in enumerate(compile_all(jobs, args.processes), start=1):
        results.append(result)
        if done % 50 == 0 or done == len(jobs):
            print(f"{done} of {len(jobs)} compiled", flush=True)
    record = to_record(results)
    write_record(record)
    write_table(record)
    spilling = [f"{r.variant} for {r.capability}" for r in results if r.figures.stack_bytes]
    print(f"{len(spilling)} spill registers" + "".join(f"\n  {name}" for name in spilling))


if __name__ == "__main__":
    main()
