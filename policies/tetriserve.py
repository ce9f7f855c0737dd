"""Deadline-aware rounds: the least parallelism that meets each deadline, packed into the ranks."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import TypeAlias

from gfdit.core import Decision, Dispatch, ExecutionLayout, SchedulerView, TaskKind, TaskView
from gfdit.core.policy.changes import Changes, Queue
from gfdit.core.policy.ranks import FreeRanks, RankCounts
from gfdit.policies._allocation import ROUNDING_S
from gfdit.policies._prospects import Prospect, Prospects
from gfdit.policies._round import Job, Plan, fill, rescue, scale_up, share_steps
from gfdit.policies._wide import fastest

Ready: TypeAlias = Mapping[str, Sequence[TaskView]]
"""Ready tasks by request."""


@dataclass
class TetriServe:
    """Rounds in which every request gets the least parallelism that meets its deadline.

    TetriServe paper, section 4. A round is as long as ``steps_per_round`` steps of the slowest request so far at
    its fastest. At its start

    - every request has a minimal allocation: its steps at one degree, or at two (``mixed_degrees``), the narrower
      first (section 2.3);
    - a knapsack runs those that would become late meanwhile, so that the most survive (``packing``);
    - the others follow, the more urgent priority and the earlier deadline first, then on the narrowest degree
      those that are late or have no deadline;
    - ranks that are left widen what gains most and lasts for the round (``elastic_scale_up``);
    - requests left without a rank share the steps of one alike if that is faster (``batching``);
    - requests stay on their ranks where they can (``placement_preservation``).

    Three arguments depart from the paper: ``widest_first`` runs the wider steps of an allocation first;
    ``starts_in_round`` starts what comes in the middle of a round on ranks that it leaves idle; without
    ``fixed_rounds`` a round is as long as the slowest of its own requests says. With all three it meets more
    deadlines than as published; reports show both.

    What the paper leaves open, or is done otherwise. The round: a fixed duration of several steps (section 4.2.2),
    of which shape it does not say. 5 steps were the most robust there (section 6.4), where deciding costs time;
    here it costs none, and fewer steps meet more deadlines. With nothing planned the next round begins at once.
    "Sufficient remaining steps" to be widened: as many as the round has room for. A step that a round's end
    interrupts still finishes. Encoding and decoding do not wait for rounds. The order of those that are not packed
    and priorities are not in the paper. Late requests are served last; the paper's evaluation drops them (section
    6.2), as with ``--admission deadline``.
    """

    steps_per_round: int = 2
    mixed_degrees: bool = True
    packing: bool = True
    placement_preservation: bool = True
    elastic_scale_up: bool = True
    batching: bool = True
    widest_first: bool = False
    starts_in_round: bool = False
    fixed_rounds: bool = True
    name = "tetriserve"
    queue_order = "deadline"
    _layouts: dict[str, ExecutionLayout] = field(default_factory=dict, init=False, repr=False)  # of this round
    _short: Queue = field(default_factory=Queue, init=False, repr=False)  # who has other tasks ready than steps
    _waiting: dict[str, None] = field(default_factory=dict, init=False, repr=False)  # who has a step ready
    _late: Queue = field(default_factory=Queue, init=False, repr=False)  # and was late when a round began
    _was_late: set[str] = field(default_factory=set, init=False, repr=False)  # others that were, when this one did
    _changes: Changes = field(default_factory=Changes, init=False, repr=False)
    _round_end_s: float = field(default=-math.inf, init=False, repr=False)
    _slowest_s: float = field(default=0.0, init=False, repr=False)  # step of any request so far, at its fastest
    _wake_at_s: float = field(default=-math.inf, init=False, repr=False)
    _rank_ids: list[int] = field(default_factory=list, init=False, repr=False)
    _prospects: Prospects = field(default_factory=Prospects, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.steps_per_round < 1:
            raise ValueError(f"steps_per_round must be at least 1, got {self.steps_per_round}")

    def schedule(self, view: SchedulerView) -> Decision:
        self._forget(view)
        ready = view.ready_by_request
        self._take_in(view, ready)
        free = FreeRanks.of(view.ranks)
        dispatches = self._short_tasks(view, ready, free)
        for name, layout in list(self._layouts.items()):
            if (step := _step(name, ready)) and layout.parallel not in step.candidates:
                del self._layouts[name]  # it turned out not to fit into the memory of so few ranks
        if view.now_s >= self._round_end_s - ROUNDING_S or not self._layouts:
            self._start_round(view, free)
        elif self.starts_in_round:
            self._fill_round(view, free)
        dispatches += self._steps(view, ready, free)
        waits = sum([len(dispatch.tasks) for dispatch in dispatches]) < len(view.ready)
        if not waits or self._wake_at_s == self._round_end_s or self._round_end_s <= view.now_s:
            return Decision(tuple(dispatches))
        self._wake_at_s = self._round_end_s
        return Decision(tuple(dispatches), self._wake_at_s)

    def _forget(self, view: SchedulerView) -> None:
        """Drop what vanished requests and lost ranks had to do with."""
        for name in [name for name in self._layouts if name not in view.requests]:
            del self._layouts[name]
        rank_ids = [rank.id for rank in view.ranks]
        if rank_ids != self._rank_ids:
            self._rank_ids, present = rank_ids, set(rank_ids)
            self._slowest_s = 0.0  # the fastest may be another now
            for name in [name for name, layout in self._layouts.items() if not present.issuperset(layout.ranks)]:
                del self._layouts[name]

    def _take_in(self, view: SchedulerView, ready: Ready) -> None:
        """Note anew what those wait for who have changed."""
        changed = self._changes.of(view)
        if changed is None:
            self._was_late.update(self._late)
            self._short, self._late, self._waiting = Queue(), Queue(), {}
            changed = view.requests
        for name in changed:
            self._short.drop(name)
            if self._late.drop(name):
                self._was_late.add(name)
            self._waiting.pop(name, None)
            kinds = {task.kind for task in ready.get(name, ())}
            if TaskKind.DENOISE in kinds:
                self._waiting[name] = None
            if not kinds <= {TaskKind.DENOISE}:
                self._short.put(name, view.requests[name].arrival_s)

    def _short_tasks(self, view: SchedulerView, ready: Ready, free: FreeRanks) -> list[Dispatch]:
        """Encode, prepare and decode: at once, on ranks that this round leaves idle if there are any.

        Where several can be used, they share those that are idle.
        """
        tasks = [task for name in self._short for task in ready[name] if task.kind is not TaskKind.DENOISE]
        for task in tasks:
            if not view.requests[task.request_id].tasks_left.get(TaskKind.DENOISE):
                self._layouts.pop(task.request_id, None)
        idle = self._idle(free) if tasks else free
        dispatches = []
        for index, task in enumerate(tasks):
            if not free:
                break
            spec = fastest(task, idle.count(task.model) // (len(tasks) - index), view)
            last = view.requests[task.request_id].last_layout
            if layout := idle.take(spec, task.model, last):
                free.claim(layout)
            else:
                layout = free.take(spec, task.model, last)
            if layout:
                dispatches.append(Dispatch((task.id,), layout))
        return dispatches

    def _idle(self, free: FreeRanks) -> FreeRanks:
        """Those of ``free`` that the round has no use for."""
        planned = {rank for layout in self._layouts.values() for rank in layout.ranks}
        return FreeRanks([rank for rank in free if rank.id not in planned])

    def _start_round(self, view: SchedulerView, free: FreeRanks) -> None:
        prospects = self._prospects_of(view)
        running = self._jobs(self._running_until_s(view), prospects)
        waiting = self._jobs(dict.fromkeys(self._waiting, view.now_s), prospects)
        jobs = [*running, *waiting]
        if not jobs and not self._late:
            return
        steps_s = [job.fastest_s for job in jobs]
        if not self.fixed_rounds:
            steps_s += [prospects[name].fastest_s for name in self._late]
        slowest_s = max(steps_s, default=0.0)
        self._slowest_s = max(slowest_s, self._slowest_s) if self.fixed_rounds else slowest_s
        self._round_end_s = view.now_s + self.steps_per_round * self._slowest_s
        self._put_aside(running, waiting)
        live = [*running, *(job for job in waiting if job.request.id in self._waiting)]
        names = {job.request.id for job in running}
        ranks = [rank for rank in view.ranks if rank.id in free.ids or rank.running_request in names]
        ranks.sort(key=lambda rank: rank.running_request is not None)
        left = RankCounts(ranks)
        plan = rescue(live, left, self._round_end_s, mixed=self.mixed_degrees) if self.packing else {}
        rest = [job for job in live if job.request.id not in plan]
        in_turn = self._in_turn(rest, prospects, view)
        fill(plan, in_turn, left, mixed=self.mixed_degrees, widest_first=self.widest_first)
        if self.elastic_scale_up:
            scale_up(plan, left, self._round_end_s)
        unplanned = (job for job in self._in_turn(rest, prospects, view) if job.request.id not in plan)
        guests = share_steps(plan, unplanned) if self.batching else {}
        before, self._layouts = self._layouts, {}
        self._place(plan, FreeRanks(ranks), before)
        self._layouts |= {guest: self._layouts[host] for guest, host in guests.items() if host in self._layouts}

    def _fill_round(self, view: SchedulerView, free: FreeRanks) -> None:
        """Give ranks that came free in the middle of the round to requests that have none."""
        idle = self._idle(free)
        if not len(idle):
            return
        prospects = self._prospects_of(view)
        names = [name for name in self._waiting if name not in self._layouts]
        rest = self._jobs(dict.fromkeys(names, view.now_s), prospects)
        in_turn = (job for job in self._in_turn(rest, prospects, view) if job.request.id not in self._layouts)
        left = RankCounts(idle)
        plan: Plan = {}
        fill(plan, in_turn, left, mixed=self.mixed_degrees, widest_first=self.widest_first)
        if self.elastic_scale_up:
            scale_up(plan, left, self._round_end_s)
        self._place(plan, idle, {})

    def _prospects_of(self, view: SchedulerView) -> Mapping[str, Prospect]:
        prospects = self._prospects.of(view)
        if self._prospects.changed is None:  # nor is it known any more who is late
            self._was_late.update(self._late)
            self._waiting |= dict.fromkeys(self._late)
            self._late = Queue()
        return prospects

    def _jobs(self, starts_s: Mapping[str, float], prospects: Mapping[str, Prospect]) -> list[Job]:
        """Without those of which no step is left that does not run, and those that no ranks can run."""
        known = [(prospects[name], start_s) for name, start_s in starts_s.items() if name in prospects]
        return [Job(prospect, start_s) for prospect, start_s in known if prospect.num_steps > 0]

    def _put_aside(self, running: Iterable[Job], waiting: Iterable[Job]) -> None:
        """Those that wait and are late: until they change, nothing but their turn is to be decided."""
        self._was_late = {job.request.id for job in (*running, *waiting) if job.is_late}
        for job in waiting:
            if job.is_late:
                del self._waiting[job.request.id]
                self._late.put(job.request.id, self._turn(job))

    def _in_turn(
        self, jobs: Iterable[Job], prospects: Mapping[str, Prospect], view: SchedulerView
    ) -> Iterator[Job]:
        """``jobs`` and who was put aside, as it is their turn."""
        late = (Job(prospects[name], view.now_s) for name in self._late)
        return merge(sorted(jobs, key=self._turn), late, key=self._turn)

    def _turn(self, job: Job) -> tuple[bool, int, float, float, int]:
        """Deadlines that can be met first, then the more urgent priority, then the earlier deadline or arrival."""
        request = job.request
        best_effort = request.deadline_s is None or request.id in self._was_late or request.id in self._late
        by_s = request.arrival_s if best_effort or request.deadline_s is None else request.deadline_s
        return best_effort, -request.priority, by_s, request.arrival_s, job.prospect.number

    def _running_until_s(self, view: SchedulerView) -> dict[str, float]:
        """When the steps that run under the last plan should finish, by request."""
        until_s = {rank.id: max(view.now_s, rank.busy_until_s or 0.0) for rank in view.ranks}
        layouts = self._layouts.items()
        return {name: until_s[layout.ranks[0]] for name, layout in layouts if view.requests[name].running}

    def _place(self, plan: Plan, free: FreeRanks, before: Container[str]) -> None:
        """Choose ranks for ``plan``; requests that ran in the round before keep theirs first."""

        def claim(name: str) -> tuple[bool, int]:
            last = plan[name][0].request.last_layout
            return name not in before, -len(last.ranks) if last else 0

        for name in sorted(plan, key=claim) if self.placement_preservation else plan:
            job, (spec, _) = plan[name]
            last = job.request.last_layout if self.placement_preservation else None
            if layout := free.take(spec, job.request.model, last):
                self._layouts[name] = layout

    def _steps(self, view: SchedulerView, ready: Ready, free: FreeRanks) -> list[Dispatch]:
        """What can start now under the plan; requests with one layout share their steps."""
        batches: dict[ExecutionLayout, list[TaskView]] = {}
        idle = free.ids
        for name, layout in self._layouts.items():
            if layout.ranks[0] in idle and (step := _step(name, ready)):
                batches.setdefault(layout, []).append(step)
        dispatches = []
        for layout, tasks in batches.items():
            if free.claim(layout):
                prospect = self._prospects.of_one(view.requests[tasks[0].request_id], view)
                known = prospect.times.batch_s if prospect is not None else ()
                size = max([1, *(size for size in known if size <= len(tasks))])
                dispatches.append(Dispatch(tuple([task.id for task in tasks[:size]]), layout))
        return dispatches


def _step(name: str, ready: Ready) -> TaskView | None:
    return next((task for task in ready.get(name, ()) if task.kind is TaskKind.DENOISE), None)
