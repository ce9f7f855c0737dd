"""Check the models of the protocol with SPIN: `make models`. Exits with 1 if a result is not the expected one.

The models are in docs/protocol. Every one must hold, and every mutant of it must fail.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / "docs" / "protocol"


@dataclass(frozen=True)
class Check:
    model: str
    defines: tuple[str, ...]
    fails: bool = False


QUICK = (
    Check("agreement", ("OPERATIONS=2",)),
    Check("agreement", ("OPERATIONS=3", "FEW")),
    Check("programs", ("OPERATIONS=3",)),
    *(
        Check("agreement", ("OPERATIONS=3", mutant), fails=True)
        for mutant in ("ONE_SLOT", "NO_CREDIT", "NO_RELEASE", "REUSED_TOKEN", "NO_WAIT")
    ),
    *(
        Check("programs", ("OPERATIONS=3", mutant), fails=True)
        for mutant in ("SHORT_LAST_ROUND", "EARLY_LAUNCH", "ONE_SLOT", "NO_TICKET")
    ),
)
LONG = (
    Check("agreement", ("OPERATIONS=3",)),
    Check("agreement", ("OPERATIONS=4", "FEW")),
    Check("programs", ("OPERATIONS=4",)),
)


@dataclass(frozen=True)
class Outcome:
    errors: int
    states: int
    seconds: float


def run(check: Check) -> Outcome:
    """Explore one model. Raises RuntimeError if the exploration did not finish."""
    with tempfile.TemporaryDirectory() as directory:
        options = [f"-D{define}" for define in check.defines]
        _quietly(["spin", *options, "-a", str(MODELS / f"{check.model}.pml")], directory)
        _quietly(["gcc", "-w", "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], directory)
        text = _quietly(["./pan", "-m1000000"], directory)
    if "max search depth too small" in text or "out of memory" in text:
        raise RuntimeError(f"{check.model} {check.defines}: the exploration was cut short")
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+) states, stored", text)
    seconds = re.search(r"elapsed time ([\d.e+-]+) seconds", text)
    if not (errors and states):
        raise RuntimeError(f"{check.model} {check.defines}: SPIN said nothing usable:\n{text}")
    return Outcome(int(errors[1]), int(states[1]), float(seconds[1]) if seconds else 0.0)


def _quietly(command: list[str], directory: str) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode and not command[0].startswith("./"):
        raise RuntimeError(f"{' '.join(command[:2])} failed: {done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="larger models too (minutes, 3 GiB of memory)")
    arguments = parser.parse_args()
    for program in ("spin", "gcc"):
        if shutil.which(program) is None:
            print(f"{program} is not installed (Debian: apt-get install spin gcc)", file=sys.stderr)
            return 2
    wrong = 0
    for check in (*QUICK, *(LONG if arguments.long else ())):
        outcome = run(check)
        as_expected = check.fails == bool(outcome.errors)
        wrong += not as_expected
        verdict = ("an error, as it must" if outcome.errors else "holds") if as_expected else "NOT AS EXPECTED"
        print(f"{check.model:10} {' '.join(check.defines):28} {outcome.states:>12,} states  {verdict}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
