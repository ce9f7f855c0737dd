"""What a control process tells its engine for operators, about once a second: numbers and live requests."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec

from gfdit.observe.catalogue import Metric


class Series(msgspec.Struct, array_like=True, gc=False):
    """The number of one metric with these labels; of a histogram how many are in each bucket, and their sum."""

    metric: str
    labels: tuple[str, ...]
    values: list[float]


class RankNumbers(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of one rank. ``restarts`` counts since the server started, ``busy_s`` since the control process did."""

    up: bool
    gone: bool  # for good
    quarantined: bool
    restarts: int
    busy_s: float
    busy_ratio: float
    artifact_bytes: int
    component_bytes: int
    leaving: bool = False  # it is being drained by an operator
    drained: bool = False


class RequestState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A live request. ``task`` is the kind of what runs of it, ``ranks`` those it runs on, first the most; both
    are empty while it waits.

    ``left_s`` is what it has left at the degree it had last (at its narrowest before), ``left_rank_s`` the
    rank-seconds left at its narrowest; None where the cost model knows nothing. Running tasks count in full.
    ``deadline_s`` is a reading of CLOCK_MONOTONIC.
    """

    id: str
    model: str
    slo_class: str
    state: str
    task: str
    ranks: tuple[int, ...]
    steps_done: int
    num_steps: int
    deadline_s: float | None
    left_s: float | None
    left_rank_s: float | None


class Service(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What requests like this take on an idle machine, by number of ranks for their steps."""

    model: str
    size: str
    num_steps: int
    guidance: bool
    seconds: dict[int, float]


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """``sums`` are counters and histograms since control process ``epoch`` began, ``levels`` gauges.

    ``at_s`` is a reading of CLOCK_MONOTONIC, the same clock in every process.
    """

    epoch: int
    at_s: float
    ranks: list[RankNumbers] = []
    sums: list[Series] = []
    levels: list[Series] = []
    requests: list[RequestState] = []
    services: list[Service] = []
    policy: str = ""

    @property
    def num_gone(self) -> int:
        """Ranks that never serve again."""
        return sum([rank.gone for rank in self.ranks])


class Numbers:
    """Counters and histograms by metric and labels; not for several threads."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def of(self, metric: Metric, *labels: str) -> list[float]:
        """The values to change, as in :class:`Series`; zeros at first."""
        key = metric.name, labels
        if (values := self.values.get(key)) is None:
            values = self.values[key] = [0.0] * (len(metric.bounds) + 2 if metric.bounds else 1)
        return values

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        self.of(metric, *labels)[0] += amount

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        note(self.of(metric, *labels), metric.bounds, value)

    def series(self) -> list[Series]:
        return [Series(name, labels, list(values)) for (name, labels), values in self.values.items()]


def note(values: list[float], bounds: tuple[float, ...], value: float) -> None:
    """Count ``value`` in a histogram."""
    values[bisect_left(bounds, value)] += 1.0
    values[-1] += value


def note_all(values: list[float], bounds: tuple[float, ...], found: list[float]) -> None:
    """Count all of ``found``, which is sorted by this: quicker than one by one."""
    found.sort()
    before = 0
    for number, bound in enumerate(bounds):
        until = bisect_right(found, bound, before)
        values[number] += until - before
        before = until
    values[len(bounds)] += len(found) - before
    values[-1] += sum(found)


class Totals:
    """Sums over all control processes of a server, which each begin at zero: they never go back.

    What a control process counted after its last snapshot is lost with it.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._before: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self._now: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def take(self, epoch: int, series: list[Series]) -> None:
        """The whole of one control process; an older one's is ignored."""
        if epoch < self._epoch:
            return
        if epoch > self._epoch:
            self._before, self._now, self._epoch = self.values(), {}, epoch
        for one in series:
            self._now[one.metric, one.labels] = one.values

    def values(self) -> dict[tuple[str, tuple[str, ...]], list[float]]:
        summed = dict(self._before)
        for key, values in self._now.items():
            if (before := summed.get(key)) is not None:
                values = [a + b for a, b in zip(before, values, strict=True)]
            summed[key] = values
        return summed
