"""Steps that several requests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

from gfdit.core import RequestView
from gfdit.core.policy.estimates import ServiceTimes


class _Timed(Protocol):
    @property
    def request(self) -> RequestView: ...
    @property
    def times(self) -> ServiceTimes: ...


T = TypeVar("T", bound=_Timed)


def join(
    hosts: Iterable[T],
    waiting: Iterable[T],
    may_take: Callable[[T, float], bool],
    even_s: float = math.inf,
) -> list[tuple[T, list[T]]]:
    """Who of ``waiting`` shares the next step of whom (selective batching, TetriServe paper, section 5).

    Both run at their narrowest degree. Only requests alike share a step, if one for all is faster than one after
    the other and if every one of them ``may_take`` a step of so many seconds. The first of both come first. No
    edit joins others whose steps alone take ``even_s`` or more: there are better places.
    """
    alike: dict[Hashable, list[T]] = {}
    for one in waiting:
        alike.setdefault(_kind(one), []).append(one)
    shared = []
    for host in hosts:
        queue = alike.get(_kind(host), [])
        most = _num_within([host, *queue], even_s) if is_edit(host) else len(queue) + 1
        for size in sorted(host.times.batch_s, reverse=True):
            if size > most:
                continue
            batch = [host, *queue[: size - 1]]
            together_s, one_by_one_s = _step_s(batch)
            if together_s < one_by_one_s and all([may_take(one, together_s) for one in batch]):
                shared.append((host, batch[1:]))
                del queue[: size - 1]
                break
    return shared


def to_prepare(prepared: Iterable[T], unprepared: Iterable[T]) -> Sequence[T]:
    """Whom of ``unprepared`` to prepare, the first first, so that they can share steps with some of ``prepared``.

    At most as many as make of each kind the largest batch that is known.
    """
    room: dict[Hashable, int] = {}
    for one in prepared:
        kind = _kind(one)
        room[kind] = room.get(kind, max(one.times.batch_s, default=1)) - 1
    chosen = []
    for one in unprepared:
        if room.get(kind := _kind(one), 0) > 0:
            room[kind] -= 1
            chosen.append(one)
    return chosen


def _num_within(queue: Sequence[_Timed], even_s: float) -> int:
    """How many of the first are as much as ``even_s``, or all of them."""
    total_s = 0.0
    for number, one in enumerate(queue, start=1):
        total_s += next(iter(one.times.step_s.values()))
        if total_s >= even_s:
            return number
    return len(queue)


def is_edit(one: _Timed) -> bool:
    return one.request.shape.computed_percent < 100


def _kind(one: _Timed) -> Hashable:
    """Requests of one class share their times. Edits share steps whatever their masks (FlashPS, section 4.3)."""
    request = one.request
    if not is_edit(one):
        return id(one.times)
    return request.model, request.shape.whole, request.cfg, request.candidates


def _step_s(batch: Sequence[_Timed]) -> tuple[float, float]:
    """Of one step for all, and of one for each after the other.

    Both are in proportion to tokens, so the former is the mean of what it would be if all were alike.
    """
    times, size = batch[0].times, len(batch)
    if all([one.times is times for one in batch]):
        return times.batch_s[size], size * next(iter(times.step_s.values()))
    each_s = [one.times.batch_s.get(size, math.inf) for one in batch]
    return sum(each_s) / size, sum([next(iter(one.times.step_s.values())) for one in batch])
