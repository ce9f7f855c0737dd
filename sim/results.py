"""A simulation in numbers: the result file, and the table people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gfdit.sim.simulator import SimulatedRequest, SimulationRun, Status


def summarize(run: SimulationRun, *, grace_s: float = 0.0) -> dict[str, Any]:
    """The result file. Raises ``ValueError`` for a run without requests.

    Attainment divides by submitted requests: one that was starved, failed or rejected is a miss. Latencies
    are of completed requests, None without any. Throughput counts completed requests from the first arrival to the
    end of the last request, ``rank_busy_ratio`` execution from the first task's start to the last one's end.
    """
    requests = run.requests
    if not requests:
        raise ValueError("the trace has no requests")
    ends_s = [request.end_s for request in requests if request.end_s is not None]
    window_s = max(ends_s) - min(request.trace.arrival_s for request in requests) if ends_s else 0.0
    numbers = _numbers(requests, grace_s)
    busy_s = sum(request.rank_seconds for request in requests)
    ran_s = run.last_end_s - run.first_start_s
    classes = sorted({request.trace.slo_class for request in requests})
    return {
        "policy": run.policy,
        "ranks": run.num_ranks,
        **numbers,
        "throughput_rps": numbers["num_completed"] / window_s if window_s > 0 else 0.0,
        "rank_busy_ratio": busy_s / (run.num_ranks * ran_s) if run.num_tasks else 0.0,
        "migrations": run.num_migrations,
        "per_class": {
            name: _numbers([request for request in requests if request.trace.slo_class == name], grace_s)
            for name in classes
        },
        "requests": [_request(request) for request in requests],
    }


def _numbers(requests: Sequence[SimulatedRequest], grace_s: float) -> dict[str, Any]:
    latencies_s = [request.latency_s for request in requests if request.latency_s is not None]

    def percentile(percent: float) -> float | None:
        return float(np.percentile(latencies_s, percent)) if latencies_s else None

    return {
        "num_requests": len(requests),
        "num_completed": len(latencies_s),
        "num_rejected": sum(request.status is Status.REJECTED for request in requests),
        "slo_attainment": sum(request.met_deadline() for request in requests) / len(requests),
        "slo_attainment_grace": sum(request.met_deadline(grace_s) for request in requests) / len(requests),
        "mean_latency_s": sum(latencies_s) / len(latencies_s) if latencies_s else None,
        "p50_latency_s": percentile(50),
        "p95_latency_s": percentile(95),
        "p99_latency_s": percentile(99),
    }


def _request(request: SimulatedRequest) -> dict[str, Any]:
    return {
        "id": request.trace.id,
        "finish_s": request.end_s if request.status is Status.COMPLETED else None,
        "latency_s": request.latency_s,
        "met_deadline": request.met_deadline(),
        "rank_seconds": request.rank_seconds,
    }


_COLUMNS = (
    ("requests", "num_requests", "d"),
    ("completed", "num_completed", "d"),
    ("rejected", "num_rejected", "d"),
    ("in time", "slo_attainment", ".1%"),
    ("with grace", "slo_attainment_grace", ".1%"),
    ("mean s", "mean_latency_s", ".2f"),
    ("p50 s", "p50_latency_s", ".2f"),
    ("p95 s", "p95_latency_s", ".2f"),
    ("p99 s", "p99_latency_s", ".2f"),
)


def describe(result: dict[str, Any]) -> str:
    """The result as a table, one row per class, for a terminal."""
    classes = result["per_class"]
    rows = {name: classes[name] for name in classes} if len(classes) > 1 else {}
    rows["all"] = result
    last = (
        f"policy {result['policy']}, {result['ranks']} ranks: {result['throughput_rps']:.3f} requests/s, "
        f"ranks busy {result['rank_busy_ratio']:.1%}, {result['migrations']} migrations"
    )
    return f"{as_table('class', rows)}\n{last}"


def as_table(heading: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Results, or their parts per class, a row each."""
    width = max(len(heading), *map(len, rows))
    lines = [" ".join([f"{heading:<{width}}", *(f"{title:>10}" for title, _, _ in _COLUMNS)])]
    for name, numbers in rows.items():
        cells = [f"{_cell(numbers[field], form):>10}" for _, field, form in _COLUMNS]
        lines.append(" ".join([f"{name:<{width}}", *cells]))
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
