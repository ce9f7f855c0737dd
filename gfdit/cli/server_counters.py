"""What a server counted itself, beside what its client saw.

A server's counters are read from its ``/metrics`` before and after (the Prometheus text format); their differences
are compared with the replay. Whichever a server does not have is named, and nothing else follows from that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from gfdit.cli.replay import Outcome

Labels = Mapping[str, str]
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by name and labels."""

_LINE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'(?P<name>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPES = {"n": "\n"}  # any other character that is escaped stands for itself


@dataclass(frozen=True, slots=True)
class Agreement:
    """A figure as client and server have it. ``server`` is None where the server has no ``metric``."""

    figure: str
    metric: str
    client: float | None
    server: float | None

    @property
    def difference(self) -> float | None:
        """Of the server from the client, relative; None where that makes no sense."""
        if self.server is None or self.client is None:
            return None
        if self.client == 0:
            return 0.0 if self.server == 0 else None
        return self.server / self.client - 1


def read_samples(text: str) -> Samples:
    """Lines that are no samples are left out."""
    samples = {}
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        labels = {
            label["name"]: re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), label["value"])
            for label in _LABEL.finditer(found["labels"] or "")
        }
        try:
            samples[found["name"], frozenset(labels.items())] = float(found["value"])
        except ValueError:
            continue
    return samples


def agreements(before: Samples, after: Samples, outcomes: Sequence[Outcome]) -> list[Agreement]:
    """Every figure that client and server both have; a counter that is new in ``after`` began at 0."""
    figures = list(_FIGURES)
    for name in sorted({outcome.slo_class for outcome in outcomes if outcome.deadline_s is not None}):
        labels = {"slo_class": name}
        figures.append(_Figure(f"deadlines met, {name}", "gfdit_deadlines_met_total", labels, _num_met(name)))
    return [
        Agreement(figure.name, figure.metric, figure.of_client(outcomes), figure.of_server(before, after))
        for figure in figures
    ]


def as_json(rows: Sequence[Agreement]) -> list[dict[str, Any]]:
    return [
        {
            "figure": row.figure,
            "metric": row.metric,
            "client": row.client,
            "server": row.server,
            "difference": row.difference,
        }
        for row in rows
    ]


def describe(rows: Sequence[Agreement]) -> str:
    """A table of what could be compared, and a line on what could not."""
    compared = [row for row in rows if row.server is not None]
    absent = [row.metric for row in rows if row.server is None]
    lines = []
    if compared:
        width = max(len(row.figure) for row in compared)
        lines.append(f"{'client and server':<{width}} {'client':>12} {'server':>12} {'differ by':>10}  metric")
    for row in compared:
        client = "-" if row.client is None else f"{row.client:.6g}"
        differ = "-" if row.difference is None else f"{row.difference:+.2%}"
        lines.append(f"{row.figure:<{width}} {client:>12} {row.server:>12.6g} {differ:>10}  {row.metric}")
    if absent:
        lines.append(f"the server has no {', '.join(dict.fromkeys(absent))}")
    return "\n".join(lines)


def ranks_and_busy_ratio(before: Samples, after: Samples, window_s: float) -> tuple[int | None, float | None]:
    """Of a gfdit server: how many ranks it has, and the share of ``window_s`` that they were at tasks."""
    num_ranks = sum(name == "gfdit_rank_up" for name, _ in after)
    # Told about once a second: of a window of a few seconds the ratio is rough, and may be above 1.
    busy_s = _total("gfdit_rank_busy_seconds_total", {}, before, after)
    if not num_ranks:
        return None, None
    return num_ranks, None if busy_s is None else busy_s / (num_ranks * window_s)


def _total(name: str, labels: Labels, before: Samples, after: Samples) -> float | None:
    """By how much ``name`` grew, over all series with ``labels``; None without any series of that name."""
    series = [key for key in after if key[0] == name]
    found = [key for key in series if labels.items() <= dict(key[1]).items()]
    return sum(after[key] - before.get(key, 0.0) for key in found) if series else None


@dataclass(frozen=True, slots=True)
class _Figure:
    """``metric`` is a counter, of which the series with ``labels`` count, or with ``is_mean`` a histogram."""

    name: str
    metric: str
    labels: Labels
    of_client: Callable[[Sequence[Outcome]], float | None]
    is_mean: bool = False

    def of_server(self, before: Samples, after: Samples) -> float | None:
        if not self.is_mean:
            return _total(self.metric, self.labels, before, after)
        total, count = (_total(f"{self.metric}_{part}", self.labels, before, after) for part in ("sum", "count"))
        return total / count if total is not None and count else None


def _num_completed(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.completed for outcome in outcomes)


def _num_turned_away(outcomes: Sequence[Outcome]) -> float:
    away = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.TOO_MANY_REQUESTS)
    return sum(outcome.status in (*away, HTTPStatus.SERVICE_UNAVAILABLE) for outcome in outcomes)


def _num_met(slo_class: str) -> Callable[[Sequence[Outcome]], float]:
    return lambda outcomes: sum(
        outcome.met_deadline()
        for outcome in outcomes
        if outcome.slo_class == slo_class and outcome.deadline_s is not None
    )


def _num_answered(status_class: int) -> Callable[[Sequence[Outcome]], float]:
    return lambda outcomes: sum(outcome.status // 100 == status_class for outcome in outcomes)


def _mean_s(outcomes: Sequence[Outcome]) -> float | None:
    """From sending on: a server knows nothing of what was before."""
    found = [outcome.finish_s - outcome.sent_s for outcome in outcomes if outcome.completed]
    return sum(found) / len(found) if found else None


def _mean_answered_s(outcomes: Sequence[Outcome]) -> float | None:
    return _mean_s([replace(outcome, status=HTTPStatus.OK, error="") for outcome in outcomes if outcome.status])


_HTTP_REQUESTS, _HTTP_SECONDS = "http_requests_total", "http_request_duration_seconds"
_FIGURES = (
    *(
        _Figure(f"HTTP {kind}xx", _HTTP_REQUESTS, {"method": "POST", "status": f"{kind}xx"}, _num_answered(kind))
        for kind in (2, 4, 5)
    ),
    _Figure("completed", "vllm_omni:requests_success_total", {"finished_reason": "stop"}, _num_completed),
    _Figure("completed", "gfdit_requests_total", {"outcome": "completed"}, _num_completed),
    _Figure("turned away", "gfdit_requests_rejected_total", {}, _num_turned_away),
    _Figure("mean of answers, s", _HTTP_SECONDS, {"method": "POST"}, _mean_answered_s, is_mean=True),
    # Without what is done to the image once the engine has it: encoding it takes longer the larger it is.
    _Figure("mean latency, s", "vllm_omni:e2e_request_latency_s", {}, _mean_s, is_mean=True),
    _Figure("mean latency, s", "gfdit_request_seconds", {}, _mean_s, is_mean=True),
)
