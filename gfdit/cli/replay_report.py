"""A replay as numbers: the result file of a simulation, as far as a client can know it, and what only it can."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import numpy as np

from gfdit.cli.replay import Outcome
from gfdit.sim.results import served_numbers
from gfdit.sim.simulator import Status

NEGLIGIBLE_LATENESS_S = 0.01
NEGLIGIBLE_LATENESS_RATIO = 0.05  # of the median latency
# Metrics and units as `vllm bench serve` names them.
METRICS = {
    "e2el": lambda outcome: outcome.finish_s - outcome.sent_s,
    "e2el_including_client_queue": lambda outcome: outcome.latency_s,
    "client_queue_time": lambda outcome: outcome.queued_s,
}
MS_PER_S = 1e3


def summarize(
    outcomes: Sequence[Outcome], *, label: str, grace_s: float = 0.0, loop_lag_s: float | None = None
) -> dict[str, Any]:
    """The result file. Raises ``ValueError`` for a replay without requests.

    Attainment divides by submitted requests: one that failed or was refused is a miss. Latencies are of completed
    requests, None without any. Throughput counts completed requests from the first arrival to the last answer,
    goodput those of them that met their deadlines.
    What only the server knows is None: ranks, how busy they were, migrations.
    """
    if not outcomes:
        raise ValueError("the trace has no requests")
    window_s = max(o.finish_s for o in outcomes) - min(o.arrival_s for o in outcomes)
    classes = sorted({outcome.slo_class for outcome in outcomes})
    return {
        "policy": label,
        "ranks": None,
        **_numbers(outcomes, grace_s, window_s),
        "throughput_rps": sum(outcome.completed for outcome in outcomes) / window_s,
        "rank_busy_ratio": None,
        "rank_widening_ratio": None,
        "migrations": None,
        "duration_s": window_s,
        "errors": _errors(outcomes),
        "client": _client(outcomes, loop_lag_s),
        "per_class": {
            name: _numbers([outcome for outcome in outcomes if outcome.slo_class == name], grace_s, window_s)
            for name in classes
        },
        "requests": [_request(outcome) for outcome in outcomes],
    }


def percentile_metrics(
    outcomes: Sequence[Outcome], metrics: Sequence[str], percents: Sequence[float]
) -> dict[str, float]:
    """Mean, median, deviation and ``percents`` of ``METRICS`` in ms, by the names of ``vllm bench serve``.

    Of completed requests; empty without any.
    """
    completed = [outcome for outcome in outcomes if outcome.completed]
    if not completed:
        return {}
    found: dict[str, float] = {}
    for name in metrics:
        values_ms = [MS_PER_S * METRICS[name](outcome) for outcome in completed]
        found[f"mean_{name}_ms"] = float(np.mean(values_ms))
        found[f"median_{name}_ms"] = float(np.median(values_ms))
        found[f"std_{name}_ms"] = float(np.std(values_ms))
        for percent in percents:
            found[f"p{percent:g}_{name}_ms"] = float(np.percentile(values_ms, percent))
    return found


def _numbers(outcomes: Sequence[Outcome], grace_s: float, window_s: float) -> dict[str, Any]:
    num_met = sum(outcome.met_deadline() for outcome in outcomes)
    numbers = served_numbers(
        [outcome.latency_s for outcome in outcomes if outcome.completed],
        num_requests=len(outcomes),
        num_rejected=sum(_status(outcome) is Status.REJECTED for outcome in outcomes),
        num_met=num_met,
        num_met_grace=sum(outcome.met_deadline(grace_s) for outcome in outcomes),
    )
    return numbers | {"goodput_rps": num_met / window_s}


def _status(outcome: Outcome) -> Status:
    if outcome.completed:
        return Status.COMPLETED
    return Status.REJECTED if outcome.status == HTTPStatus.TOO_MANY_REQUESTS else Status.FAILED


def _errors(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """By HTTP status and sentence, the most frequent first. Sentences that differ in numbers are one kind."""
    kinds: Counter[tuple[int, str]] = Counter()
    sentences: dict[tuple[int, str], str] = {}
    for outcome in outcomes:
        if outcome.error:
            kind = (outcome.status, re.sub(r"\d+(\.\d+)?", "#", outcome.error))
            kinds[kind] += 1
            sentences.setdefault(kind, outcome.error)
    return [
        {"http_status": kind[0], "error": sentences[kind], "count": count} for kind, count in kinds.most_common()
    ]


def _client(outcomes: Sequence[Outcome], loop_lag_s: float | None) -> dict[str, Any]:
    """How late requests left the client, and whether that shows in what was measured."""
    lateness_s = [outcome.lateness_s for outcome in outcomes]
    latencies_s = [outcome.latency_s for outcome in outcomes if outcome.completed]
    p99_s = float(np.percentile(lateness_s, 99))
    part_s = NEGLIGIBLE_LATENESS_RATIO * float(np.median(latencies_s)) if latencies_s else 0.0
    return {
        "mean_lateness_s": float(np.mean(lateness_s)),
        "p99_lateness_s": p99_s,
        "max_lateness_s": max(lateness_s),
        "max_loop_lag_s": loop_lag_s,
        "was_bottleneck": p99_s > max(NEGLIGIBLE_LATENESS_S, part_s),
    }


def _request(outcome: Outcome) -> dict[str, Any]:
    return {
        "id": outcome.id,
        "class": outcome.slo_class,
        "arrival_s": outcome.arrival_s,
        "deadline_s": outcome.deadline_s,
        "status": str(_status(outcome)),
        "finish_s": outcome.finish_s if outcome.completed else None,
        "latency_s": outcome.latency_s if outcome.completed else None,
        "met_deadline": outcome.met_deadline(),
        "rank_seconds": None,
        "sent_s": outcome.sent_s,
        "queued_s": outcome.queued_s,
        "http_status": outcome.status,
        "error": outcome.error,
    }
