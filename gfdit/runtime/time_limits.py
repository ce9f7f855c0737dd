"""How long a rank may be at one task: a worker can be stuck in a kernel or a loop while its heartbeat goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gfdit.core.control.records import DispatchRecord
from gfdit.core.layouts import ParallelSpec
from gfdit.core.tasks import Shape, TaskKind
from gfdit.runtime.config import RuntimeConfig

PATIENCE = 20
"""How many times as long as expected a task may take: policies plan with costs that may be wrong."""

_MAX_WORK = 4096


class _Work(NamedTuple):
    """What a rank may have to compile or allocate for, the first time."""

    kind: TaskKind
    shape: Shape
    cfg: bool
    parallel: ParallelSpec
    num_tasks: int


class _Limit(NamedTuple):
    """Without ``work``: a call, of which nobody knows how long it should take."""

    name: str
    work: _Work | None
    expected_s: float = 0.0
    waits_s: float = 0.0  # for peers, until that fails by itself


@dataclass(slots=True)
class _Rank:
    """``since_s``: when it was last heard to get on with its tasks. ``done``: work that it has done before."""

    since_s: float = 0.0
    tasks: dict[int | str, _Limit] = field(default_factory=dict)  # in order; by dispatch, or name of a call
    done: set[_Work] = field(default_factory=set)
    deliveries: dict[int, _Delivery] = field(default_factory=dict)  # by dispatch


class _Delivery(NamedTuple):
    """A result on its way beside other tasks, ``since_s``."""

    limit: _Limit
    since_s: float


class TimeLimits:
    """A task may take ``task_timeout_s``, or :data:`PATIENCE` times what it should if that is longer.

    The first time that a rank does such work it may take as long as starting the worker. Where several ranks work
    together, a rank that waits for another one fails by itself after ``comm_timeout_s``: that much is granted on
    top, so that only the culprit is found. A result on its way may take as long as its task.
    """

    def __init__(self, config: RuntimeConfig, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._config = config
        self._clock = clock
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._checked_s = clock()

    def emitted(self, dispatch: DispatchRecord, expected_s: float) -> None:
        """``dispatch`` was sent to its ranks, behind what they may have."""
        view, layout = dispatch.views[0], dispatch.layout
        work = _Work(view.kind, view.shape.whole, view.cfg, layout.parallel, len(dispatch.tasks))
        waits = len(layout.ranks) > 1 or dispatch.migrations
        waits_s = self._config.comm_timeout_s if waits else 0.0
        limit = _Limit(dispatch.tasks[0].id, work, expected_s, waits_s)
        for rank_id in layout.ranks:
            self._expect(rank_id, dispatch.id, limit)

    def got_on(self, rank_id: int) -> None:
        """A rank has begun or launched a task."""
        self._ranks[rank_id].since_s = self._clock()

    def delivering(self, rank_id: int, dispatch_id: int) -> None:
        """A rank goes on to its next task while the result of a dispatch is on its way."""
        rank = self._ranks[rank_id]
        if (limit := rank.tasks.pop(dispatch_id, None)) is not None:
            rank.since_s = self._clock()
            rank.deliveries[dispatch_id] = _Delivery(limit, rank.since_s)

    def over(self, rank_id: int, dispatch_id: int, *, done: bool) -> None:
        """A rank is done with a dispatch, or it failed there or was withdrawn."""
        rank = self._ranks[rank_id]
        if (delivery := rank.deliveries.pop(dispatch_id, None)) is not None:
            limit: _Limit | None = delivery.limit
        else:
            rank.since_s = self._clock()
            limit = rank.tasks.pop(dispatch_id, None)
        if limit is not None and limit.work is not None and done:
            if len(rank.done) >= _MAX_WORK:  # a server may be asked for any size
                rank.done.clear()
            rank.done.add(limit.work)

    def called(self, rank_id: int, call_id: int, method: str) -> None:
        """A call was sent to a rank: it may take as long as starting the worker, since it may load something."""
        self._expect(rank_id, f"call {call_id}", _Limit(f"the call of {method}", None))

    def answered(self, rank_id: int, call_id: int) -> None:
        rank = self._ranks[rank_id]
        rank.tasks.pop(f"call {call_id}", None)
        rank.since_s = self._clock()

    def loading(self, rank_id: int, load_id: int, component: str) -> None:
        """A rank was told to load a component: as a call."""
        self._expect(rank_id, f"load {load_id}", _Limit(f"the load of {component}", None))

    def loaded(self, rank_id: int, load_id: int) -> None:
        rank = self._ranks[rank_id]
        rank.tasks.pop(f"load {load_id}", None)
        rank.since_s = self._clock()

    def _expect(self, rank_id: int, name: int | str, limit: _Limit) -> None:
        rank = self._ranks[rank_id]
        if not rank.tasks:
            rank.since_s = self._clock()
        rank.tasks[name] = limit

    def forget(self, rank_id: int) -> None:
        """A rank is lost; a process that replaces it begins anew."""
        self._ranks.pop(rank_id, None)

    def overdue(self) -> dict[int, str]:
        """Ranks that are stuck, and where. To be called again and again.

        Who was stopped himself has heard nobody, and begins to measure anew.
        """
        now_s = self._clock()
        if now_s - self._checked_s > self._config.task_timeout_s / 2:
            for rank in self._ranks.values():
                rank.since_s = now_s
                rank.deliveries = {name: one._replace(since_s=now_s) for name, one in rank.deliveries.items()}
        self._checked_s = now_s
        found = {}
        for rank_id, rank in self._ranks.items():
            if rank.tasks:
                limit = next(iter(rank.tasks.values()))
                if (at_it_s := now_s - rank.since_s) > self._seconds(limit, rank):
                    found[rank_id] = f"stuck in {limit.name} for {at_it_s:.0f} s"
            for limit, since_s in rank.deliveries.values():
                if now_s - since_s > self._seconds(limit, rank):
                    found[rank_id] = f"stuck in the result of {limit.name} for {now_s - since_s:.0f} s"
        return found

    def _seconds(self, limit: _Limit, rank: _Rank) -> float:
        least_s = self._config.task_timeout_s
        if limit.work is None or limit.work not in rank.done:
            least_s = max(least_s, self._config.start_timeout_s)
        return max(least_s, PATIENCE * limit.expected_s) + limit.waits_s
