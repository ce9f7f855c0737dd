"""A slice of the storm, and proof that it would notice: planted bugs, and a run that repeats."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.whole.mutants import COSTLY, FROM_SEED, MUTANTS, RARE, WEATHER
from tests.whole.storm import CHANGED, Storm, replay_command, storm

NUM_EVENTS = 6_000
CHANGED_EVENTS = 4_000
MUTANT_EVENTS = 60_000  # within which each must be found, from its seed on; most are in the first run
RARE_EVENTS = 1_000_000


@pytest.fixture(scope="module")
def done() -> Storm:
    return storm(first_seed=0, num_events=NUM_EVENTS)


def test_no_fault_breaks_the_books(done: Storm) -> None:
    assert done.failed_seed is None, done.failure
    assert done.num_deaths > 50 and done.num_control_deaths > 10
    assert {"CompleteRequest", "CancelRequest", "FailRequest", "RejectRequest"} <= done.endings.keys()
    seldom = {"unloads", "parts read on their way", "loads that failed", "tasks that end their process"}
    assert done.counts["loads that went well"] > 50 and seldom <= done.counts.keys(), done.counts


def test_no_change_of_an_operator_does() -> None:
    """Ranks are drained and added and policies switched, amid all faults."""
    done = storm(first_seed=0, num_events=CHANGED_EVENTS, change=CHANGED)
    assert done.failed_seed is None, done.failure
    assert done.counts["changes"] > 50 and done.counts["changes refused"] > 2, done.counts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in RARE | COSTLY else ()) for name in MUTANTS]
)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    num_events = RARE_EVENTS if name in RARE else MUTANT_EVENTS
    done = storm(FROM_SEED.get(name, 0), num_events=num_events, change=WEATHER.get(name))
    assert done.failed_seed is not None
    assert not done.failure.startswith("TypeError"), f"it was not planted well: {done.failure}"
    again = storm(done.failed_seed, num_events=1, change=WEATHER.get(name))
    assert again.failure == done.failure, "it replays from its seed"


def test_a_run_is_the_same_in_another_process(done: Storm) -> None:
    """Where the order of a set decides nothing."""
    code = "from tests.whole.world import World; print([World(seed).run().digest for seed in range(3)])"
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    again = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True
    )
    assert again.stdout.splitlines()[-1:] == [str(done.digests[:3])], again.stderr  # vLLM has said something


@pytest.mark.thorough
def test_the_command_that_replays_a_seed_works() -> None:
    python, *arguments = replay_command(7).split()
    assert python == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "RequestArrived" in done.stdout and "nothing wrong" in done.stdout
