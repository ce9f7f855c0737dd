"""A simulation in numbers: the result file, and the table people read."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gfdit.sim.simulator import SimulatedRequest, SimulationRun, Status

_Z95 = 1.959964  # quantile of the normal distribution at 97.5 %


def summarize(
    run: SimulationRun, *, grace_s: float = 0.0, narrowest_rank_s: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The result file. Raises ``ValueError`` for a run without requests.

    Attainment divides by submitted requests: one that was starved, failed or rejected is a miss. Latencies
    are of completed requests, None without any. Throughput counts completed requests from the first arrival to the
    end of the last request, ``rank_busy_ratio`` execution from the first task's start to the last one's end.

    ``narrowest_rank_s`` has, by request, the rank-seconds of all its tasks at their narrowest degrees. What
    completed requests took beyond that is ``rank_widening_ratio``, the part of ``rank_busy_ratio`` that
    parallelism cost; None without.
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
        "rank_widening_ratio": _widening_ratio(run, narrowest_rank_s),
        "migrations": run.num_migrations,
        "per_class": {
            name: _numbers([request for request in requests if request.trace.slo_class == name], grace_s)
            for name in classes
        },
        "requests": [_request(request) for request in requests],
    }


def _widening_ratio(run: SimulationRun, narrowest_rank_s: Mapping[str, float] | None) -> float | None:
    """Of requests that did not complete nobody knows what their tasks would have taken: they widen nothing."""
    if narrowest_rank_s is None:
        return None
    if not run.num_tasks:
        return 0.0
    done = [request for request in run.requests if request.status is Status.COMPLETED]
    # A batch takes less than its tasks one by one: that is no negative widening.
    wide_s = sum(max(0.0, request.rank_seconds - narrowest_rank_s[request.trace.id]) for request in done)
    return wide_s / (run.num_ranks * (run.last_end_s - run.first_start_s))


def percentile_interval(values: Sequence[float], percent: float) -> tuple[float, float] | None:
    """95 % confidence interval of a percentile, without an assumption on the distribution.

    Between two order statistics, whose ranks follow from the binomial distribution of how many values are below
    the percentile (its normal approximation, rounded outwards). None where there are too few values to have an
    upper end. Values count as independent: latencies of one trace are not, so this is the least that is unknown.
    """
    share, num_values = percent / 100, len(values)
    middle, half = num_values * share, _Z95 * math.sqrt(num_values * share * (1 - share))
    low, high = math.floor(middle - half), math.ceil(middle + half)
    if high >= num_values or low < 0:
        return None
    ordered = np.sort(np.asarray(values, dtype=float))
    return float(ordered[low]), float(ordered[high])


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
        **{f"p{percent}_latency_ci95_s": percentile_interval(latencies_s, percent) for percent in (50, 95, 99)},
    }


def _request(request: SimulatedRequest) -> dict[str, Any]:
    return {
        "id": request.trace.id,
        "class": request.trace.slo_class,
        "arrival_s": request.trace.arrival_s,
        "deadline_s": request.trace.deadline_s,
        "status": str(request.status),
        "finish_s": request.end_s if request.status is Status.COMPLETED else None,
        "latency_s": request.latency_s,
        "met_deadline": request.met_deadline(),
        "rank_seconds": request.rank_seconds,
    }


def write_requests_csv(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """A row per policy and request, with the fields of the result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = [{"policy": name, **request} for name, result in results.items() for request in result["requests"]]
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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
    wide = result["rank_widening_ratio"]
    last = (
        f"policy {result['policy']}, {result['ranks']} ranks: {result['throughput_rps']:.3f} requests/s, "
        f"ranks busy {result['rank_busy_ratio']:.1%}{'' if wide is None else f' ({wide:.1%} for widening)'}, "
        f"{result['migrations']} migrations"
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
