"""Claims: whoever comes first settles it, and everybody hears the same."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

from gfdit.runtime.claims import Claims

NUM_RACES = 300
NUM_RANKS = 3


def test_the_first_claim_stands(tmp_path: Path) -> None:
    claims, others = Claims(tmp_path), Claims(tmp_path)
    assert claims.begin(1) and others.begin(1)
    assert not others.withdraw(1)
    assert others.withdraw(2) and claims.withdraw(2)
    assert not claims.begin(2)
    for dispatch_id in (1, 2):
        claims.forget(dispatch_id)
    assert not list(tmp_path.iterdir())


def _race(folder: Path, rank: int, start: Callable[[], object], answers: list[bool]) -> None:
    claims = Claims(folder)
    for race in range(NUM_RACES):
        start()
        # The last one withdraws; what it hears is turned round, so that all must hear the same.
        answers[race] = claims.begin(race) if rank < NUM_RANKS else not claims.withdraw(race)


def test_processes_that_race_hear_the_same(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(NUM_RANKS + 1)
    answers = [context.Array("b", NUM_RACES, lock=False) for _ in range(NUM_RANKS + 1)]
    processes = [
        context.Process(target=_race, args=(tmp_path, rank, barrier.wait, answers[rank]))
        for rank in range(NUM_RANKS + 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    heard = list(zip(*answers, strict=True))
    assert all(len(set(race)) == 1 for race in heard)
    assert {race[0] for race in heard} == {0, 1}, "one side always won: the race was none"


class LookThenLeap(Claims):
    """Looks whether there is a claim, and makes one if there is none: two steps instead of one."""

    def __init__(self, folder: Path, between: threading.Barrier) -> None:
        super().__init__(folder)
        self._between = between

    def _claim(self, dispatch_id: int, wish: str) -> str:
        found = Path(self._path(dispatch_id)).is_symlink()
        self._between.wait(10)
        return super()._claim(dispatch_id, wish) if found else wish


def test_two_steps_would_split_a_group(tmp_path: Path) -> None:
    """Negative control."""
    between = threading.Barrier(2)
    heard: dict[str, bool] = {}
    threads = [
        threading.Thread(target=lambda: heard.update(rank=LookThenLeap(tmp_path, between).begin(7))),
        threading.Thread(target=lambda: heard.update(control=not LookThenLeap(tmp_path, between).withdraw(7))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard["rank"] != heard["control"]
