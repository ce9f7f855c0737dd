"""``python -m tests.whole``: a storm of simulated runs with faults, or one of them again, told in full."""

from __future__ import annotations

import argparse
import sys
import time

import pytest

from tests.whole.mutants import MUTANTS, WEATHER
from tests.whole.storm import CHANGED, Storm, replay_command, storm
from tests.whole.world import World

SOON_S, SEARCH_S = 0.1, 15.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.whole", description=__doc__)
    parser.add_argument("--seed", type=int, help="tell this run in full")
    parser.add_argument("--first-seed", type=int, default=0, help="of a storm (default 0)")
    parser.add_argument("--events", type=int, default=1_000_000, help="of a storm (default 1,000,000)")
    parser.add_argument("--changed", action="store_true", help="with an operator who drains, adds and switches")
    parser.add_argument("--mutants", action="store_true", help="the runs that show each planted bug soonest")
    arguments = parser.parse_args()
    change = CHANGED if arguments.changed else None
    if arguments.mutants:
        for name in MUTANTS:
            print(f'    "{name}": {_soonest(name)},', flush=True)
        return 0
    if arguments.seed is not None:
        World(arguments.seed, print, change).run()
        print("nothing wrong")
        return 0
    done = storm(arguments.first_seed, arguments.events, _show, change)
    print(f"{done.num_events:,} events in {done.seconds:.0f} s, {dict(done.endings)}")
    print(f"of workflows: {dict(done.counts)}")
    if done.failed_seed is None:
        print("nothing wrong")
        return 0
    print(
        f"{done.failure}\nagain, in full: {replay_command(done.failed_seed)}",
        file=sys.stderr,
    )
    return 1


def _soonest(name: str) -> int:
    """A seed whose run shows that bug in little time, of those that are looked at in ``SEARCH_S``."""
    found: dict[int, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        begin_s, seed = time.process_time(), 0
        while not found or (min(found.values()) > SOON_S and time.process_time() < begin_s + SEARCH_S):
            run_s = time.process_time()
            if storm(seed, num_events=1, change=WEATHER.get(name)).failed_seed is not None:
                found[seed] = time.process_time() - run_s
            seed += 1
    return min(found, key=found.__getitem__)


def _show(done: Storm) -> None:
    if done.num_runs % 1000 == 0:
        rate = done.num_events / done.seconds
        text = f"{done.num_events:,} events, {rate:,.0f}/s, {done.num_runs} runs, {done.num_deaths} deaths, "
        text += f"{done.num_control_deaths} of the control process"
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
