"""Fit the arrivals of ``production-images`` to GenTD26's log: ``python tools/fit_arrivals.py LOG.csv``.

LOG.csv is lora_request_trace.csv of github.com/alibaba/clusterdata, cluster-trace-v2026-GenAI. Only parameters
that are printed here go into ``sim/workloads.py``. Fitted are text-to-image requests 0 to 2,999 and 22,000 on, in
order of time.
``--judge`` compares with the 19,000 between them as well, which nothing was chosen by.

Sessions are requests of one group, less than ten minutes apart: their number an hour, the number of requests in
them (by maximum likelihood) and the gaps within them are read off. The rate at which sessions begin is not: its
spread and its memory are those with which simulated windows of as many requests have the same burstiness, by least
squares over the logarithms of :class:`gfdit.sim.burstiness.Burstiness`.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice, pairwise
from statistics import fmean, median, pstdev

from scipy.optimize import minimize  # type: ignore[import-untyped]

from gfdit.sim.arrivals import arrival_times
from gfdit.sim.burstiness import burstiness
from gfdit.sim.sessions import Sessions

FIRST_JUDGED, END_JUDGED = 3000, 22_000
WINDOW = 2700  # requests of a simulated window, about as many as in each part that is fitted
SESSION_ENDS_S = 600.0
SCRIPT_GAP_S = 10.0  # with a smaller median gap than that a session is a script's
SIGMAS = (1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1)
MEMORIES_H = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
SEEDS = range(60)
OTHER_SEEDS = range(1000, 1100)  # for the table
LEAST = 0.01  # of a correlation, so that there is a logarithm
Numbers = dict[str, float]


@dataclass(frozen=True, slots=True)
class LogRow:
    at_s: float
    group: str
    num_steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", metavar="LOG.csv")
    parser.add_argument("--judge", action="store_true", help="also against the requests that were left alone")
    args = parser.parse_args()
    rows = read(args.log)
    parts = [rows[:FIRST_JUDGED], rows[END_JUDGED:]]
    fitted = fit(parts)
    print(f"{fitted}\n")
    print(f"steps: {steps_mix([row for part in parts for row in part])}\n")
    logged = [numbers([row.at_s for row in part]) for part in parts]
    cv = fmean(one["gap CV"] for one in logged)
    simulated = windows(fitted.arrival_times, OTHER_SEEDS)
    columns = {
        "log, 0-2999": logged[0],
        "log, 22000-": logged[1],
        "generator": middle(simulated),
        "10 %": middle(simulated, 0.1),
        "90 %": middle(simulated, 0.9),
        f"gamma renewal, CV {cv:.1f}": middle(windows(renewal(parts, cv), OTHER_SEEDS)),
    }
    found = []
    if args.judge:
        judged = rows[FIRST_JUDGED:END_JUDGED]
        kept = [judged[start : start + WINDOW] for start in range(0, len(judged) - WINDOW + 1, WINDOW)]
        found = [numbers([row.at_s for row in window]) for window in kept]
        columns |= {
            f"judged, {len(kept)} windows": middle(found),
            "least": middle(found, 0.0),
            "most": middle(found, 1.0),
        }
    print("|".join(["measure", *columns]))
    for name in logged[0]:
        print("|".join([name, *(f"{column[name]:.2f}" for column in columns.values())]))
    judges = middle(found) if args.judge else geometric(logged)
    for name, column in columns.items():
        errors = error(column, geometric(logged)), error(column, judges)
        print(f"{name}: error {errors[0]:.2f} to what was fitted, {errors[1]:.2f} to what judges")


def read(path: str) -> list[LogRow]:
    """Text-to-image requests, in order of time; without those whose number of steps is missing."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [
            LogRow(
                datetime.fromisoformat(row["gmt_create"]).replace(tzinfo=UTC).timestamp(),
                row["groupId"],
                int(float(row["num_inference_steps"])),
            )
            for row in csv.DictReader(file)
            if row["predict_type"] == "TXT_2_IMG" and row["num_inference_steps"]
        ]
    return sorted(rows, key=lambda row: row.at_s)


def fit(parts: Sequence[Sequence[LogRow]]) -> Sessions:
    sessions = [session for part in parts for session in sessions_of(part)]
    hours = sum(part[-1].at_s - part[0].at_s for part in parts) / 3600
    scripts = [one for one in sessions if len(one) > 3 and median(gaps(one)) < SCRIPT_GAP_S]
    people = [one for one in sessions if one not in scripts]
    shape, scale = size_of_sessions([len(one) for one in people])
    gap_s, gap_sigma = log_normal([gap for one in people for gap in gaps(one)])
    script_gap_s, script_gap_sigma = log_normal([gap for one in scripts for gap in gaps(one)])
    start = Sessions(
        per_hour=round(len(sessions) / hours, 2),
        rate_sigma=SIGMAS[0],
        rate_memory_s=3600 * MEMORIES_H[0],
        size_shape=round(shape, 2),
        size_scale=round(scale, 2),
        gap_s=round(gap_s, 1),
        gap_sigma=round(gap_sigma, 2),
        script_share=round(len(scripts) / len(sessions), 4),
        script_size=round(fmean(map(len, scripts)), 1),
        script_gap_s=round(script_gap_s, 2),
        script_gap_sigma=round(script_gap_sigma, 2),
    )
    target = geometric([numbers([row.at_s for row in part]) for part in parts])
    choices = [
        replace(start, rate_sigma=sigma, rate_memory_s=3600 * memory_h)
        for sigma in SIGMAS
        for memory_h in MEMORIES_H
    ]
    errors = {}
    for one in choices:
        errors[one] = error(middle(windows(one.arrival_times, SEEDS)), target)
        print(f"sigma {one.rate_sigma}, memory {one.rate_memory_s / 3600:g} h: {errors[one]:.3f}", flush=True)
    return min(choices, key=errors.__getitem__)


def sessions_of(rows: Sequence[LogRow]) -> Iterator[list[float]]:
    by_group: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row.at_s)
    for times_s in by_group.values():
        session = times_s[:1]
        for at_s in times_s[1:]:
            if at_s - session[-1] > SESSION_ENDS_S:
                yield session
                session = []
            session.append(at_s)
        yield session


def gaps(session: Sequence[float]) -> list[float]:
    """A second is as short as the log's clock can say: half of one where it says none."""
    return [max(0.5, after - before) for before, after in pairwise(session)]


def log_normal(values: Sequence[float]) -> tuple[float, float]:
    """Median and standard deviation of the logarithm."""
    logs = list(map(math.log, values))
    return math.exp(fmean(logs)), pstdev(logs)


def size_of_sessions(sizes: Sequence[int]) -> tuple[float, float]:
    """Shape and scale of a Lomax distribution, rounded up to whole numbers, by maximum likelihood."""
    counts = Counter(sizes)

    def loss(logs: Sequence[float]) -> float:
        shape, scale = map(math.exp, logs)
        above = {size: (1 + (size - 1) / scale) ** -shape for size in {*counts, *(size + 1 for size in counts)}}
        return -sum(count * math.log(above[size] - above[size + 1]) for size, count in counts.items())

    shape, scale = minimize(loss, [1.0, 1.5], method="Nelder-Mead").x
    return math.exp(shape), math.exp(scale)


def steps_mix(rows: Sequence[LogRow]) -> list[tuple[int, float]]:
    """Those that one request in 500 has, or more."""
    counts = Counter(row.num_steps for row in rows)
    return [
        (steps, round(count / len(rows), 3)) for steps, count in counts.most_common() if count * 500 >= len(rows)
    ]


def renewal(parts: Sequence[Sequence[LogRow]], cv: float) -> Callable[[random.Random], Iterator[float]]:
    """What has the log's rate and variation of gaps, and nothing else of it."""
    per_s = sum(map(len, parts)) / sum(part[-1].at_s - part[0].at_s for part in parts)
    return lambda draw: arrival_times([(1e9, per_s)], draw, cv)


def windows(arrivals: Callable[[random.Random], Iterator[float]], seeds: Sequence[int]) -> list[Numbers]:
    return [numbers(list(islice(arrivals(random.Random(seed)), WINDOW))) for seed in seeds]


def numbers(arrivals_s: Sequence[float]) -> Numbers:
    return burstiness(arrivals_s).numbers()


def middle(found: Sequence[Numbers], quantile: float = 0.5) -> Numbers:
    """Of each number by itself."""
    ordered = {name: sorted(one[name] for one in found) for name in found[0]}
    return {
        name: median(values) if quantile == 0.5 else values[round(quantile * (len(values) - 1))]
        for name, values in ordered.items()
    }


def geometric(found: Sequence[Numbers]) -> Numbers:
    return {name: math.exp(fmean(math.log(max(LEAST, one[name])) for one in found)) for name in found[0]}


def error(one: Numbers, other: Numbers) -> float:
    """Root mean square of the logarithms of their ratios."""
    return math.sqrt(fmean(math.log(max(LEAST, one[name]) / max(LEAST, other[name])) ** 2 for name in one))


if __name__ == "__main__":
    main()
