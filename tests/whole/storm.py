"""Many simulated runs in a row, each from a seed of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.whole.world import World


@dataclass(slots=True)
class Storm:
    """What a storm has seen; ``failure`` says what went wrong in the run of ``failed_seed``."""

    num_events: int = 0
    num_runs: int = 0
    num_deaths: int = 0
    num_control_deaths: int = 0
    seconds: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)  # of what befell components and streams
    digests: list[int] = field(default_factory=list)  # of the runs, from the first seed on
    failed_seed: int | None = None
    failure: str = ""


CHANGED: Mapping[str, Any] = {"changes_per_s": 0.2}
"""Weather with an operator."""


def storm(
    first_seed: int,
    num_events: int,
    progress: Callable[[Storm], None] = lambda done: None,
    change: Mapping[str, Any] | None = None,
) -> Storm:
    """Runs from ``first_seed`` on, until one is wrong or at least ``num_events`` events were handled.

    ``change`` is what is not drawn of the weather.
    """
    done, start_s = Storm(), time.monotonic()
    while done.num_events < num_events and done.failed_seed is None:
        world = World(first_seed + done.num_runs, change=change)
        try:
            world.run()
        except Exception as error:
            done.failed_seed, done.failure = world.seed, f"{type(error).__name__}: {error}"
        done.num_runs += 1
        done.num_events += world.num_events
        done.num_deaths += world.num_deaths
        done.num_control_deaths += world.num_control_deaths
        done.endings += world.endings
        done.counts += world.counts
        done.digests.append(world.digest)
        done.seconds = time.monotonic() - start_s
        progress(done)
    return done


def replay_command(seed: int) -> str:
    return f"python -m tests.whole --seed {seed}"
