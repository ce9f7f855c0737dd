"""How many ranks are free at what time, and where in it the tasks of a request fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

FOREVER_NS = 1 << 62


class Leg(NamedTuple):
    """Equal tasks in a row. Where ``f`` ranks are free, ``choices[f]`` are the ``(num_ranks, ns)`` to try in turn.

    Equal choices are the same object. One task takes at least ``fastest_ns``, all of later legs ``after_ns``.
    """

    num_tasks: int
    choices: tuple[tuple[tuple[int, int], ...], ...]
    fastest_ns: int
    after_ns: int


class Run(NamedTuple):
    """``num_tasks`` tasks, one right after another, on ``num_ranks`` ranks."""

    start_ns: int
    end_ns: int
    num_ranks: int
    num_tasks: int


class Profile:
    """The number of free ranks as a step function of time, in whole nanoseconds.

    Which ranks they are does not matter: of runs whose ranks never sum up to more than there are, each can be
    given ranks of its own when it starts, because those of the runs then under way leave enough.
    """

    def __init__(self, num_ranks: int) -> None:
        self._times_ns = [0, FOREVER_NS]
        self._free = [num_ranks, 0]  # from that time to the next

    def take(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._add(run.start_ns, run.end_ns, -run.num_ranks)

    def give_back(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._add(run.start_ns, run.end_ns, run.num_ranks)

    def _add(self, start_ns: int, end_ns: int, num_ranks: int) -> None:
        times_ns, free = self._times_ns, self._free
        first = self._cut(start_ns)
        last = self._cut(end_ns)
        for index in range(first, last):
            free[index] += num_ranks
        # Cuts that separate equal numbers are of no use any more.
        if free[last] == free[last - 1]:
            del times_ns[last], free[last]
        if first and free[first] == free[first - 1]:
            del times_ns[first], free[first]

    def _cut(self, time_ns: int) -> int:
        """The index of the interval that begins at ``time_ns``, made if there is none."""
        index = bisect_right(self._times_ns, time_ns) - 1
        if self._times_ns[index] == time_ns:
            return index
        self._times_ns.insert(index + 1, time_ns)
        self._free.insert(index + 1, self._free[index])
        return index + 1

    def fit(self, start_ns: int, end_ns: int, legs: Sequence[Leg]) -> list[Run] | None:
        """The tasks of ``legs`` in free ranks from ``start_ns`` on, None if they do not end by ``end_ns``.

        Greedy: every task starts as early as any of its choices fits, and takes the first that does.
        """
        times_ns, free = self._times_ns, self._free
        index = bisect_right(times_ns, start_ns) - 1
        now_ns = start_ns
        runs: list[Run] = []
        for left, choices, fastest_ns, after_ns in legs:
            latest_ns = end_ns - after_ns
            while left:
                if now_ns + left * fastest_ns > latest_ns:
                    return None
                tried = choices[free[index]]
                for num_ranks, task_ns in tried:
                    task_end_ns = now_ns + task_ns
                    stop = index + 1
                    while times_ns[stop] < task_end_ns and free[stop] >= num_ranks:
                        stop += 1
                    if times_ns[stop] >= task_end_ns:
                        break
                else:
                    index += 1
                    now_ns = times_ns[index]
                    continue
                # More tasks follow in the same mode until other choices come up.
                all_end_ns = now_ns + left * task_ns
                while times_ns[stop] < all_end_ns and choices[free[stop]] is tried:
                    stop += 1
                ended = times_ns[stop] >= all_end_ns
                num_tasks = left if ended else max(1, (times_ns[stop] - now_ns) // task_ns)
                run_end_ns = now_ns + num_tasks * task_ns
                runs.append(Run(now_ns, run_end_ns, num_ranks, num_tasks))
                now_ns = run_end_ns
                left -= num_tasks
                while times_ns[index + 1] <= now_ns:
                    index += 1
        return runs
