"""Steps that several requests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from gfdit.core.policy.estimates import ServiceTimes


class _Timed(Protocol):
    @property
    def times(self) -> ServiceTimes: ...


T = TypeVar("T", bound=_Timed)


def join(
    hosts: Iterable[T], waiting: Iterable[T], may_take: Callable[[T, float], bool]
) -> list[tuple[T, list[T]]]:
    """Who of ``waiting`` shares the next step of whom (selective batching, TetriServe paper, section 5).

    Both run at their narrowest degree. Only requests alike share a step, if one for all is faster than one after
    the other and if every one of them ``may_take`` a step of so many seconds. The first of both come first.
    """
    alike: dict[int, list[T]] = {}  # requests of one class share their times
    for one in waiting:
        alike.setdefault(id(one.times), []).append(one)
    shared = []
    for host in hosts:
        queue, step_s = alike.get(id(host.times), []), next(iter(host.times.step_s.values()))
        for size, batch_s in sorted(host.times.batch_s.items(), reverse=True):
            batch = [host, *queue[: size - 1]]
            if len(batch) == size and batch_s < size * step_s and all([may_take(one, batch_s) for one in batch]):
                shared.append((host, batch[1:]))
                del queue[: size - 1]
                break
    return shared


def to_prepare(prepared: Iterable[T], unprepared: Iterable[T]) -> Sequence[T]:
    """Whom of ``unprepared`` to prepare, the first first, so that they can share steps with some of ``prepared``.

    At most as many as make of each class the largest batch that is known.
    """
    room: dict[int, int] = {}  # by class
    for one in prepared:
        room[id(one.times)] = room.get(id(one.times), max(one.times.batch_s, default=1)) - 1
    chosen = []
    for one in unprepared:
        if room.get(id(one.times), 0) > 0:
            room[id(one.times)] -= 1
            chosen.append(one)
    return chosen
