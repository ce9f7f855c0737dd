"""Requests of which nothing is to be decided any more but whose turn it is, however many wait."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from gfdit.policies._prospects import Prospect

Entry: TypeAlias = "tuple[float, int, Prospect]"
"""Its shortness, its place in the order of arrival, and itself."""


class Alike(NamedTuple):
    """What those of a queue have in common: seconds of a step at the narrowest and at the widest degree."""

    step_s: float
    fastest_s: float
    has_deadline: bool


class Aside:
    """Queues of those alike, the shortest first. To add, to remove and to count cost a binary search."""

    def __init__(self) -> None:
        self.queues: dict[Alike, list[Entry]] = {}

    def add(self, prospect: Prospect) -> None:
        insort(self.queues.setdefault(_alike(prospect), []), _entry(prospect))

    def remove(self, prospect: Prospect) -> None:
        queue = self.queues[_alike(prospect)]
        del queue[bisect_left(queue, _entry(prospect)[:2])]
        if not queue:
            del self.queues[_alike(prospect)]

    def num_shorter(self, shortness: float) -> int:
        return sum([bisect_left(queue, (shortness,)) for queue in self.queues.values()])


def shortest_first(
    others: Iterable[Prospect],
    queues: Iterable[Sequence[Entry]],
    is_ready: Callable[[Prospect], bool],
    may_start: Callable[[Prospect], bool] = lambda prospect: True,
) -> Iterator[Prospect]:
    """``others``, which come so, and in between who is ready of ``queues``; both as far as they may start.

    Where one of a queue may not start, nobody of it may: their steps take as long.
    """
    heads = [(_urgency(queue[0][-1]), queue, 0) for queue in queues]
    heapify(heads)
    rest = iter(others)
    other = next(rest, None)
    while heads:
        if other is not None and _urgency(other) < heads[0][0]:
            if may_start(other):
                yield other
            other = next(rest, None)
            continue
        _, queue, index = heappop(heads)
        prospect = queue[index][-1]
        if is_ready(prospect):
            if not may_start(prospect):
                continue
            yield prospect
        if index + 1 < len(queue):
            heappush(heads, (_urgency(queue[index + 1][-1]), queue, index + 1))
    if other is not None:
        yield from filter(may_start, (other, *rest))


def _alike(prospect: Prospect) -> Alike:
    return Alike(prospect.step_s, prospect.fastest_s, prospect.deadline_s < math.inf)


def _entry(prospect: Prospect) -> Entry:
    return prospect.shortness, prospect.number, prospect


def _urgency(prospect: Prospect) -> tuple[float, float, int]:
    return prospect.shortness, prospect.due_s, prospect.number
