"""FlashPS's scheduler of edits: each rank a worker with a batch of its own (paper, sections 4.3 and 4.4)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

from gfdit.core import Decision, Dispatch, RequestView, SchedulerView, TaskKind, TaskView
from gfdit.core.policy.estimates import MAX_BATCH, Estimates, ServiceTimes
from gfdit.policies._groups import Group, WorkerGroups


class _Member(NamedTuple):
    """A request that is on a worker, or might be."""

    request: RequestView
    times: ServiceTimes
    steps_left: int


@dataclass
class MaskAware:
    """A request is bound to one rank when it arrives, and shares its steps with all others there.

    *Where* (Algorithm 2 of the paper). ``pipeline``: where all requests of the rank and the new one would be done
    first, with what their masks leave of a step. The paper's baselines go by less: ``tokens`` by what the requests
    compute in a step, ``count`` by their number. Of equal ones the first rank is taken. Requests of a lost rank
    are placed anew.

    *When* (section 4.3). A rank runs a batch of at most ``max_batch`` requests, the oldest first, one batched step
    after the other. With ``continuous`` batching requests join it and leave it at every step boundary; with
    ``static`` the next ones join once all of the batch have ended. Encoding and decoding run on the same rank
    between steps. So nobody starves: nobody who came later runs before others that are not in the batch.

    Deadlines and priorities are ignored. Requests that need several ranks get groups of them, and batches only of
    requests that are alike but for their masks.
    """

    placement: Literal["pipeline", "tokens", "count"] = "pipeline"
    batching: Literal["continuous", "static"] = "continuous"
    max_batch: int = MAX_BATCH
    name = "mask-aware"
    run_ahead = True
    _groups: WorkerGroups = field(init=False, repr=False)
    _estimates: Estimates = field(default_factory=Estimates, init=False, repr=False)
    _batches: dict[Group, Sequence[str]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch <= MAX_BATCH:
            raise ValueError(f"max_batch must be from 1 to {MAX_BATCH}, got {self.max_batch}")
        self._groups = WorkerGroups(1, self._load)

    def schedule(self, view: SchedulerView) -> Decision:
        self._groups.update(view)
        idle = self._groups.idle(view)
        self._batches = {group: names for group, names in self._batches.items() if group.left_s}
        ready = view.ready_by_request
        dispatches = []
        for group in idle:
            chosen = self._next([task for name in self._batch(group, view) for task in ready.get(name, ())], view)
            if chosen and (started := self._groups.start(chosen[0], view)):
                dispatches.append(Dispatch(tuple([task.id for task in chosen]), started.layout))
        return Decision(tuple(dispatches))

    def _batch(self, group: Group, view: SchedulerView) -> Sequence[str]:
        """The requests that run on ``group`` now, the oldest first.

        A static batch is closed once one of its requests has begun: until then it may be made anew, since this may
        be asked about a moment that never comes.
        """
        kept = [name for name in self._batches.get(group, ()) if name in group.left_s]
        if self.batching == "continuous" or not any([_has_begun(view.requests[name]) for name in kept]):
            kept = self._batches[group] = list(islice(group.queue, self.max_batch))
        return kept

    def _next(self, tasks: Sequence[TaskView], view: SchedulerView) -> Sequence[TaskView]:
        """What is not a step goes first, so that more share the steps; else a step of as many as may share it."""
        for task in tasks:
            if task.kind is not TaskKind.DENOISE:
                return (task,)
        alike = [task for task in tasks if _kind(task) == _kind(tasks[0])]
        known = self._estimates.of(view.requests[tasks[0].request_id], view).batch_s if tasks else {}
        size = max([size for size in known if size <= len(alike)], default=1)
        return alike[:size]

    def _load(self, group: Group, request: RequestView, view: SchedulerView) -> float:
        bound = [*(view.requests[name] for name in group.left_s), request]
        if self.placement == "count":
            return len(bound)
        if self.placement == "tokens":
            return sum([one.shape.num_tokens * one.shape.computed_percent for one in bound])
        bound.sort(key=lambda one: one.arrival_s)
        return self._pipeline_s([self._member(one, view) for one in bound])

    def _pipeline_s(self, queue: list[_Member]) -> float:
        """Until all of ``queue`` have ended on one rank, the oldest first, in batches that others join."""
        total_s = sum([one.times.around_s(one.request) for one in queue])
        while queue := [one for one in queue if one.steps_left > 0]:
            batch, waiting = queue[: self.max_batch], queue[self.max_batch :]
            num_steps = min([one.steps_left for one in batch])
            total_s += num_steps * _step_s([one.times for one in batch])
            queue = [one._replace(steps_left=one.steps_left - num_steps) for one in batch] + waiting
        return total_s

    def _member(self, request: RequestView, view: SchedulerView) -> _Member:
        times = self._estimates.of(request, view)
        return _Member(request, times, request.tasks_left.get(TaskKind.DENOISE, 0))


def _step_s(batch: Sequence[ServiceTimes]) -> float:
    """Of one step for all, in proportion to tokens: the mean of what it would be if all were alike."""
    together_s = [times.batch_s.get(len(batch)) for times in batch]
    known_s = [seconds for seconds in together_s if seconds is not None]
    if len(known_s) == len(batch):
        return sum(known_s) / len(batch)
    return sum([next(iter(times.step_s.values())) for times in batch])


def _has_begun(request: RequestView) -> bool:
    return request.running or request.last_layout is not None


def _kind(task: TaskView) -> Hashable:
    """Tasks of one kind may share a step (FlashPS, section 4.3: whatever their masks)."""
    return task.model, task.shape.whole, task.cfg, task.candidates
