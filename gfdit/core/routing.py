"""Which replica a request goes to: what a replica says of its work, and what would become of a request there.

Used by the agent that gives HAProxy its weights (``gfdit agent``), by the request router of the Ray Serve
application and by the simulator of a fleet. Times are from now, in seconds.

A replica is taken for a fluid: its ranks do the work that is due earlier first, and as much of it in parallel as
there are ranks. Then all is in time if and only if, for every ``d``, what is due within ``d`` is at most
``live_ranks * d`` (Horn, "Some simple scheduling algorithms", 1974). What is overdue gives way to what can be in
time, as with the default policy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

DUE_BOUNDS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Work is told by when it is due: in at most so many seconds from now, the overdue first."""

MOST_PERCENT = 100
LEAST_PERCENT = 1  # of a replica that is ready: at 0 it would be given nothing at all


def due_within_s(deadline_s: float | None, now_s: float) -> float:
    """The first of :data:`DUE_BOUNDS_S` by which it is due; infinity if it is later, or never."""
    left_s = math.inf if deadline_s is None else deadline_s - now_s
    return next((bound for bound in DUE_BOUNDS_S if left_s <= bound), math.inf)


class Service(NamedTuple):
    """What requests of a size and a number of steps take on an idle machine, by number of ranks."""

    size: str
    num_steps: int
    seconds: Mapping[int, float]

    @property
    def rank_s(self) -> float:
        """At the narrowest."""
        narrowest = min(self.seconds)
        return narrowest * self.seconds[narrowest]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that is to be sent somewhere. Without ``deadline_in_s`` it is never late.

    It takes ``rank_s`` rank-seconds at its narrowest and at least ``alone_s`` on an idle machine; 0 if unknown.
    """

    deadline_in_s: float | None = None
    rank_s: float = 0.0
    alone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The answer of ``/v1/gfdit/load``, as far as it matters here.

    ``due`` is work in rank-seconds by the bound within which it is due, in rising order: 0 is overdue, infinity
    later than all bounds or never. Of ``num_unknown`` live requests nobody knows what they take.
    """

    ready: bool
    live_ranks: int
    alive: int = 0
    due: tuple[tuple[float, float], ...] = ()
    num_unknown: int = 0
    services: tuple[Service, ...] = ()

    @classmethod
    def of_json(cls, answer: Mapping[str, Any]) -> ReplicaLoad:
        """Raises ``ValueError`` for what is no answer of ``/v1/gfdit/load``."""
        try:
            due: dict[float, float] = {}
            for one in answer["due"]:
                within_s = math.inf if one["within_s"] is None else float(one["within_s"])
                due[within_s] = due.get(within_s, 0.0) + float(one["backlog_rank_s"])
            services = [
                Service(one["size"], one["num_steps"], {int(k): v for k, v in one["seconds_by_degree"].items()})
                for one in answer["services"]
                if one["seconds_by_degree"]
            ]
            return cls(
                ready=bool(answer["ready"]),
                live_ranks=int(answer["live_ranks"]),
                alive=int(answer["alive"]),
                due=tuple(sorted(due.items())),
                num_unknown=int(answer["unknown_costs"]),
                services=tuple(services),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no load of a replica: {error!r}") from None

    @property
    def backlog_rank_s(self) -> float:
        return sum([rank_s for _, rank_s in self.due])


class Forecast(NamedTuple):
    """Of a request on a replica.

    ``finish_s`` is when it would end, ``late_rank_s`` how much work would be late that would not be without it,
    its own included.
    """

    finish_s: float
    late_rank_s: float


def forecast(load: ReplicaLoad, ask: Ask) -> Forecast:
    """What becomes of ``ask`` on that replica, and of the others there."""
    if not load.ready or load.live_ranks < 1:
        return Forecast(math.inf, math.inf)
    ranks, unknown_rank_s = load.live_ranks, load.num_unknown * ask.rank_s
    until_s = math.inf if ask.deadline_in_s is None else ask.deadline_in_s
    finish_s = max(ask.alone_s, (_due_before(load.due, until_s) + unknown_rank_s + ask.rank_s) / ranks)
    late_rank_s = min(ask.rank_s, max(0.0, ranks * (finish_s - until_s)))
    due_rank_s = unknown_rank_s
    for bound_s, rank_s in load.due:
        due_rank_s += rank_s if bound_s > 0 else 0.0
        if until_s <= bound_s < math.inf:
            spare_rank_s = max(0.0, ranks * bound_s - due_rank_s)
            late_rank_s = max(late_rank_s, ask.rank_s - spare_rank_s)
    return Forecast(finish_s, late_rank_s)


def _due_before(due: Iterable[tuple[float, float]], until_s: float) -> float:
    """Rank-seconds. What a replica says is due within a bound is due evenly since the bound before."""
    total_rank_s = 0.0
    for bound_s, rank_s in due:
        if bound_s <= 0 and until_s < math.inf:
            continue
        if bound_s <= until_s:
            total_rank_s += rank_s
        elif (begin_s := _BEGIN_S.get(bound_s, bound_s)) < until_s:
            total_rank_s += rank_s * (until_s - begin_s) / (bound_s - begin_s)
    return total_rank_s


_BEGIN_S = dict(pairwise(reversed(DUE_BOUNDS_S)))  # of the time that a bound is for; of what was sent, its own


def choose(loads: Sequence[ReplicaLoad], ask: Ask) -> int | None:
    """The replica where nothing becomes late by ``ask``, of those the least crowded, then with the least work.

    Crowded is one by how many more requests it has than ranks. Of equals the first; None if none is ready.
    """

    def place(index: int) -> tuple[bool, float, float]:
        load = loads[index]
        crowd = max(0, load.alive + 1 - load.live_ranks) / load.live_ranks
        return forecast(load, ask).late_rank_s > 0, crowd, load.backlog_rank_s / load.live_ranks

    ready = [index for index, load in enumerate(loads) if load.ready and load.live_ranks > 0]
    return min(ready, key=place, default=None)


def weight_percent(load: ReplicaLoad) -> int:
    """What share of its weight a replica should have: 100 if idle, half of it if a request takes twice as long.

    For a router that knows nothing of its requests: it counts one that takes what the kinds that the replica
    knows take on average. 0 if it is not ready.
    """
    if not load.ready or load.live_ranks < 1:
        return 0
    rank_s = sum([service.rank_s for service in load.services]) / max(1, len(load.services))
    if not rank_s > 0:  # nothing is known yet
        return max(LEAST_PERCENT, round(MOST_PERCENT * load.live_ranks / (load.live_ranks + load.alive)))
    alone_s = rank_s / load.live_ranks
    return max(LEAST_PERCENT, round(MOST_PERCENT * alone_s / forecast(load, Ask(None, rank_s, alone_s)).finish_s))


def ask_for(
    loads: Iterable[ReplicaLoad], size: str | None, num_steps: int | None, deadline_in_s: float | None
) -> Ask:
    """What a request takes, as far as replicas know: the same kind, else the same size, else their mean.

    With several kinds of one size and number of steps (with and without guidance) the longest counts.
    """
    known = [service for load in loads for service in load.services]
    alike = [service for service in known if size is not None and service.size == size]
    if exact := [service for service in alike if service.num_steps == num_steps]:
        longest = max(exact, key=lambda service: service.rank_s)
        return Ask(deadline_in_s, longest.rank_s, min(longest.seconds.values()))
    if alike and num_steps is not None:
        nearest = min(alike, key=lambda service: abs(service.num_steps - num_steps))
        scale = num_steps / nearest.num_steps
        return Ask(deadline_in_s, scale * nearest.rank_s, scale * min(nearest.seconds.values()))
    if not known:
        return Ask(deadline_in_s)
    mean_rank_s = sum([service.rank_s for service in known]) / len(known)
    mean_alone_s = sum([min(service.seconds.values()) for service in known]) / len(known)
    return Ask(deadline_in_s, mean_rank_s, mean_alone_s)


class Replica:
    """What a router knows of a replica: what that has told last, and what has been sent there since.

    ``num_open`` are the requests that it has there itself: it knows at once when they end. Others may send, too.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self._told = ReplicaLoad(ready=False, live_ranks=0)
        self._num_others = 0
        self._sent: deque[tuple[float, Ask]] = deque()  # when, on the clock of the router

    def told(self, load: ReplicaLoad, at_s: float) -> None:
        """It has said ``load``, which is as of ``at_s``."""
        self._told = load
        self._num_others = max(0, load.alive - self.num_open)
        while self._sent and self._sent[0][0] < at_s:
            self._sent.popleft()

    def sent(self, ask: Ask, now_s: float) -> None:
        self._sent.append((now_s, ask))
        self.num_open += 1

    def ended(self) -> None:
        """One of those that were sent there."""
        self.num_open -= 1

    @property
    def load(self) -> ReplicaLoad:
        due = dict(self._told.due)
        for _, ask in self._sent:
            within_s = math.inf if ask.deadline_in_s is None else ask.deadline_in_s
            due[within_s] = due.get(within_s, 0.0) + ask.rank_s
        return replace(self._told, alive=self._num_others + self.num_open, due=tuple(sorted(due.items())))
