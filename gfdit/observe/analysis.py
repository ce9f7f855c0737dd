"""Questions asked of a timeline. Pure functions over its spans; migrations are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from gfdit.observe.timeline import MIGRATE, Span


@dataclass(frozen=True, slots=True)
class Moment:
    """What ran at one instant: each request with the ranks it held."""

    at_s: float
    ranks_of: dict[str, frozenset[int]]


def busiest_moment(spans: Iterable[Span]) -> Moment:
    """The first instant with the most requests running, each on ranks that no other request held."""
    best = Moment(0.0, {})
    running: list[Span] = []
    by_start = sorted(_tasks(spans), key=lambda span: span.start_s)
    for at_s, starting in groupby(by_start, key=lambda span: span.start_s):
        running = [span for span in running if span.end_s > at_s] + list(starting)
        ranks_of: dict[str, frozenset[int]] = {}
        for span in running:
            ranks_of[span.request] = ranks_of.get(span.request, frozenset()) | {span.rank}
        disjoint = sum(map(len, ranks_of.values())) == len(frozenset().union(*ranks_of.values()))
        if disjoint and len(ranks_of) > len(best.ranks_of):
            best = Moment(at_s, ranks_of)
    return best


def degree_history(spans: Iterable[Span], request: str) -> list[tuple[int, int]]:
    """The sequence-parallel degrees of a request's denoising steps, as (first step, degree) of each run."""
    degrees = {span.step: span.sp for span in spans if span.request == request and span.kind == "denoise"}
    runs = groupby(sorted(degrees.items()), key=lambda item: item[1])
    return [(next(steps)[0], degree) for degree, steps in runs]


def find_degree_change(spans: Sequence[Span], wanted: Sequence[int]) -> str | None:
    """The first request whose degrees contain ``wanted``, e.g. (1, 2, 4), one right after the other."""
    for request in dict.fromkeys(span.request for span in spans):
        degrees = [degree for _, degree in degree_history(spans, request)]
        width = len(wanted)
        if any(degrees[i : i + width] == list(wanted) for i in range(len(degrees))):
            return request
    return None


def match_requests(spans: Iterable[Span], finished: Sequence[tuple[str, int]]) -> dict[str, str]:
    """The server's request ids with the client's, which a server does not learn.

    ``finished`` has the client's ids and numbers of denoising steps in the order the answers came. Requests
    with as many steps are paired in the order they ended; one that the client does not know is left out.
    """
    last_end_s: dict[str, float] = {}
    steps: dict[str, set[int]] = {}
    for span in _tasks(spans):
        last_end_s[span.request] = max(span.end_s, last_end_s.get(span.request, span.end_s))
        done = steps.setdefault(span.request, set())
        if span.kind == "denoise":
            done.add(span.step)
    waiting: dict[int, list[str]] = {}
    for name, num_steps in finished:
        waiting.setdefault(num_steps, []).append(name)
    matched = {}
    for request in sorted(last_end_s, key=lambda request: last_end_s[request]):
        if names := waiting.get(len(steps[request])):
            matched[request] = names.pop(0)
    return matched


def time_by_part(spans: Iterable[Span], request: str) -> dict[str, float]:
    """Seconds a request spent in tasks of each kind, and "between tasks" from its first task to its last.

    A task lasts from the first of its ranks to begin to the last one to end.
    """
    tasks: dict[str, list[Span]] = {}
    for span in _tasks(spans):
        if span.request == request:
            tasks.setdefault(span.task, []).append(span)
    times = [
        (members[0].kind, min(span.start_s for span in members), max(span.end_s for span in members))
        for members in tasks.values()
    ]
    parts: dict[str, float] = {}
    for kind, start_s, end_s in times:
        parts[kind] = parts.get(kind, 0.0) + end_s - start_s
    if times:
        window_s = max(end_s for _, _, end_s in times) - min(start_s for _, start_s, _ in times)
        parts["between tasks"] = window_s - sum(parts.values())
    return parts


@dataclass(frozen=True, slots=True)
class Boundary:
    """One rank between two consecutive tasks of a request on one layout: ``before`` and ``after``."""

    before: Span
    after: Span

    @property
    def idle_s(self) -> float:
        """How long the rank did nothing, from the end of one task to the start of the next."""
        return self.after.start_s - self.before.end_s


def boundaries(spans: Iterable[Span]) -> list[Boundary]:
    """Where a denoising step follows the one before on the same ordered ranks, with nothing between."""
    found = []
    by_rank: dict[int, Span] = {}
    for span in sorted(_tasks(spans), key=lambda span: span.start_s):
        before, by_rank[span.rank] = by_rank.get(span.rank), span
        if (
            before is not None
            and (before.request, before.kind, before.ranks, before.sp)
            == (span.request, "denoise", span.ranks, span.sp)
            and (span.kind, span.step) == ("denoise", before.step + 1)
        ):
            found.append(Boundary(before, span))
    return found


def rank_busy_ratio(spans: Iterable[Span], num_ranks: int) -> float:
    """Share of the ranks' time, from the first task's start to the last one's end, that ran tasks."""
    tasks = _tasks(spans)
    if not tasks:
        return 0.0
    window_s = max(span.end_s for span in tasks) - min(span.start_s for span in tasks)
    return sum(span.duration_s for span in tasks) / (window_s * num_ranks)


def _tasks(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.kind != MIGRATE]
