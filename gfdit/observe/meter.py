"""The numbers of a control process: what is counted while it works, and the snapshot made of them.

Between two snapshots tasks that end and what decisions took are only collected; all else is read off the control
plane when a snapshot is due.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from gfdit.core import ControlPlane
from gfdit.core.control.records import DispatchRecord, RequestRecord
from gfdit.core.cost import UnknownCostError
from gfdit.core.events import MigrationFinished
from gfdit.core.policy import RequestView, SchedulerView
from gfdit.core.policy.estimates import Estimates, ServiceTimes
from gfdit.core.tasks import Shape, TaskKind
from gfdit.observe.catalogue import (
    DECISION_SECONDS,
    MIGRATION_BYTES,
    MIGRATION_SECONDS,
    POLICY_FAULTS,
    QUARANTINES,
    RETRIES,
    RUNNING_TASKS,
    TASK_SECONDS,
)
from gfdit.observe.snapshot import Numbers, RankNumbers, RequestState, Series, Service, Snapshot, note_all

INTERVAL_S = 1.0
MAX_SHARE = 0.003
"""Of the control process's time, for snapshots: with thousands of requests they come less often."""
WINDOW_S = 30.0
MAX_SERVICES = 32

_Class = tuple[str, Shape, int, bool]


class Meter:
    """Watches ``plane``. ``models`` are those that its ranks have, or may load."""

    def __init__(self, plane: ControlPlane, num_ranks: int, models: Iterable[str], epoch: int = 0) -> None:
        self._plane = plane
        self._num_ranks = num_ranks
        self._epoch = epoch
        self._numbers = Numbers()
        self._busy_s = [0.0] * num_ranks
        self._past: deque[tuple[float, list[float]]] = deque()  # busy_s, within the window
        self._estimates = Estimates()
        self._services: dict[_Class, Service] = {}
        self._degrees = [2**power for power in range(num_ranks.bit_length()) if 2**power <= num_ranks]
        # There from the start: a counter that appears with its first count hides it from rate().
        for model in models:
            for kind in (TaskKind.ENCODE, TaskKind.DENOISE, TaskKind.DECODE):
                for degree in self._degrees if kind is TaskKind.DENOISE else (1,):
                    self._numbers.of(TASK_SECONDS, kind.value, model, str(degree))
        for metric in (MIGRATION_SECONDS, MIGRATION_BYTES, DECISION_SECONDS):
            self._numbers.of(metric)
        self.decisions_s: list[float] = []  # since the last snapshot, from whoever calls the policy
        # Likewise, by kind, model and ranks.
        self._seconds: defaultdict[tuple[str, str, tuple[int, ...]], list[float]] = defaultdict(list)
        plane.on_task_done = self.task_done

    def task_done(self, dispatch: DispatchRecord) -> None:
        """Every rank of ``dispatch`` has succeeded. Nothing happens more often: it is counted when there is time.

        The record itself is not kept: what lives on, and is tracked, has the garbage collector run more often.
        """
        view = dispatch.views[0]
        # A string's hash is cached, an enumeration's is not.
        self._seconds[view.kind._value_, view.model, dispatch.layout.ranks].append(dispatch.seconds)

    def _count(self) -> None:
        """What tasks and decisions took since the last snapshot."""
        for (kind, model, ranks), seconds in self._seconds.items():
            note_all(self._numbers.of(TASK_SECONDS, kind, model, str(len(ranks))), TASK_SECONDS.bounds, seconds)
            busy_s = sum(seconds)
            for rank in ranks:
                self._busy_s[rank] += busy_s
        note_all(self._numbers.of(DECISION_SECONDS), DECISION_SECONDS.bounds, self.decisions_s)
        self._seconds.clear()
        self.decisions_s.clear()

    def forget_times(self) -> None:
        """The cost model is another one."""
        self._estimates = Estimates()
        self._services.clear()

    def moved(self, done: MigrationFinished) -> None:
        """Of every rank that takes part, those count that something came to."""
        if done.num_bytes and not done.error:
            self._numbers.observe(MIGRATION_SECONDS, done.seconds)
            self._numbers.add(MIGRATION_BYTES, done.num_bytes)

    def snapshot(self, now_s: float, restarts: Sequence[int], gone: Iterable[int]) -> Snapshot:
        """``restarts`` by rank."""
        plane = self._plane
        self._count()
        sums = self._numbers.series()
        sums.append(Series(RETRIES.name, (), [plane.num_retries]))
        sums.append(Series(QUARANTINES.name, (), [plane.num_suspicions]))
        sums.append(Series(POLICY_FAULTS.name, (), [plane.num_complaints]))
        degrees = dict.fromkeys(self._degrees, 0)
        for dispatch in plane.state.dispatches.values():
            if dispatch.behind is None and not dispatch.has_left:
                degree = len(dispatch.layout.ranks)
                degrees[degree] = degrees.get(degree, 0) + 1
        return Snapshot(
            epoch=self._epoch,
            at_s=now_s,
            policy=plane.policy.name,
            ranks=self._ranks(now_s, restarts, set(gone)),
            sums=sums,
            levels=[Series(RUNNING_TASKS.name, (str(degree),), [number]) for degree, number in degrees.items()],
            requests=self._requests(now_s),
            services=list(self._services.values()),
        )

    def _ranks(self, now_s: float, restarts: Sequence[int], gone: set[int]) -> list[RankNumbers]:
        state = self._plane.state
        past = self._past
        past.append((now_s, self._busy_s.copy()))
        while len(past) > 2 and past[1][0] <= now_s - WINDOW_S:
            past.popleft()
        then_s, before_s = past[0]
        passed_s = max(now_s - then_s, 1e-9)
        held = state.artifact_bytes()
        numbers = []
        for rank in range(self._num_ranks):
            record = state.ranks.present.get(rank)
            numbers.append(
                RankNumbers(
                    up=record is not None and not record.leaving,
                    gone=rank in gone,
                    quarantined=record is not None and record.suspended,
                    restarts=restarts[rank],
                    busy_s=self._busy_s[rank],
                    busy_ratio=min(1.0, (self._busy_s[rank] - before_s[rank]) / passed_s),
                    artifact_bytes=held.get(rank, 0),
                    component_bytes=0 if record is None else state.residency.num_bytes(record.resident),
                    leaving=record is not None and record.leaving,
                    drained=self._plane.is_drained(rank),
                )
            )
        return numbers

    def _requests(self, now_s: float) -> list[RequestState]:
        plane = self._plane
        seen: set[_Class] = set()
        # Not what a policy is shown: making that lets a component that failed long ago be tried again.
        view = SchedulerView(now_s, (), plane.state.request_views, (), (), plane.cost)
        return [self._request(record, view, seen) for record in plane.state.requests.values()]

    def _request(self, record: RequestRecord, view: SchedulerView, seen: set[_Class]) -> RequestState:
        request = record.request
        shown = view.requests.get(request.id) or record.view()
        left_s = left_rank_s = None
        try:
            times = self._estimates.of(shown, view)
        except UnknownCostError:
            pass
        else:
            left_s, left_rank_s = _left(shown, times)
            kind = (request.model, request.shape, request.num_steps, request.cfg)
            if kind not in seen:
                seen.add(kind)
                self._note_service(kind, shown, times)
        return RequestState(
            request.id,
            request.model,
            request.slo_class,
            _state_of(record),
            *self._running(record),
            record.steps_done,
            request.num_steps,
            request.deadline_s,
            left_s,
            left_rank_s,
        )

    def _running(self, record: RequestRecord) -> tuple[str, tuple[int, ...]]:
        """The kind of the widest task of it that runs, and its ranks, then all others."""
        running = [self._plane.state.dispatches[number] for number in record.running]
        if not running:
            return "", ()
        running.sort(key=lambda dispatch: -len(dispatch.layout.ranks))
        ranks = dict.fromkeys([rank for dispatch in running for rank in dispatch.layout.ranks])
        return running[0].views[0].kind.value, tuple(ranks)

    def _note_service(self, kind: _Class, request: RequestView, times: ServiceTimes) -> None:
        seconds: dict[int, float] = {}
        for spec in times.step_s:
            alone_s = times.alone_s(request, spec)
            seconds[spec.size] = min(alone_s, seconds.get(spec.size, alone_s))
        self._services.pop(kind, None)
        if len(self._services) >= MAX_SERVICES:
            del self._services[next(iter(self._services))]
        model, shape, num_steps, cfg = kind
        self._services[kind] = Service(model, str(shape), num_steps, cfg, seconds)


def _left(request: RequestView, times: ServiceTimes) -> tuple[float, float]:
    """Seconds left at the degree it had last, and rank-seconds left at the narrowest."""
    narrowest = next(iter(times.step_s))
    last = request.last_layout
    spec = narrowest if last is None or last.parallel not in times.step_s else last.parallel
    around_s = times.around_s(request)
    steps_left = request.tasks_left.get(TaskKind.DENOISE, 0)
    return (
        around_s + steps_left * times.step_s[spec],
        around_s + steps_left * times.step_s[narrowest] * narrowest.size,
    )


def _state_of(record: RequestRecord) -> str:
    if record.ending is not None:
        return "ending"
    if record.running:
        return "running"
    if record.started:
        return "waiting"
    return "queued" if record.visible else "waiting for memory"
