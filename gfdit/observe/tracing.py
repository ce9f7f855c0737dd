"""Traces of requests, over OTLP, from a thread of the engine's process.

Nothing is kept beside what metrics and the timeline are made of: a request's span is made when
:class:`~gfdit.observe.metrics.ServerMetrics` says how it ended, those of its tasks and copies from what the
control process tells of them (:mod:`gfdit.observe.traces`).

A request's span goes out with the first word of the control process after its end, so that it has every event; its
children, which may come later still, know it for :data:`REMEMBER_S`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from gfdit.core.tasks import Request
from gfdit.observe.otlp import SERVER, Batch, Endpoint, Exporter, Value
from gfdit.observe.traces import Fact, RequestEvent, TaskSpan, Traces
from gfdit.observe.writers import BackgroundWriter

VERSION = importlib.metadata.version("gfdit")
INTERVAL_S = 1.0
MAX_WAITING = 32768  # spans and events
MAX_CALLERS = 4096
MAX_EVENTS = 128  # of one request
MAX_BATCH = 2048  # spans in an export, well below what gRPC takes
REMEMBER_S = 60.0
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1

logger = logging.getLogger("gfdit.tracing")

Nanoseconds = Callable[[float], int]
"""Since 1970, of a reading of CLOCK_MONOTONIC."""

Count = Callable[[str, int], None]
"""Of spans: whether they were ``exported`` or ``dropped``, and how many."""


class Caller(NamedTuple):
    """What a client's HTTP headers say of it: X-Request-Id, traceparent and tracestate (W3C Trace Context)."""

    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""


class Ended(NamedTuple):
    """How a request ended. ``met`` is None where it had no deadline, or its client went away."""

    request: Request
    outcome: str
    reason: str
    at_s: float
    queue_wait_s: float | None
    met: bool | None


class _Arrived(NamedTuple):
    request: Request
    caller: Caller


_Item = _Arrived | Ended | Traces


class Tracing:
    """``resource`` says of every span what server it is of. Nothing here waits or raises; from any thread."""

    def __init__(
        self,
        endpoint: str,
        resource: dict[str, Value],
        count: Count,
        open_exporter: Callable[[Endpoint], Exporter] = Exporter.of,
    ) -> None:
        """Raises ``ValueError`` for an endpoint that is none."""
        parsed = Endpoint.parse(endpoint)
        self._count = count
        self._lock = threading.Lock()
        self._callers: dict[str, Caller] = {}  # of requests that are to come
        self._writer: BackgroundWriter[_Item] = BackgroundWriter(
            f"traces to {endpoint}",
            lambda: _Spans(partial(Batch, resource, VERSION), open_exporter(parsed), count, endpoint),
            max_waiting=MAX_WAITING,
            interval_s=INTERVAL_S,
            medium="the collector",
        )

    def expect(self, request_id: str, caller: Caller) -> None:
        """``request_id`` is to come from ``caller``, if it comes."""
        with self._lock:
            self._callers[request_id] = caller
            if len(self._callers) > MAX_CALLERS:
                del self._callers[next(iter(self._callers))]

    def arrived(self, request: Request) -> None:
        with self._lock:
            self._put(_Arrived(request, self._callers.pop(request.id, Caller())), 1)

    def ended(self, how: Ended) -> None:
        with self._lock:
            self._put(how, 1)

    def take(self, traces: Traces) -> None:
        with self._lock:
            if traces.num_dropped:
                self._count("dropped", traces.num_dropped)
            self._put(traces, len(traces.facts))

    def _put(self, item: _Item, num_spans: int) -> None:
        dropped_before = self._writer.num_dropped
        self._writer.put(item, num_spans)
        if self._writer.ended or self._writer.num_dropped > dropped_before:
            self._count("dropped", num_spans)

    def close(self) -> None:
        self._writer.close()


@dataclass(slots=True)
class _Trace:
    """Of one request. ``sampled``: it is to be exported."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    state: str
    sampled: bool
    client_id: str
    events: list[RequestEvent] = field(default_factory=list)
    how: Ended | None = None


def _trace_of(caller: Caller) -> _Trace:
    """A new span under the client's, or the root of a trace of its own if it has none or one that is not valid."""
    found = _TRACEPARENT.fullmatch(caller.traceparent.strip())
    is_valid = found is not None and int(found[2], 16) and int(found[3], 16) and found[1] != "ff"
    if found is None or not is_valid or (found[1] == "00" and found[5]):
        return _Trace(os.urandom(16), os.urandom(8), b"", "", True, caller.request_id)
    trace_id, parent_id = bytes.fromhex(found[2]), bytes.fromhex(found[3])
    is_sampled = bool(int(found[4], 16) & _SAMPLED)
    return _Trace(trace_id, os.urandom(8), parent_id, caller.tracestate, is_sampled, caller.request_id)


class _Spans:
    """What the thread does: a sink that is given what happened and sends what spans follow."""

    def __init__(self, new_batch: Callable[[], Batch], exporter: Exporter, count: Count, endpoint: str) -> None:
        self._new_batch = new_batch
        self._exporter = exporter
        self._count = count
        self._endpoint = endpoint
        self._traces: dict[str, _Trace] = {}
        self._ending: list[_Trace] = []
        self._over: deque[tuple[float, str]] = deque()  # when that became known here
        self._fails = False

    def write(self, items: Sequence[_Item]) -> None:
        batch = self._new_batch()
        now_s = time.monotonic()
        since_1970_ns = time.time_ns() - time.monotonic_ns()  # at every batch: the clock may be set

        def ns(at_s: float) -> int:
            return int(at_s * 1e9) + since_1970_ns

        for item in items:
            match item:
                case _Arrived(request, caller):
                    self._traces[request.id] = _trace_of(caller)
                case Ended(request):
                    if (trace := self._traces.get(request.id)) is not None:
                        trace.how = item
                        self._ending.append(trace)
                        self._over.append((now_s, request.id))
                case Traces(facts):
                    for fact in facts:
                        if (trace := self._traces.get(fact.request)) is not None and trace.sampled:
                            _add(batch, trace, fact, ns)
                            if len(batch) >= MAX_BATCH:
                                self._send(batch)
                                batch = self._new_batch()
                    self._finish(batch, ns)
        while self._over and now_s - self._over[0][0] > REMEMBER_S:
            self._traces.pop(self._over.popleft()[1], None)
        self._send(batch)

    def close(self) -> None:
        batch = self._new_batch()
        since_1970_ns = time.time_ns() - time.monotonic_ns()
        self._finish(batch, lambda at_s: int(at_s * 1e9) + since_1970_ns)
        self._send(batch)
        self._exporter.close()

    def _finish(self, batch: Batch, ns: Nanoseconds) -> None:
        """The spans of requests whose end is known: what the control process had to say of them has come."""
        for trace in self._ending:
            if trace.sampled and trace.how is not None:
                _add_request(batch, trace, trace.how, ns)
        self._ending.clear()

    def _send(self, batch: Batch) -> None:
        """Whatever goes wrong, serving goes on, and so do later spans."""
        if not len(batch):
            return
        try:
            self._exporter.send(batch)
        except Exception as error:
            self._count("dropped", len(batch))
            if not self._fails:
                logger.warning("spans cannot be sent to %s and are dropped: %s", self._endpoint, error)
            self._fails = True
        else:
            self._count("exported", len(batch))
            if self._fails:
                logger.info("spans are sent to %s again", self._endpoint)
            self._fails = False


def _add(batch: Batch, trace: _Trace, fact: Fact, ns: Nanoseconds) -> None:
    if isinstance(fact, RequestEvent):
        if len(trace.events) < MAX_EVENTS:
            trace.events.append(fact)
        return
    attributes: dict[str, Value]
    if isinstance(fact, TaskSpan):
        name = fact.kind
        attributes = {
            "gfdit.task.id": fact.task,
            "gfdit.task.kind": fact.kind,
            "gfdit.task.ranks": fact.ranks,
            "gfdit.task.degree": len(fact.ranks),
            "gfdit.task.sp": fact.sp,
            "gfdit.task.cfg": fact.cfg,
            "gfdit.task.batch": fact.batch,
            "gfdit.task.attempt": fact.attempt,
            "gfdit.task.run_ahead": fact.run_ahead,
            "gfdit.task.wait_s": max(0.0, fact.start_s - fact.decided_s),
        }
        if fact.step >= 0:
            attributes["gfdit.task.step"] = fact.step
        if fact.component:
            attributes["gfdit.task.component"] = fact.component
    else:
        name = "migrate"
        attributes = {
            "gfdit.migration.artifact": fact.artifact,
            "gfdit.migration.bytes": fact.num_bytes,
            "gfdit.migration.from": fact.sources,
            "gfdit.migration.to": fact.destinations,
            "gfdit.migration.keep": fact.keep,
        }
    attributes["gfdit.request.id"] = fact.request
    times_ns = ns(fact.start_s), ns(fact.end_s)
    error = fact.error or None
    batch.add(
        name, trace.trace_id, os.urandom(8), trace.span_id, times_ns, attributes, state=trace.state, error=error
    )


def _add_request(batch: Batch, trace: _Trace, how: Ended, ns: Nanoseconds) -> None:
    request = how.request
    attributes: dict[str, Value] = {
        "gfdit.request.id": request.id,
        "gfdit.request.model": request.model,
        "gfdit.request.size": f"{request.shape.width}x{request.shape.height}",
        "gfdit.request.frames": request.shape.num_frames,
        "gfdit.request.outputs": request.shape.num_outputs,
        "gfdit.request.steps": request.num_steps,
        "gfdit.request.guidance": request.cfg,
        "gfdit.request.priority": request.priority,
        "gfdit.request.slo_class": request.slo_class,
        "gfdit.request.outcome": how.outcome,
    }
    if request.deadline_s is not None:
        attributes["gfdit.request.deadline_s"] = request.deadline_s - request.arrival_s
    if trace.client_id:
        attributes["gfdit.request.client_id"] = trace.client_id
    if how.reason:
        attributes["gfdit.request.reason"] = how.reason
    if how.met is not None:
        attributes["gfdit.request.met"] = how.met
    if how.queue_wait_s is not None:
        attributes["gfdit.request.queue_wait_s"] = how.queue_wait_s
    events = [
        (
            event.name,
            ns(event.at_s),
            {"gfdit.task.id": event.task}
            | ({"gfdit.rank": event.rank} if event.rank >= 0 else {})
            | ({"gfdit.error": event.detail} if event.detail else {}),
        )
        for event in trace.events
    ]
    batch.add(
        "request",
        trace.trace_id,
        trace.span_id,
        trace.parent_id,
        (ns(request.arrival_s), ns(how.at_s)),
        attributes,
        kind=SERVER,
        state=trace.state,
        events=events,
        error=how.reason or how.outcome if how.outcome in ("failed", "rejected") else None,
    )
