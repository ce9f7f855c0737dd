"""Running ahead: what a policy would run next on some ranks, asked while they are still busy.

A policy is shown the state as it should be once a running dispatch has ended and nothing else has happened. If it
then goes on with the same requests on the same layout, the control plane queues that behind the running dispatch,
and asks again after what happens meanwhile: what is queued when the dispatch ends is what the policy would have
said at that moment, or nothing.
"""

from __future__ import annotations

from heapq import nsmallest
from operator import attrgetter
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from gfdit.core.control.records import DispatchRecord
from gfdit.core.control.state import ClusterState
from gfdit.core.cost import CostModel
from gfdit.core.policy import Policy, SchedulerView, TaskView
from gfdit.core.policy.rules import check_decision, check_dispatch
from gfdit.core.tasks import Task, TaskKind

NUM_WATCHED = 4
"""How many dispatches, of those that end next, the policy is asked about again after an event.

With hundreds of ranks, asking about all of them after every event would take longer than their steps. The others'
turn comes before they end; until then what the policy said last about them stands.
"""


class NextStep(Struct, frozen=True, gc=False):
    """What follows a dispatch on its own layout; ``views`` are what the policy saw of ``tasks``."""

    tasks: tuple[Task, ...]
    views: tuple[TaskView, ...]
    expected_s: float


class LookAhead:
    """Which dispatch to ask the policy about next, and the asking.

    Only a policy that says so is asked, with the attribute ``run_ahead = True``: its ``schedule`` must not mind
    being shown a state that may never come to be.
    """

    def __init__(self, policy: Policy, state: ClusterState, cost: CostModel, *, enabled: bool) -> None:
        self.enabled = enabled and bool(getattr(policy, "run_ahead", False))
        self.policy = policy
        self._state = state
        self._cost = cost
        self._version = 0

    def outdate(self) -> None:
        """Something has happened that may change any answer."""
        self._version += 1

    def next_due(self, now_s: float) -> DispatchRecord | None:
        """The dispatch to ask about next: it is new, or should have ended by now, or ends soon."""
        if not self.enabled:
            return None
        running = [d for d in self._state.dispatches.values() if d.behind is None]
        due = [d for d in running if d.looked_ahead < 0 or d.ends_s <= now_s]
        due += nsmallest(NUM_WATCHED, [d for d in running if d.ends_s > now_s], key=_end)
        due = [d for d in due if d.looked_ahead != self._version and self._is_open(d)]
        return min(due, key=_end, default=None)

    def _is_open(self, dispatch: DispatchRecord) -> bool:
        if dispatch.error is not None or dispatch.withdrawing or dispatch.lost:
            return False
        if not any([task.outputs for task in dispatch.tasks]):
            return False
        records = [self._state.requests[task.request_id] for task in dispatch.tasks]
        if any([record.ending or record.scattered for record in records]):
            return False  # after a fault what ends next need not be what unblocks a task
        follower = self._state.follower(dispatch)
        return follower is None or not (follower.begun or follower.withdrawing)

    def ask(self, dispatch: DispatchRecord, now_s: float) -> NextStep | None:
        """What the policy would go on with on the layout of ``dispatch``; None if that should wait and see.

        Raises what the policy or the cost model raises, and ``PolicyError`` for an answer against the rules.
        """
        dispatch.looked_ahead = self._version
        outlook = _Outlook(self._state, dispatch)
        if not outlook.views:
            return None
        view = outlook.view(max(now_s, dispatch.ends_s), self._cost)
        decision = self.policy.schedule(self._state.with_bytes(view) if self._state.shows_bytes else view)
        check_decision(decision, policy=self.policy.name)
        for answer in decision.dispatches:
            if answer.layout == dispatch.layout and outlook.views.keys() >= set(answer.tasks):
                ranks = self._state.ranks.views_without(dispatch.layout.ranks)
                check_dispatch(answer, policy=self.policy.name, ready=outlook.views, ranks=ranks)
                tasks = tuple([outlook.tasks[name] for name in answer.tasks])
                views = tuple([outlook.views[name] for name in answer.tasks])
                return NextStep(tasks, views, self._cost.task_s(views[0], answer.layout, len(tasks)))
        return None


_end = attrgetter("ends_s")


class _Outlook:
    """The state once ``dispatch`` has ended well.

    ``views`` are the tasks that become ready by that and can go on where they are: nothing is to be copied.
    """

    def __init__(self, state: ClusterState, dispatch: DispatchRecord) -> None:
        self._state = state
        self._dispatch = dispatch
        self._requests = dict(state.request_views)
        self._ready: list[tuple[tuple[int, int], TaskView]] = []
        self.views: dict[str, TaskView] = {}
        self.tasks: dict[str, Task] = {}
        for request_id in dict.fromkeys([task.request_id for task in dispatch.tasks]):
            self._end_tasks_of(request_id)

    def view(self, now_s: float, cost: CostModel) -> SchedulerView:
        ranks, free_ranks = self._state.ranks.in_order_without(self._dispatch.layout.ranks)
        ready = self._state.ready.in_order_with(self._ready)
        return SchedulerView(now_s, ready, MappingProxyType(self._requests), ranks, free_ranks, cost)

    def _end_tasks_of(self, request_id: str) -> None:
        record = self._state.requests[request_id]
        done = [task for task in self._dispatch.tasks if task.request_id == request_id]
        if len(record.finished) + len(done) == len(record.graph.tasks):
            del self._requests[request_id]
            return
        left = dict(record.tasks_left)
        for task in done:
            left[task.kind] -= 1
        self._requests[request_id] = replace(
            self._requests[request_id],
            steps_done=record.steps_done + sum([task.kind is TaskKind.DENOISE for task in done]),
            tasks_left=MappingProxyType(left),
            running=len(record.running) > 1,
        )
        made = {name for task in done for name in task.outputs}
        ranks = self._dispatch.layout.ranks
        for task in record.unblocked_by(made):
            view = record.task_view(task, made, ranks)
            self._ready.append((record.place(task.id), view))
            others = [record.artifacts[name] for name in task.inputs if name not in made]
            if all([art.view.fits(art.holders, self._dispatch.layout) for art in others]):
                self.views[task.id], self.tasks[task.id] = view, task
