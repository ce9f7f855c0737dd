"""A replay as numbers, in the shape of a simulation result as far as a client can know it."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import numpy as np

from gfdit.cli.replay import Outcome


def summarize(outcomes: Sequence[Outcome], *, label: str, grace_s: float = 0.0) -> dict[str, Any]:
    """Attainment divides by submitted requests: one that failed or was refused is a miss.

    Latencies are of completed requests, None without any. Throughput counts completed requests from the
    first arrival to the last answer.
    """
    if not outcomes:
        raise ValueError("the trace has no requests")
    completed = [outcome for outcome in outcomes if outcome.completed]
    window_s = max(o.finish_s for o in outcomes) - min(o.arrival_s for o in outcomes)
    classes = sorted({outcome.slo_class for outcome in outcomes})
    return {
        "policy": label,
        **_numbers(outcomes, grace_s),
        "num_rejected": sum(outcome.status == HTTPStatus.TOO_MANY_REQUESTS for outcome in outcomes),
        "throughput_rps": len(completed) / window_s,
        "per_class": {
            name: _numbers([outcome for outcome in outcomes if outcome.slo_class == name], grace_s)
            for name in classes
        },
        "requests": [_request(outcome) for outcome in outcomes],
    }


def _numbers(outcomes: Sequence[Outcome], grace_s: float) -> dict[str, Any]:
    latencies_s = [outcome.latency_s for outcome in outcomes if outcome.completed]

    def percentile(percent: float) -> float | None:
        return float(np.percentile(latencies_s, percent)) if latencies_s else None

    return {
        "num_requests": len(outcomes),
        "num_completed": len(latencies_s),
        "slo_attainment": sum(outcome.met_deadline() for outcome in outcomes) / len(outcomes),
        "slo_attainment_grace": sum(outcome.met_deadline(grace_s) for outcome in outcomes) / len(outcomes),
        "mean_latency_s": float(np.mean(latencies_s)) if latencies_s else None,
        "p50_latency_s": percentile(50),
        "p95_latency_s": percentile(95),
        "p99_latency_s": percentile(99),
    }


def _request(outcome: Outcome) -> dict[str, Any]:
    return {
        "id": outcome.id,
        "finish_s": outcome.finish_s if outcome.completed else None,
        "latency_s": outcome.latency_s if outcome.completed else None,
        "met_deadline": outcome.met_deadline(),
        "status": outcome.status,
        "error": outcome.error,
    }
