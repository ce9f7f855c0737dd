"""What has changed since a policy last looked: with thousands waiting, it cannot look at everybody every time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gfdit.core.policy.interface import RequestView, SchedulerView, TaskView

MAX_LOGGED = 4096
"""Who looks again after half as many changes or more may have missed some."""

_NAME = itemgetter(2)


class ChangeLog:
    """Names of requests, each time that its view or what is ready of it has changed, come or gone."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._num_dropped = 0

    @property
    def end(self) -> int:
        return self._num_dropped + len(self._names)

    def note(self, name: str) -> None:
        self._names.append(name)
        if len(self._names) >= MAX_LOGGED:
            del self._names[: MAX_LOGGED // 2]
            self._num_dropped += MAX_LOGGED // 2

    def since(self, position: int) -> list[str] | None:
        """None if some are not known any more."""
        return None if position < self._num_dropped else self._names[position - self._num_dropped :]


class Offers(NamedTuple):
    """What the control plane knows beside ``ready`` and ``requests`` of a view: the former by request, in order.

    ``ahead`` are those that are shown as they should be later, not as the log knows them.
    """

    ready: tuple[TaskView, ...]
    requests: Mapping[str, RequestView]
    by_request: Mapping[str, tuple[TaskView, ...]]
    log: ChangeLog
    ahead: Collection[str] = ()


class Changes:
    """Of one reader: what has changed since it last asked."""

    def __init__(self) -> None:
        self._log: ChangeLog | None = None
        self._position = 0
        self._ahead: Collection[str] = ()

    def of(self, view: SchedulerView) -> Collection[str] | None:
        """Names of requests that changed, came or went, those that came in order; None if any may have.

        So it is the first time, after :meth:`forget`, and for views that a policy has made itself.
        """
        offers, log = view.known_offers, self._log
        if offers is None:
            self._log = None
            return None
        since, before = offers.log.since(self._position), self._ahead
        self._log, self._position, self._ahead = offers.log, offers.log.end, offers.ahead
        if since is None or offers.log is not log:
            return None
        return dict.fromkeys((*since, *before, *offers.ahead) if before or offers.ahead else since)

    def forget(self) -> None:
        """Whatever was said about changes may not have been taken in."""
        self._log = None


class Queue:
    """Requests in the order of a key; among equal ones, those that came earlier.

    Putting one where it belongs, or taking it out, costs a binary search.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, str]] = []
        self._of: dict[str, tuple[Any, int, str]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return map(_NAME, self._entries)

    def put(self, name: str, key: Any = ()) -> None:
        """Add ``name``, or move it to where ``key`` says now."""
        old = self._of.get(name)
        if old is not None and old[0] == key:
            return
        self.drop(name)
        entry = self._of[name] = (key, next(self._numbers) if old is None else old[1], name)
        insort(self._entries, entry)

    def drop(self, name: str) -> bool:
        """Take ``name`` out; says whether it was there."""
        if (entry := self._of.pop(name, None)) is None:
            return False
        del self._entries[bisect_left(self._entries, entry)]
        return True


class ReadyQueue:
    """Ready tasks in the order of a key of their requests; among equal ones, of arrival."""

    def __init__(self, key: Callable[[RequestView], Any]) -> None:
        self._key = key
        self._changes = Changes()
        self._queue = Queue()

    def of(self, view: SchedulerView) -> Iterator[TaskView]:
        changed = self._changes.of(view)
        if changed is None:
            self._queue, changed = Queue(), view.requests
        for name in changed:
            if (request := view.requests.get(name)) is None:
                self._queue.drop(name)
            else:
                self._queue.put(name, self._key(request))
        ready = view.ready_by_request
        return (task for name in self._queue for task in ready.get(name, ()))
