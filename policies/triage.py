"""The default: shortest first, but deadlines that can be met and long waits before that."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, takewhile
from operator import attrgetter, itemgetter
from typing import Literal, NamedTuple, TypeAlias

from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec, SchedulerView, TaskKind, TaskView
from gfdit.core.components import Load
from gfdit.core.policy.placing import Placer
from gfdit.core.policy.ranks import FreeRanks
from gfdit.policies._aside import shortest_first
from gfdit.policies._batches import is_edit, join, to_prepare
from gfdit.policies._dues import ShadowQueue, Slack, give_up_dear, keep
from gfdit.policies._loads import worthwhile_loads
from gfdit.policies._prospects import Prospect, Prospects
from gfdit.policies._wide import useful_times

FILLING = 0.7
"""Of a rank's even share of the work, how much a batch of edits has before it takes no more of them.

Full batches would leave some ranks with one request and others with many, who wait for each other.
"""

MAX_RESERVED = 0.7
"""Of the ranks, how much is kept free at most for requests yet to come: no burst is known to last."""

TIGHT_SHARE = 0.1
"""How many of the requests must need several ranks from the beginning for late work to make way for all others."""

SPARED = 0.1
"""Where that is so, of the time that anybody in time could wait, how much a late step may take."""

SHORT = 0.35
"""And of what those who need several ranks can wait on average when they come."""

ADMITTED = 0.8
"""Of the ranks, how much behind ``--admission`` goes to deadlines: about what they keep of what they start."""

Ready: TypeAlias = Mapping[str, Sequence[TaskView]]
"""Ready tasks by request; the first is the next to run."""


class Start(NamedTuple):
    """A task to run now."""

    task: TaskView
    prospect: Prospect
    layout: ExecutionLayout


class LateLimit(NamedTuple):
    """How long late steps may take: who is late waits whose narrowest, or fastest, step takes longer than that.

    With ``step_s`` the others of the late run as wide as a step of so many seconds needs.
    """

    narrowest_s: float = math.inf
    fastest_s: float = math.inf
    step_s: float | None = None

    def holds_up(self, prospect: Prospect, now_s: float) -> bool:
        too_long = prospect.step_s > self.narrowest_s or prospect.fastest_s > self.fastest_s
        return too_long and prospect.is_late(now_s)


@dataclass
class Triage:
    """Shortest first, except where a deadline that can be met or a long wait says otherwise.

    Serving the shortest remaining work first, as narrow as possible, gives the best mean latency and loses many
    deadlines. This policy starts from it and departs as little as it must, at every step boundary anew, since a
    step is the unit of preemption:

    1. *Who can be saved.* A request needs the narrowest degree that still meets its deadline. In order of
       deadlines, while the work due by one exceeds what the ranks can do until then, the kept request with the
       most work per weight is given up (Moore and Hodgson's rule), to be considered again next time. Smaller ones
       yet to come would be kept before it: ``reserve`` of the work that they bring at the rate they came lately
       counts as if it was there. While others wait for ranks nobody is kept who needs more than
       ``1 + max_waste`` times its least rank-seconds: it would delay them all.
    2. *At what price.* Keeping a deadline makes those wait who are late and shorter, each for the work that goes
       before it. The largest first, a request is given up where that is in all more than ``price`` times what
       an average request takes on one rank (and its weight).
    3. *Who goes first.* What would miss its deadline unless it starts now. Then the shortest, as long as every
       earlier deadline can spare the rank-seconds of its step; then the kept as they are due. Of the time until a
       deadline only the share ``lending`` is lent in this way: what is done early makes room for others. Who is
       late does not start a step that takes longer than a kept request can spare which needs several ranks: it
       would find them busy one after the other. Where many come that need several ranks, late steps are kept
       shorter, for those who are there and those yet to come: by more ranks than they need, or they wait.
    4. *How wide.* As wide as needed, waiting for ranks if that saves the deadline, else as narrow as possible:
       there a rank-second does most. Ranks that nobody wants go where they save most time each. Of several
       nodes a request, or each branch of its guidance, has the ranks of one: it waits for the node that is the
       first to have enough, or is narrower.
    5. *Who shares a step.* Where no rank is left, kept requests alike that wait join a step that starts, if one
       for all is faster than one after the other and they are in time all the same. They are encoded for that
       before their turn. Edits under masks do so without a deadline, too: their steps are short and gain by it. No
       more of them share a step than their part of all that is there.

    Nobody starves. Let ``L`` be the longest time from arrival to end under first come, first served on single
    ranks, since the system was last empty. Who has waited for ``patience * L`` goes before all others, the oldest
    first and as narrow as possible, so that no latency exceeds ``(patience + 1) * L``, the request's own time on
    one rank and one step of another. Deadlines and patience pull in opposite directions: less patience means lower
    latest latencies, and deadlines missed that the same ranks would have met.

    ``objective`` ``deadlines`` is all of this; a request of priority ``p`` weighs ``2 ** p``. The others ignore
    deadlines: ``latency`` lowers the mean latency, ``weighted`` the mean by those weights, ``throughput`` the
    rank-seconds of every request, which stay their least even where ranks are idle. The other arguments switch
    mechanisms off, to see what they do.
    """

    reserve: float = 0.75
    price: float = 8.0
    patience: float = 2.0
    lending: float = 0.35
    max_waste: float = 0.5
    objective: Literal["deadlines", "latency", "weighted", "throughput"] = "deadlines"
    giving_up: bool = True
    waiting: bool = True
    withholding: bool = True
    widening: bool = True
    batching: bool = True
    name = "triage"
    run_ahead = True
    places_components = True
    queue_order = "deadline"
    _placer: Placer = field(default_factory=Placer, init=False, repr=False)
    _prospects: Prospects = field(init=False, repr=False)
    _queue: ShadowQueue = field(default_factory=ShadowQueue, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.reserve >= 0:
            raise ValueError(f"reserve must be at least 0, got {self.reserve}")
        if not self.patience > 0:
            raise ValueError(f"patience must be above 0, got {self.patience}")
        if not self.price >= 0:
            raise ValueError(f"price must be at least 0, got {self.price}")
        if not 0 <= self.lending <= 1:
            raise ValueError(f"lending must be from 0 to 1, got {self.lending}")
        if not self.max_waste >= 0:
            raise ValueError(f"max_waste must be at least 0, got {self.max_waste}")
        self._prospects = Prospects(
            deadlines=self.objective == "deadlines", weights=self.objective in ("deadlines", "weighted")
        )

    @property
    def deadline_share(self) -> float:
        """For admission: what it must leave to be given up otherwise."""
        return ADMITTED if self.giving_up else 1.0

    def schedule(self, view: SchedulerView) -> Decision:
        return self._go_on(view) or self._choose(view)

    def _go_on(self, view: SchedulerView) -> Decision | None:
        """What :meth:`_choose` does in most cases, without looking at those that run: nobody waits but one.

        It has all ranks that are free, however few it needs. None where there is more to decide.
        """
        if len(view.ready) != 1 or view.components or not self.widening or self.objective == "throughput":
            return None
        task, num_free = view.ready[0], len(view.free_ranks)
        prospect = self._prospects.of_one(view.requests[task.request_id], view)
        if prospect is None or not num_free or not self._queue.has_followed(view.requests):
            return None
        prospect.settle(view.now_s, math.inf)
        free = FreeRanks.of(view.ranks)
        if prospect.kept and not free.fits(prospect.spec, task.model):
            return None  # it may be worth waiting for more
        if not prospect.kept and prospect.deadline_s < math.inf and len(view.requests) > 1:
            return None  # it may be in the way
        specs = prospect.specs if task.kind is TaskKind.DENOISE else useful_times(task, view)[0]
        spec = next((spec for spec in reversed(specs) if free.fits(spec, task.model)), None)
        if spec is None or (layout := free.take(spec, task.model, prospect.request.last_layout)) is None:
            return None
        return Decision((Dispatch((task.id,), layout),))

    def _choose(self, view: SchedulerView) -> Decision:
        prospects = self._prospects.of(view)
        self._queue.follow(prospects, self._prospects.changed, len(view.ranks))
        tasks: Ready = view.ready_by_request
        if view.components:
            names = dict.fromkeys([task.request_id for task in view.ready])
            tasks = {name: _with_place_first(tasks[name], view) for name in names}
        free = FreeRanks.of(view.ranks)
        is_contended = len(tasks) > len(free)
        live = self._prospects.live
        keep(
            live.values(),
            capacity=len(view.ranks) if self.giving_up else math.inf,
            max_waste=self.max_waste if is_contended else math.inf,
            now_s=view.now_s,
            reserved=self._reserved(view),
        )
        if self.objective != "throughput":  # there, whoever is alike shares steps
            self._prospects.put_aside()
        if is_contended and self.giving_up:
            price_rank_s = self.price * self._queue.mean_rank_s
            give_up_dear(live.values(), self._prospects.aside, price_rank_s, len(view.ranks))
        overdue = self._overdue(prospects.values(), view.now_s)
        limit = self._late_limit(view.now_s) if self.withholding else LateLimit()
        num_seen = num_waiting = 0
        starts: list[Start] = []
        guests: dict[str, list[str]] = {}
        in_turn = self._in_turn(tasks, overdue, limit, len(free), view)
        for prospect in in_turn:
            num_seen += 1
            task = tasks[prospect.request.id][0]
            spec = prospect.spec if task.kind is TaskKind.DENOISE else view.cost.candidates(task)[0]
            if (
                limit.step_s is not None
                and task.kind is TaskKind.DENOISE
                and prospect not in overdue
                and prospect.is_late(view.now_s)
            ):
                spec = prospect.within(limit.step_s)
                if not free.fits(spec, task.model):
                    num_waiting += 1
                    continue
            if not free.fits(spec, task.model):
                if self.waiting and (prospect in overdue or prospect.kept):
                    node, ready_s = _first_to_have(spec, task, free, view)
                    if prospect in overdue or ready_s <= prospect.latest_start_s:
                        free.hold(task.model, node)  # they are for this one
                        num_waiting += 1
                        if not free:
                            break
                        continue
                fitting = [spec for spec in prospect.specs if free.fits(spec, task.model)]
                if not fitting:
                    continue
                spec = fitting[-1]
            if layout := free.take(spec, task.model, prospect.request.last_layout):
                starts.append(Start(task, prospect, layout))
                if not free:
                    guests = self._guests(starts, in_turn, prospects, tasks, view) if self.batching else {}
                    break
        else:
            if free and len(starts) + num_waiting == num_seen:
                starts += _further(tasks, prospects, free, view)
            if self.widening and self.objective != "throughput" and free and len(starts) + num_waiting >= num_seen:
                starts = _widened(starts, free, view)
        dispatches = [Dispatch((task.id, *guests.get(task.id, ())), layout) for task, _, layout in starts]
        if not view.components:
            return Decision(tuple(dispatches))
        ready = [prospects[name] for name in tasks if name in prospects]
        ready = [one for one in ready if one in overdue or not limit.holds_up(one, view.now_s)]
        return Decision(tuple(dispatches), loads=self._loads(ready, dispatches, prospects, view))

    def _reserved(self, view: SchedulerView) -> Callable[[float], float]:
        """By size of a request, how many ranks those will take who are expected and smaller."""
        bounds, below = self._queue.arrivals.smaller(view.now_s)
        most = MAX_RESERVED * len(view.ranks)
        reserved = [min(most, self.reserve * ranks) for ranks in below]
        return lambda size: reserved[bisect_left(bounds, size)]

    def _loads(
        self,
        ready: Sequence[Prospect],
        dispatches: Sequence[Dispatch],
        prospects: Mapping[str, Prospect],
        view: SchedulerView,
    ) -> tuple[Load, ...]:
        """6. *What is loaded*: on ranks that are left, what those who wait would otherwise wait longer for."""
        self._placer.note(view)
        free = FreeRanks.of(view.ranks)
        for dispatch in dispatches:
            free.claim(dispatch.layout)
        begun = {name for dispatch in dispatches for name in dispatch.tasks}
        order = {prospect.request.id: (prospect.due_s, prospect.shortness) for prospect in ready}
        waiting = [task for task in view.ready if task.id not in begun and task.request_id in order]
        waiting.sort(key=lambda task: order[task.request_id])
        return tuple(worthwhile_loads(waiting, free, prospects.values(), view, self._placer))

    def _in_turn(
        self,
        tasks: Ready,
        overdue: Collection[Prospect],
        limit: LateLimit,
        num_free: int,
        view: SchedulerView,
    ) -> Iterator[Prospect]:
        """Those that are ready, without who is late and must wait."""
        now_s, live = view.now_s, self._prospects.live
        ready = [one for name, one in live.items() if name in tasks]
        if limit != LateLimit():
            ready = [one for one in ready if one in overdue or not limit.holds_up(one, now_s)]
        aside = self._prospects.aside.queues.values()
        queues = [queue for queue in aside if not limit.holds_up(queue[0][-1], now_s)]

        def is_ready(prospect: Prospect) -> bool:
            return prospect not in overdue and prospect.request.id in tasks and prospect not in lent

        lent: set[Prospect] = set()
        if len(ready) + sum(map(len, queues)) <= num_free:
            all_ready = [*ready, *(one for one in overdue if one.is_aside and one.request.id in tasks)]
            all_ready += [one for queue in queues for *_, one in queue if is_ready(one)]
            if sum([prospect.spec.size for prospect in all_ready]) <= num_free:
                yield from sorted(all_ready, key=attrgetter("number"))  # there is room for all
                return
        overdue_ready = [one for one in overdue if one.request.id in tasks]
        steps_s = [one.step_s for one in (*ready, *overdue_ready, *(queue[0][-1] for queue in queues))]
        blocked_s = max(steps_s, default=0.0)  # how long a rank may be, before it can be had
        urgent, others = [], []
        for prospect in ready:
            if prospect in overdue:
                continue
            if now_s <= prospect.due_s and prospect.latest_start_s < now_s + (
                2 * blocked_s if prospect.needed else blocked_s  # several ranks come free one after the other
            ):
                urgent.append(prospect)
            else:
                others.append(prospect)
        urgent.sort(key=attrgetter("due_s", "shortness", "number"))
        for prospect in (*overdue_ready, *urgent):
            num_free -= prospect.spec.size
            yield prospect
        slack = Slack(live.values(), len(view.ranks), self.lending, now_s)

        def may_be_lent(prospect: Prospect) -> bool:
            return len(lent) < num_free and slack.spend(prospect.step_s, prospect.due_s)

        others.sort(key=attrgetter("shortness", "due_s", "number"))
        partners = self._partners(others, tasks, now_s) if self.batching else ()
        first = (one for one in partners if may_be_lent(one))
        behind = [one for one in others if one not in partners] if partners else others
        for prospect in chain(first, shortest_first(behind, queues, is_ready, may_be_lent)):
            lent.add(prospect)
            yield prospect
        waiting = [one for one in others if one not in lent]
        waiting.sort(key=attrgetter("due_s", "shortness"))
        num_due = bisect_left(waiting, math.inf, key=attrgetter("due_s"))
        yield from waiting[:num_due]
        yield from shortest_first(waiting[num_due:], queues, is_ready)

    def _late_limit(self, now_s: float) -> LateLimit:
        live = self._prospects.live.values()
        if self._queue.tight_share < TIGHT_SHARE:
            spares_s = [one.spare_s(now_s) for one in live if one.kept and one.needed]
            return LateLimit(min(spares_s, default=math.inf))
        spares_s = [one.spare_s(now_s) for one in live if one.deadline_s < math.inf]
        limit_s = SPARED * min([spare_s for spare_s in spares_s if spare_s >= 0], default=math.inf)
        return LateLimit(math.inf, limit_s, min(limit_s, SHORT * self._queue.tight_spare_s))

    def _overdue(self, prospects: Iterable[Prospect], now_s: float) -> Mapping[Prospect, None]:
        """Who has waited for too long, the oldest first; nobody of them needs a wide degree any more."""
        since_s = now_s - self.patience * self._queue.longest_s
        overdue = dict.fromkeys(takewhile(lambda prospect: prospect.arrival_s < since_s, prospects))
        for prospect in overdue:
            prospect.give_up()
        return overdue

    def _may_share(self, prospect: Prospect, now_s: float) -> bool:
        """Whether it may share its steps: from ``now_s`` on, a step by itself would still be in time."""
        if prospect.needed or not prospect.times.batch_s:
            return False
        if self.objective == "throughput" or (prospect.kept and now_s <= prospect.latest_start_s):
            return True
        return not prospect.kept and is_edit(prospect)

    def _partners(self, others: Iterable[Prospect], tasks: Ready, now_s: float) -> Collection[Prospect]:
        """Who has not begun can share no step: those who could, started first."""
        able = [one for one in others if one.times.batch_s and self._may_share(one, now_s)]
        begun = [prospect for prospect in able if _is_step(prospect, tasks)]
        return to_prepare(begun, [p for p in able if p.request.steps_done == 0 and not _is_step(p, tasks)])

    def _guests(
        self,
        starts: Iterable[Start],
        waiting: Iterable[Prospect],
        prospects: Mapping[str, Prospect],
        tasks: Ready,
        view: SchedulerView,
    ) -> dict[str, list[str]]:
        """The tasks of those ``waiting`` that share a step which starts now, by its task."""
        now_s = view.now_s
        hosts = [start.prospect for start in starts if self._may_share(start.prospect, now_s)]
        if not hosts:
            return {}
        is_filling = self.objective != "throughput" and any([is_edit(host) for host in hosts])
        shared = join(
            [prospect for prospect in hosts if _is_step(prospect, tasks)],
            [prospect for prospect in waiting if _is_step(prospect, tasks)],
            lambda prospect, batch_s: self._may_share(prospect, now_s + batch_s - prospect.step_s),
            FILLING * _even_s(prospects.values(), view) if is_filling else math.inf,
        )
        first = {
            prospect: tasks[prospect.request.id][0].id for host, guests in shared for prospect in (host, *guests)
        }
        return {first[host]: [first[one] for one in guests] for host, guests in shared}


def _even_s(prospects: Iterable[Prospect], view: SchedulerView) -> float:
    """What each rank would have to do for one step of everybody."""
    return sum([prospect.step_s * prospect.specs[0].size for prospect in prospects]) / len(view.ranks)


def _with_place_first(tasks: Sequence[TaskView], view: SchedulerView) -> Sequence[TaskView]:
    """``tasks``, of one request; those that some rank could run come before the others."""
    return tasks if len(tasks) == 1 else sorted(tasks, key=lambda task: not _has_place(task, view))


def _has_place(task: TaskView, view: SchedulerView) -> bool:
    """Whether any rank that is there has, or may have, the component of ``task``."""
    component = view.components.get(task.model)
    if component is None or component.ranks is None:
        return True
    return any([component.may_be_on(rank.id) or task.model in rank.resident for rank in view.ranks])


def _task_id(prospect: Prospect, tasks: Ready) -> str:
    return tasks[prospect.request.id][0].id


def _is_step(prospect: Prospect, tasks: Ready) -> bool:
    return tasks[prospect.request.id][0].kind is TaskKind.DENOISE


def _further(
    tasks: Ready, prospects: Mapping[str, Prospect], free: FreeRanks, view: SchedulerView
) -> Iterator[Start]:
    """What else is ready of the requests in ``tasks``, on ranks that nobody waits for."""
    for task in view.ready:
        name, spec = task.request_id, view.cost.candidates(task)[0]
        if tasks[name][0].id == task.id or name not in prospects or not free.fits(spec, task.model):
            continue
        if layout := free.take(spec, task.model, prospects[name].request.last_layout):
            yield Start(task, prospects[name], layout)


def _first_to_have(
    spec: ParallelSpec, task: TaskView, free: FreeRanks, view: SchedulerView
) -> tuple[int | None, float]:
    """The node that is the first to have enough free ranks for ``spec``, and when.

    None if no node has so many ranks; if enough are free now, but not together, there is nothing to wait for.
    Ranks whose tasks start now count for nothing.
    """
    anywhere = spec.size > free.node_size
    if anywhere and spec.size <= free.count(task.model):
        return None, math.inf
    ends_s: defaultdict[int | None, list[float]] = defaultdict(list)
    free_ids = free.ids
    for rank in view.ranks:
        end_s = view.now_s if rank.id in free_ids else rank.busy_until_s
        if end_s is not None and task.model in rank.resident:
            ends_s[None if anywhere else rank.node].append(end_s)
    enough = [(sorted(ends)[spec.size - 1], node) for node, ends in ends_s.items() if len(ends) >= spec.size]
    ready_s, node = min(enough, key=itemgetter(0), default=(math.inf, None))
    return node, ready_s


def _widened(starts: Iterable[Start], free: FreeRanks, view: SchedulerView) -> list[Start]:
    """Give idle ranks to the requests that they shorten most, per rank, as long as any gains."""
    starts = list(starts)
    gains: list[tuple[float, int, ParallelSpec]] = []

    def offer(index: int) -> None:
        if gain := _widening(starts[index], free, view):
            heappush(gains, (-gain[0], index, gain[1]))

    for index in range(len(starts)):
        offer(index)
    while gains:
        _, index, spec = heappop(gains)
        task, prospect, layout = starts[index]
        if spec.size - len(layout.ranks) <= free.count_beside(layout, task.model, spec.size):
            wider = free.widen(layout, spec, task.model, prospect.request.last_layout)
            starts[index] = Start(task, prospect, wider)
        offer(index)
    return starts


def _widening(start: Start, free: FreeRanks, view: SchedulerView) -> tuple[float, ParallelSpec] | None:
    """The seconds that each further rank saves, and the degree at which that is most."""
    task, prospect, layout = start
    specs, seconds, size = prospect.specs, prospect.left_s, len(layout.ranks)
    if task.kind is not TaskKind.DENOISE:
        specs, seconds = useful_times(task, view)
    at = specs.index(layout.parallel)
    gains = [
        ((seconds[at] - left_s) / (wider.size - size), wider)
        for wider, left_s in zip(specs[at + 1 :], seconds[at + 1 :], strict=True)
        if wider.size - size <= free.count_beside(layout, task.model, wider.size)
    ]
    return max(gains, key=itemgetter(0), default=None)
