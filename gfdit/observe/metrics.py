"""Metrics of a server, in its ``/metrics`` beside vLLM-Omni's, and what routers and operators ask beside them.

They have two sources. Requests are counted in the engine, in whose process this is, at the moment they come and
end. Ranks, tasks and the work that is left come from the control process, in a
:class:`~gfdit.observe.snapshot.Snapshot` about once a second; what it counts goes on where the one before it has
ended. Nothing is kept by ``prometheus_client``: a scrape reads both.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric as Family

from gfdit.core.routing import due_within_s
from gfdit.core.tasks import Request
from gfdit.observe import catalogue as names
from gfdit.observe.snapshot import Numbers, RankNumbers, RequestState, Series, Snapshot, Totals
from gfdit.observe.tracing import Ended, Tracing

_Values = Mapping[tuple[str, tuple[str, ...]], Sequence[float]]


@dataclass(slots=True)
class _Alive:
    request: Request
    slo_class: str  # as it is shown
    queue_wait_s: float | None = None

    @property
    def started(self) -> bool:
        return self.queue_wait_s is not None


class ServerMetrics:
    """Of one engine; from any thread. ``why_not_ready`` says what the engine knows against it, if anything."""

    def __init__(
        self,
        num_ranks: int,
        why_not_ready: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_ranks = num_ranks
        self.stopping = False  # for good
        self.draining = False  # until an operator says otherwise
        self.tracing: Tracing | None = None  # is told of requests, too
        self.is_paused: Callable[[], bool] = lambda: False  # vLLM-Omni's own admission of requests
        self._why_not_ready = why_not_ready
        self._clock = clock
        self._lock = threading.Lock()
        self._alive: dict[str, _Alive] = {}
        self._ended: set[str] = set()  # since the last snapshot
        self._classes: dict[str, str] = {}
        self._numbers = Numbers()
        self._totals = Totals()
        self._snapshot: Snapshot | None = None
        self._of_workers: list[Series] = []
        for reason in names.REASONS:
            self._numbers.of(names.REJECTED, reason)
        for outcome in names.SPAN_OUTCOMES:
            self._numbers.of(names.SPANS, outcome)
        self._show_class("default")

    # Requests

    def refused(self, reason: str) -> None:
        """Turned away by the engine; one of :data:`~gfdit.observe.catalogue.REASONS`."""
        with self._lock:
            self._numbers.add(names.REJECTED, 1, reason)

    def arrived(self, request: Request) -> None:
        with self._lock:
            self._alive[request.id] = _Alive(request, self._show_class(request.slo_class))
        if self.tracing is not None:
            self.tracing.arrived(request)

    def started(self, request_id: str, queue_wait_s: float) -> None:
        with self._lock:
            # One that tries a cache and misses starts twice.
            if (one := self._alive.get(request_id)) is not None and not one.started:
                one.queue_wait_s = queue_wait_s
                self._numbers.observe(names.QUEUE_WAIT, queue_wait_s, one.slo_class)

    def ended(self, request_id: str, outcome: str, reason: str = "") -> None:
        """How, one of :data:`~gfdit.observe.catalogue.OUTCOMES`; the first word on a request counts."""
        with self._lock:
            if (one := self._alive.pop(request_id, None)) is None:
                return
            self._ended.add(request_id)
            now_s, request = self._clock(), one.request
            self._numbers.add(names.REQUESTS, 1, one.slo_class, outcome)
            if reason:
                self._numbers.add(names.REJECTED, 1, reason)
            if outcome == "completed":
                self._numbers.observe(names.LATENCY, now_s - request.arrival_s, one.slo_class)
            met = None
            if request.deadline_s is not None and outcome != "cancelled":
                met = outcome == "completed" and now_s <= request.deadline_s
                self._numbers.add(names.DEADLINES_MET if met else names.DEADLINES_MISSED, 1, one.slo_class)
        if self.tracing is not None:
            self.tracing.ended(Ended(request, outcome, reason, now_s, one.queue_wait_s, met))

    def count_spans(self, outcome: str, number: int) -> None:
        with self._lock:
            self._numbers.add(names.SPANS, number, outcome)

    def has_started(self, request_id: str) -> bool:
        with self._lock:
            return (one := self._alive.get(request_id)) is not None and one.started

    @property
    def num_running(self) -> int:
        """Requests that have left the queue."""
        with self._lock:
            return sum([one.started for one in self._alive.values()])

    def _show_class(self, slo_class: str) -> str:
        """Clients name classes as they like: only so many are told apart."""
        slo_class = slo_class[: names.MAX_CLASS_LENGTH]
        if (shown := self._classes.get(slo_class)) is not None:
            return shown
        if len(self._classes) >= names.MAX_CLASSES:
            slo_class = names.OTHER
        self._classes[slo_class] = slo_class
        for outcome in names.OUTCOMES:
            self._numbers.of(names.REQUESTS, slo_class, outcome)
        for metric in (names.DEADLINES_MET, names.DEADLINES_MISSED, names.QUEUE_WAIT, names.LATENCY):
            self._numbers.of(metric, slo_class)
        return slo_class

    # The control process, and the workers

    def take(self, snapshot: Snapshot) -> None:
        busy = [
            Series(names.RANK_BUSY.name, (str(rank),), [one.busy_s]) for rank, one in enumerate(snapshot.ranks)
        ]
        with self._lock:
            self._totals.take(snapshot.epoch, snapshot.sums + busy)
            self._snapshot = snapshot
            self._ended.clear()

    def take_worker_counters(self, by_rank: Sequence[Mapping[str, float]]) -> None:
        """Of every rank what :meth:`gfdit.omni.executor.OmniExecutor.gfdit_counters` says."""
        series = []
        for rank, counters in enumerate(by_rank):
            for name, value in counters.items():
                if name == "graph_bytes":
                    series.append(Series(names.GRAPH_BYTES.name, (str(rank),), [value]))
                elif name in ("host_bytes", "disk_bytes"):  # the same for all
                    tier = name.removesuffix("_bytes")
                    series.append(Series(names.TEMPLATE_BYTES.name, (tier,), [value]))
                else:
                    series.append(Series(names.TEMPLATE_EVENTS.name, (str(rank), name), [value]))
        with self._lock:
            self._of_workers = series

    # What is asked

    def why_not(self) -> str | None:
        """Why no request should be sent here; None if all is well."""
        with self._lock:
            snapshot = self._snapshot
        if self.draining or self.stopping:
            return "draining"
        if self.is_paused():
            return "paused"
        if (reason := self._why_not_ready()) is not None:
            return reason
        if snapshot is None:
            return "starting"
        return None if any([rank.up for rank in snapshot.ranks]) else "no live rank"

    def ranks_up(self) -> list[int]:
        """Those that serve, as far as was told."""
        with self._lock:
            return [
                number for number, rank in enumerate(self._snapshot.ranks if self._snapshot else ()) if rank.up
            ]

    def load(self) -> dict[str, Any]:
        """For routers and autoscalers: what there is to serve with, and what is left to do."""
        reason, now_s = self.why_not(), self._clock()
        with self._lock:
            alive, queued = len(self._alive), sum([not one.started for one in self._alive.values()])
            snapshot = self._snapshot or Snapshot(0, now_s)
            rows = self._rows(snapshot)
            by_class = self._backlog(rows)
            classes = [self._classes.get(row.slo_class[: names.MAX_CLASS_LENGTH], names.OTHER) for row in rows]
        due: dict[tuple[float, str], float] = {}
        for row, slo_class in zip(rows, classes, strict=True):
            within_s = due_within_s(row.deadline_s, now_s)
            due[within_s, slo_class] = due.get((within_s, slo_class), 0.0) + (row.left_rank_s or 0.0)
        return {
            "ready": reason is None,
            "reason": reason,
            "draining": self.draining or self.stopping,
            "age_s": round(max(0.0, now_s - snapshot.at_s), 3),
            "ranks": self.num_ranks,
            "live_ranks": sum([rank.up for rank in snapshot.ranks]),
            "alive": alive,
            "queued": queued,
            "backlog_rank_s": sum(by_class.values()),
            "backlog_rank_s_by_class": by_class,
            "due": [
                {"within_s": None if math.isinf(bound_s) else bound_s, "slo_class": name, "backlog_rank_s": rank_s}
                for (bound_s, name), rank_s in sorted(due.items())
            ],
            "unknown_costs": sum([row.left_rank_s is None for row in rows]),
            "services": [
                {
                    "model": one.model,
                    "size": one.size,
                    "num_steps": one.num_steps,
                    "guidance": one.guidance,
                    "seconds_by_degree": {str(degree): seconds for degree, seconds in one.seconds.items()},
                }
                for one in snapshot.services
            ],
        }

    def requests(self) -> dict[str, Any]:
        """Every live request; those that have come since the last snapshot are ``arriving``."""
        now_s = self._clock()
        with self._lock:
            snapshot = self._snapshot or Snapshot(0, now_s)
            rows = self._rows(snapshot)
            known = {row.id for row in rows}
            new = [one.request for name, one in self._alive.items() if name not in known]
        rows += [
            RequestState(r.id, r.model, r.slo_class, "arriving", "", (), 0, r.num_steps, r.deadline_s, None, None)
            for r in new
        ]
        return {
            "age_s": round(max(0.0, now_s - snapshot.at_s), 3),
            "requests": [
                {
                    "id": row.id,
                    "model": row.model,
                    "slo_class": row.slo_class,
                    "state": row.state,
                    "task": row.task,
                    "degree": len(row.ranks),
                    "ranks": list(row.ranks),
                    "steps_done": row.steps_done,
                    "num_steps": row.num_steps,
                    "left_s": row.left_s,
                    "left_rank_s": row.left_rank_s,
                    "deadline_in_s": None if row.deadline_s is None else row.deadline_s - now_s,
                    "slack_s": None
                    if row.deadline_s is None or row.left_s is None
                    else row.deadline_s - now_s - row.left_s,
                }
                for row in rows
            ],
        }

    def state(self) -> dict[str, Any]:
        """What a person wants to see at a glance: all of it, so that one answer is of one moment."""
        load, requests, values = self.load(), self.requests(), self.values()
        with self._lock:
            snapshot = self._snapshot or Snapshot(0, self._clock())

        def total(metric: names.Metric) -> int:
            return int(sum([numbers[0] for (name, _), numbers in values.items() if name == metric.name]))

        def by_class(metric: names.Metric) -> dict[str, int]:
            return {labels[0]: int(v[0]) for (name, labels), v in values.items() if name == metric.name}

        met, missed = by_class(names.DEADLINES_MET), by_class(names.DEADLINES_MISSED)
        return {
            **load,
            "policy": snapshot.policy,
            "requests": requests["requests"],
            "rank_states": [
                {
                    "rank": number,
                    "state": _state_of(rank),
                    "busy_ratio": rank.busy_ratio,
                    "restarts": rank.restarts,
                    "artifact_bytes": rank.artifact_bytes,
                    "component_bytes": rank.component_bytes,
                }
                for number, rank in enumerate(snapshot.ranks)
            ],
            "deadlines": {name: {"met": met[name], "missed": missed.get(name, 0)} for name in met},
            "faults": {
                "policy": total(names.POLICY_FAULTS),
                "retries": total(names.RETRIES),
                "quarantines": total(names.QUARANTINES),
                "rank_restarts": total(names.RANK_RESTARTS),
                "control_restarts": snapshot.epoch,
            },
            "rejected": total(names.REJECTED),
        }

    def _rows(self, snapshot: Snapshot) -> list[RequestState]:
        return [row for row in snapshot.requests if row.id not in self._ended]

    def _backlog(self, rows: Iterable[RequestState]) -> dict[str, float]:
        """By class as it is shown; in rank-seconds."""
        backlog = dict.fromkeys([*self._classes.values()], 0.0)
        for row in rows:
            name = self._classes.get(row.slo_class[: names.MAX_CLASS_LENGTH], names.OTHER)
            backlog[name] = backlog.get(name, 0.0) + (row.left_rank_s or 0.0)
        return backlog

    # Scrapes

    def values(self) -> dict[tuple[str, tuple[str, ...]], Sequence[float]]:
        """Of every metric, by name and labels."""
        ready = self.why_not() is None
        with self._lock:
            found: dict[tuple[str, tuple[str, ...]], Sequence[float]] = {(names.READY.name, ()): [ready]}
            found.update({key: list(values) for key, values in self._numbers.values.items()})
            found.update(self._totals.values())
            found.update({(one.metric, one.labels): one.values for one in self._of_workers})
            classes = [*self._classes.values()]
            alive, queued = dict.fromkeys(classes, 0), dict.fromkeys(classes, 0)
            for one in self._alive.values():
                alive[one.slo_class] = alive.get(one.slo_class, 0) + 1
                queued[one.slo_class] = queued.get(one.slo_class, 0) + (not one.started)
            snapshot = self._snapshot or Snapshot(0, 0.0)
            backlog = self._backlog(self._rows(snapshot))
        for metric, by_class in (
            (names.REQUESTS_ALIVE, alive),
            (names.REQUESTS_QUEUED, queued),
            (names.BACKLOG, backlog),
        ):
            found.update({(metric.name, (name,)): [value] for name, value in by_class.items()})
        found.update({(one.metric, one.labels): one.values for one in snapshot.levels})
        found[names.CONTROL_RESTARTS.name, ()] = [snapshot.epoch]
        for number, rank in enumerate(snapshot.ranks):
            for metric, value in (
                (names.RANK_UP, rank.up),
                (names.RANK_QUARANTINED, rank.quarantined),
                (names.RANK_DRAINED, rank.leaving or rank.drained),
                (names.RANK_RESTARTS, rank.restarts),
                (names.RANK_BUSY_RATIO, rank.busy_ratio),
                (names.ARTIFACT_BYTES, rank.artifact_bytes),
                (names.COMPONENT_BYTES, rank.component_bytes),
            ):
                found[metric.name, (str(number),)] = [value]
            found.setdefault((names.GRAPH_BYTES.name, (str(number),)), [0.0])
        return found

    def collect(self) -> Iterator[Family]:
        return families(self.values())


def _state_of(rank: RankNumbers) -> str:
    if rank.gone:
        return "gone"
    if rank.leaving or rank.drained:
        return "drained" if rank.drained else "draining"
    if not rank.up:
        return "restarting"
    return "quarantined" if rank.quarantined else "up"


def families(values: _Values) -> Iterator[Family]:
    """As ``prometheus_client`` wants them: all there are, also those of which there is nothing to say yet."""
    by_name: dict[str, list[tuple[tuple[str, ...], Sequence[float]]]] = {one.name: [] for one in names.METRICS}
    for (name, labels), numbers in values.items():
        by_name[name].append((labels, numbers))
    for metric in names.METRICS:
        # prometheus_client adds what ends the names of counters.
        family = Family(metric.name.removesuffix("_total"), metric.meaning, metric.kind)
        for labels, numbers in by_name[metric.name]:
            _add(family, metric, dict(zip(metric.labels, labels, strict=True)), numbers)
        yield family


def _add(family: Family, metric: names.Metric, labels: dict[str, str], numbers: Sequence[float]) -> None:
    if metric.kind != "histogram":
        family.add_sample(metric.name, labels, float(numbers[0]))
        return
    total = 0.0
    for bound, number in zip([*map(_text, metric.bounds), "+Inf"], numbers[:-1], strict=True):
        total += number
        family.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, total)
    family.add_sample(f"{metric.name}_count", labels, total)
    family.add_sample(f"{metric.name}_sum", labels, numbers[-1])


def _text(bound: float) -> str:
    return str(float(bound))


class Shown:
    """What ``/metrics`` of this process shows of gfdit: that of the engine made last, if there is any."""

    def __init__(self) -> None:
        self.server: ServerMetrics | None = None

    def collect(self) -> Iterator[Family]:
        return families({}) if self.server is None else self.server.collect()


SHOWN = Shown()
REGISTRY.register(SHOWN)
