"""Every metric of a server: name, type, labels, unit and meaning. ``docs/metrics.md`` has the same, and a test.

Names are those of the Prometheus text format. All labels take a bounded number of values: ranks, degrees and
models are the server's own, outcomes and reasons are listed here, and of the classes that clients name the first
``MAX_CLASSES`` have their own value, all later ones ``OTHER``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

MAX_CLASSES = 16
MAX_CLASS_LENGTH = 64
OTHER = "other"

OUTCOMES = ("completed", "cancelled", "rejected", "failed")
REASONS = (
    "invalid",  # HTTP 400: a field, a size, a number of steps
    "payload_too_large",  # 413: max_payload_bytes
    "too_many_requests",  # 429: max_requests
    "too_many_bytes",  # 429: max_queued_bytes
    "admission",  # 429: it would be late, or make others late
    "queue_timeout",  # 503: max_queue_s
    "too_large",  # 400: it fits into no device's memory
    "unavailable",  # 503: ranks or components that it needs are lost
    "draining",  # 503: the server is told to stop, or an operator drains it
)

SPAN_OUTCOMES = ("exported", "dropped")

TASK_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUEST_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
DECISION_BOUNDS_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1, 1.0)
MIGRATION_BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metric(NamedTuple):
    """One family. ``bounds`` are the upper bounds of a histogram's buckets, but for the last, in its unit."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    unit: str
    meaning: str
    bounds: tuple[float, ...] = ()


def _counter(name: str, labels: str, unit: str, meaning: str) -> Metric:
    return Metric(name, "counter", tuple(labels.split()), unit, meaning)


def _gauge(name: str, labels: str, unit: str, meaning: str) -> Metric:
    return Metric(name, "gauge", tuple(labels.split()), unit, meaning)


def _seconds(name: str, labels: str, meaning: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(name, "histogram", tuple(labels.split()), "seconds", meaning, bounds)


READY = _gauge("gfdit_ready", "", "", "1 while /v1/gfdit/ready says so")

REQUESTS_ALIVE = _gauge(
    "gfdit_requests_alive", "slo_class", "requests", "Requests that were let in and are not answered"
)
REQUESTS_QUEUED = _gauge(
    "gfdit_requests_queued", "slo_class", "requests", "Those of them of which no task has been dispatched"
)
REQUESTS = _counter("gfdit_requests_total", "slo_class outcome", "requests", "Requests that have ended")
REJECTED = _counter(
    "gfdit_requests_rejected_total", "reason", "requests", "Requests turned away before any of their tasks ran"
)
DEADLINES_MET = _counter(
    "gfdit_deadlines_met_total", "slo_class", "requests", "Requests with a deadline that were completed in time"
)
DEADLINES_MISSED = _counter(
    "gfdit_deadlines_missed_total",
    "slo_class",
    "requests",
    "Requests with a deadline that were completed late, failed, or turned away once they were understood",
)
QUEUE_WAIT = _seconds(
    "gfdit_queue_wait_seconds",
    "slo_class",
    "From the arrival of a request to the dispatch of its first task",
    REQUEST_BOUNDS_S,
)
LATENCY = _seconds(
    "gfdit_request_seconds",
    "slo_class",
    "From the arrival of a completed request to its result",
    REQUEST_BOUNDS_S,
)

TASK_SECONDS = _seconds(
    "gfdit_task_seconds",
    "kind model degree",
    "Time that a dispatch took on its slowest rank, by kind of task, model or component, and number of ranks; "
    "steps are of kind denoise",
    TASK_BOUNDS_S,
)
RUNNING_TASKS = _gauge("gfdit_running_tasks", "degree", "dispatches", "Dispatches that run, by number of ranks")
RETRIES = _counter(
    "gfdit_task_retries_total", "", "tasks", "Tasks that were lost with a rank or failed on it, and run again"
)
DECISION_SECONDS = _seconds(
    "gfdit_decision_seconds", "", "Time that the policy took for a decision", DECISION_BOUNDS_S
)
POLICY_FAULTS = _counter(
    "gfdit_policy_faults_total",
    "",
    "decisions",
    "Decisions in which the policy raised, broke a rule or left everything idle",
)
BACKLOG = _gauge(
    "gfdit_backlog_rank_seconds",
    "slo_class",
    "rank-seconds",
    "Work left of the requests that are alive, each step at the request's narrowest degree",
)

RANK_UP = _gauge("gfdit_rank_up", "rank", "", "1 while a rank serves, 0 while it is away")
RANK_QUARANTINED = _gauge(
    "gfdit_rank_quarantined", "rank", "", "1 while a rank is given nothing because tasks have failed on it"
)
RANK_DRAINED = _gauge(
    "gfdit_rank_drained", "rank", "", "1 while an operator has a rank drained, or it is being so"
)
QUARANTINES = _counter("gfdit_quarantines_total", "", "", "How often a rank was put into quarantine")
RANK_RESTARTS = _counter(
    "gfdit_rank_restarts_total", "rank", "", "How often the process of a rank was started again"
)
CONTROL_RESTARTS = _counter("gfdit_control_restarts_total", "", "", "How often the control process was replaced")
RANK_BUSY = _counter(
    "gfdit_rank_busy_seconds_total",
    "rank",
    "seconds",
    "Time a rank was at tasks that went well, added at their end",
)
RANK_BUSY_RATIO = _gauge(
    "gfdit_rank_busy_ratio", "rank", "ratio", "Share of the last half a minute that a rank was at tasks"
)

MIGRATION_SECONDS = _seconds(
    "gfdit_migration_seconds", "", "Time that a rank took to receive its part of an artifact", MIGRATION_BOUNDS_S
)
MIGRATION_BYTES = _counter("gfdit_migration_bytes_total", "", "bytes", "Bytes of artifacts that came to a rank")
ARTIFACT_BYTES = _gauge(
    "gfdit_artifact_bytes", "rank", "bytes", "Request state between tasks that a rank holds, metadata left out"
)
COMPONENT_BYTES = _gauge(
    "gfdit_component_bytes", "rank", "bytes", "Components of workflows that a rank has loaded; 0 without workflows"
)
GRAPH_BYTES = _gauge(
    "gfdit_graph_bytes", "rank", "bytes", "Memory that captured steps hold; 0 unless graph_bytes is set"
)
TEMPLATE_BYTES = _gauge(
    "gfdit_template_bytes", "tier", "bytes", "Kept of templates by this server and those that share its folder"
)
TEMPLATE_EVENTS = _gauge(
    "gfdit_template_events",
    "rank event",
    "",
    "Since a rank's process began: passes read (hits, misses), units kept, refused, damaged, loaded from disk and "
    "saved to it with their bytes and seconds, templates evicted",
)

SPANS = _counter(
    "gfdit_spans_total",
    "outcome",
    "spans",
    "Spans of traces that were exported, or dropped since the collector or the way to it was too slow or away",
)

METRICS: tuple[Metric, ...] = tuple([value for value in globals().values() if isinstance(value, Metric)])
