"""``python -m tests.fuzz``: every target with its share of the inputs, and a table of what became of them."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gfdit.cli.provenance import provenance, source_lines
from tests.fuzz.limits import CPU_S, MEMORY_BYTES
from tests.fuzz.running import Tally, in_process
from tests.fuzz.targets import Target, every_target

FAILED = Path("out/fuzz")
_COLUMNS = ("target", "inputs", "rejected", "accepted", "failures", "inputs/s", "max ms")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--inputs", type=int, default=1_000_000, help="of all targets together (default 1,000,000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same inputs")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="targets with this in their name"
    )
    parser.add_argument(
        "--out", type=Path, metavar="TABLE.md", help="write the table there, and as JSON beside it"
    )
    arguments = parser.parse_args()
    targets = [
        one for one in every_target() if not arguments.only or any(word in one.name for word in arguments.only)
    ]
    tallies: dict[str, Tally] = {}
    print(_row(_COLUMNS), flush=True)
    for target, num_inputs in shares(targets, arguments.inputs):
        tally = tallies[target.name] = in_process(target, num_inputs, arguments.seed)
        print(_row(cells(target.name, tally)), flush=True)
        for wrong, data in tally.failures.values():
            path = FAILED / target.name / hashlib.sha256(data).hexdigest()[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            print(f"    {wrong}\n    the input: {path}", flush=True)
    everything = total(tallies.values())
    print(_row(cells("all", everything)))
    if arguments.out is not None:
        _write(arguments.out, tallies, everything, arguments.inputs)
    return 1 if everything.num_failed else 0


def shares(targets: Sequence[Target], num_inputs: int) -> Iterator[tuple[Target, int]]:
    """Rounded up: in all they are at least ``num_inputs``."""
    whole = sum(target.weight for target in targets)
    for target in targets:
        yield target, -int(-num_inputs * target.weight // whole)


def total(tallies: Iterable[Tally]) -> Tally:
    found = Tally()
    for tally in tallies:
        for name in ("num_inputs", "num_accepted", "num_failed", "seconds"):
            setattr(found, name, getattr(found, name) + getattr(tally, name))
        found.max_ms = max(found.max_ms, tally.max_ms)
    return found


def cells(name: str, tally: Tally) -> tuple[str, ...]:
    rate = tally.num_inputs / tally.seconds if tally.seconds else 0.0
    numbers = (tally.num_inputs, tally.num_rejected, tally.num_accepted, tally.num_failed)
    return (name, *(f"{number:,}" for number in numbers), f"{rate:,.0f}", f"{tally.max_ms:.0f}")


def _row(cells: Sequence[str]) -> str:
    return f"{cells[0]:<30}" + "".join(f"{cell:>12}" for cell in cells[1:])


def _write(path: Path, tallies: dict[str, Tally], everything: Tally, num_inputs: int) -> None:
    """Markdown for people."""
    rows = [cells(name, tally) for name, tally in tallies.items()] + [cells("all", everything)]
    head = [
        "# Fuzzing",
        "",
        f"{everything.num_inputs:,} inputs, {everything.num_failed:,} failures.",
        "",
        *source_lines(provenance(sys.argv) | {"command": f"make fuzz FUZZ_INPUTS={num_inputs}"}),
        "",
        "A rejection is one line that names the thing. What was accepted was used: written and read again, sent "
        f"on, simulated. An input may take {CPU_S:g} s of processor time and {MEMORY_BYTES >> 20} MiB more than "
        "the process had; max ms are of processor time, garbage collection included.",
        "",
    ]
    table = ["| " + " | ".join(row) + " |" for row in (_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *rows)]
    path.write_text("\n".join([*head, *table]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
