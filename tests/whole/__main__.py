"""``python -m tests.whole``: a storm of simulated runs with faults, or one of them again, told in full."""

from __future__ import annotations

import argparse
import sys

from tests.whole.storm import Storm, replay_command, storm
from tests.whole.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.whole", description=__doc__)
    parser.add_argument("--seed", type=int, help="tell this run in full")
    parser.add_argument("--first-seed", type=int, default=0, help="of a storm (default 0)")
    parser.add_argument("--events", type=int, default=1_000_000, help="of a storm (default 1,000,000)")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        World(arguments.seed, print).run()
        print("nothing wrong")
        return 0
    done = storm(arguments.first_seed, arguments.events, _show)
    print(f"{done.num_events:,} events in {done.seconds:.0f} s, {dict(done.endings)}")
    if done.failed_seed is None:
        print("nothing wrong")
        return 0
    print(f"{done.failure}\nagain, in full: {replay_command(done.failed_seed)}", file=sys.stderr)
    return 1


def _show(done: Storm) -> None:
    if done.num_runs % 1000 == 0:
        rate = done.num_events / done.seconds
        text = f"{done.num_events:,} events, {rate:,.0f}/s, {done.num_runs} runs, {done.num_deaths} deaths, "
        text += f"{done.num_control_deaths} of the control process"
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
