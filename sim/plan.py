"""The fewest ranks that meet a target: a search over rank counts, each judged by simulation.

How sure an answer is has two sources. For a workload, traces of several seeds are simulated, and the bound is that
of a *prediction* interval: what the next trace, not the mean over all traces, does at the stated confidence. An
operator meets one trace at a time; a bound on the mean would be met by half of them. For a trace from a file there
is only the one: windows of its requests are drawn with replacement (a block bootstrap), whole windows because
requests that wait together are late together, and the bound is the quantile over such traces.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.bounds.work import narrowest_rank_s
from gfdit.sim.compare import Job, PolicyChoice, in_processes, simulate
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.options import SimulationOptions
from gfdit.sim.sweep import Grid, Point
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workloads import PATTERNS

NUM_RESAMPLES = 400
MAX_WINDOWS = 40
MIN_PER_WINDOW = 5  # requests; with fewer in it a window says little about waiting together

Kind = Literal["attainment", "mean_s", "p99_s"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """At least ``limit`` of the requests in time, or at most ``limit`` seconds of latency; of one class or all.

    Raises ``ValueError`` for a limit that is out of range.
    """

    kind: Kind
    limit: float
    slo_class: str | None = None

    def __post_init__(self) -> None:
        most = 1.0 if self.kind == "attainment" else math.inf
        if not 0 < self.limit <= most or math.isinf(self.limit):
            allowed = (
                "a share above 0 and up to 1" if self.kind == "attainment" else "a positive number of seconds"
            )
            raise ValueError(f"the target {self.kind} must be {allowed}, got {self.limit:g}")

    def __str__(self) -> str:
        of_class = "" if self.slo_class is None else f" of class {self.slo_class}"
        if self.kind == "attainment":
            return f"{self.limit:.1%} in time{of_class}"
        return f"{self.kind.removesuffix('_s')} latency{of_class} {self.limit:g} s"

    def values(self, requests: Sequence[Mapping[str, Any]], grace_s: float) -> NDArray[np.float64]:
        """One of each request of a result file that counts: 1 in time and 0 not, or seconds, ``inf`` if none."""
        of_class = [r for r in requests if self.slo_class in (None, r["class"])]
        latencies_s = [math.inf if r["latency_s"] is None else r["latency_s"] for r in of_class]
        if self.kind != "attainment":
            return np.array(latencies_s, dtype=float)
        allowed_s = [math.inf if r["deadline_s"] is None else r["deadline_s"] + grace_s for r in of_class]
        pairs = zip(latencies_s, allowed_s, strict=True)
        return np.array([s < math.inf and s <= most for s, most in pairs], dtype=float)

    def statistic(self, values: NDArray[np.float64]) -> float:
        if not len(values):
            return math.nan
        if self.kind == "p99_s":
            return float(np.percentile(values, 99, method="higher"))
        return float(values.mean())

    def holds(self, value: float) -> bool:
        """What has no requests of the class (``nan``) fails nobody."""
        return math.isnan(value) or (value >= self.limit if self.kind == "attainment" else value <= self.limit)


@dataclass(frozen=True)
class Demand:
    """What arrives: a workload at requests a minute (None: its own rate), by seed; or one ``trace`` as it is.

    ``arrivals`` multiplies the rate; a trace is compressed. The shapes and deadlines of a workload are of the
    times in ``drawn_with``, by default those of ``table``: on another machine the same is asked for.
    """

    table: CostTable
    workload: str = ""
    per_min: float | None = None
    trace: tuple[TraceRequest, ...] = ()
    arrivals: float = 1.0
    slo_scale: float = 1.0
    duration_s: float | None = None
    model: str | None = None
    num_steps: int | None = None
    drawn_with: CostTable | None = None

    def per_hour(self, seed: int) -> float:
        """Requests an hour in the sample of ``seed``; 0 if all come at once."""
        trace = self.sample(seed)
        span_s = trace[-1].arrival_s - trace[0].arrival_s
        return 3600 * len(trace) / span_s if span_s > 0 else 0.0

    def sample(self, seed: int) -> tuple[TraceRequest, ...]:
        """Raises ``ValueError`` for a workload that is unknown or that the table cannot serve."""
        if self.trace:
            return tuple(replace(line, arrival_s=line.arrival_s / self.arrivals) for line in self.trace)
        grid = Grid(
            self.drawn_with or self.table,
            (),
            (self.workload,),
            (seed,),
            SimulationOptions(1),
            model=self.model,
            num_steps=self.num_steps,
            duration_s=self.duration_s,
        )
        return grid.trace(Point(self.workload, per_min=self._per_min(), slo_scale=self.slo_scale), seed)

    def _per_min(self) -> float | None:
        if self.per_min is not None or self.arrivals == 1:
            return None if self.per_min is None else self.per_min * self.arrivals
        pattern = PATTERNS.get(self.workload)
        if pattern is None or not pattern.has_rate:
            raise ValueError(f"{self.workload} has no rate of its own: give the requests a minute")
        return pattern.num_expected / pattern.duration_s * 60 * self.arrivals


@dataclass(frozen=True)
class Study:
    """What is asked. ``confidence`` is how likely another trace like these meets every requirement by itself.

    Raises ``ValueError`` for too few seeds or a confidence that is no probability.
    """

    demand: Demand
    policies: tuple[PolicyChoice, ...]
    requirements: tuple[Requirement, ...]
    options: SimulationOptions
    seeds: tuple[int, ...] = tuple(range(10))
    confidence: float = 0.9
    grace_s: float = 0.0
    max_ranks: int = 256

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"the confidence must be at least 0.5 and below 1, got {self.confidence:g}")
        if not self.demand.trace and len(self.seeds) < 3:
            raise ValueError(f"a workload needs at least 3 seeds to be sure of anything, got {len(self.seeds)}")
        if not self.requirements:
            raise ValueError("a target is needed: a share of requests in time, or a latency")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one policy on so many ranks: by requirement the mean over traces, and the bound that has to hold.

    ``share_met`` is how many of the traces (or resampled traces) meet all requirements. Bounds of one trace of a
    workload are infinite: see :func:`judge`.
    """

    policy: str
    num_ranks: int
    means: tuple[float, ...]
    bounds: tuple[float, ...]
    share_met: float
    is_met: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """``num_ranks`` None: the target is not met on any number tried. ``verdicts`` by number of ranks."""

    policy: str
    num_ranks: int | None
    verdicts: Mapping[int, Verdict]


def plan(
    study: Study, *, num_processes: int = 1, on_done: Callable[[], object] = lambda: None
) -> tuple[Answer, ...]:
    """The fewest ranks of every policy; what is to be simulated for all at once is simulated in parallel.

    Raises ``ValueError`` for what the table cannot serve or a policy that cannot be loaded.
    """
    first = _least_ranks(study)
    found: dict[str, dict[int, Verdict]] = {policy.label: {} for policy in study.policies}
    searches = {policy.label: fewest(first, study.max_ranks) for policy in study.policies}
    wanted: dict[str, int] = {label: next(search) for label, search in searches.items()}
    answers: dict[str, int | None] = {}
    while wanted:
        asked = [(policy, wanted[policy.label]) for policy in study.policies if policy.label in wanted]
        for verdict in judge(study, asked, gives_up=True, num_processes=num_processes, on_done=on_done):
            found[verdict.policy][verdict.num_ranks] = verdict
            try:
                wanted[verdict.policy] = searches[verdict.policy].send(verdict.is_met)
            except StopIteration as end:
                answers[verdict.policy] = end.value
                del wanted[verdict.policy]
    return tuple(
        Answer(label, answers[label], {ranks: found[label][ranks] for ranks in sorted(found[label])})
        for label in found
    )


def fewest(first: int, most: int) -> Generator[int, bool, int | None]:
    """Yields numbers to try, is sent whether each is enough, returns the fewest that are; None if ``most`` is not.

    Doubles from ``first`` (at least 1) until one is enough, halves the gap, then goes down by one as long as one
    of the next two is enough: attainment nearly always grows with the ranks, but groups of ranks leave some over.
    """
    known: dict[int, bool] = {}
    enough = min(max(1, first), most)
    known[enough] = yield enough
    too_few = 0 if known[enough] else enough
    while not known[enough]:
        if enough == most:
            return None
        too_few, enough = enough, min(2 * enough, most)
        known[enough] = yield enough
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        known[middle] = yield middle
        enough, too_few = (middle, too_few) if known[middle] else (enough, middle)
    step = 1
    while step <= 2 and enough - step >= 1:
        below = enough - step
        if below not in known:
            known[below] = yield below
        enough, step = (below, 1) if known[below] else (enough, step + 1)
    return enough


def judge(
    study: Study,
    asked: Sequence[tuple[PolicyChoice, int]],
    *,
    gives_up: bool = False,
    num_processes: int = 1,
    on_done: Callable[[], object] = lambda: None,
) -> list[Verdict]:
    """Policies on numbers of ranks, each on every seed.

    With ``gives_up`` a trace that misses a share by so much that no others could make up for it is the only one:
    too few ranks take longest to simulate, because ever more requests wait.
    """
    seeds = study.seeds[:1] if study.demand.trace else study.seeds

    def simulated(pairs: Sequence[tuple[PolicyChoice, int]], on: Sequence[int]) -> list[list[NDArray[np.float64]]]:
        cases = [(policy, ranks, seed) for policy, ranks in pairs for seed in on]
        samples = in_processes(partial(_samples, study), cases, num_processes=num_processes, on_done=on_done)
        return [samples[at : at + len(on)] for at in range(0, len(samples), len(on))]

    samples = simulated(asked, seeds[:1] if gives_up else seeds)
    if gives_up and len(seeds) > 1:
        open_ = [index for index, (first,) in enumerate(samples) if not _misses_whatever_follows(study, first[0])]
        for index, more in zip(open_, simulated([asked[index] for index in open_], seeds[1:]), strict=True):
            samples[index] += more
    return [
        _verdict(study, policy.label, ranks, np.concatenate(own))
        for (policy, ranks), own in zip(asked, samples, strict=True)
    ]


def prediction_bound(values: Sequence[float], confidence: float, *, upper: bool) -> float:
    """What the next value of the same normal distribution is beyond with probability ``1 - confidence`` only.

    Student's t, one-sided: mean ± t s sqrt(1 + 1/n), from at least two values.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        return math.inf if upper else -math.inf
    num_values = len(array)
    width = float(t.ppf(confidence, num_values - 1)) * float(array.std(ddof=1)) * math.sqrt(1 + 1 / num_values)
    return float(array.mean()) + (width if upper else -width)


def bootstrap(
    values: Sequence[NDArray[np.float64]],
    requirements: Sequence[Requirement],
    windows: Sequence[NDArray[np.int64]],
    num_windows: int,
) -> NDArray[np.float64]:
    """Statistics of traces made of windows drawn with replacement: :data:`NUM_RESAMPLES` x requirements.

    ``values`` and ``windows`` have, by requirement, a value of each request and the window it arrived in. All
    requirements see the same draws. The draws are of a fixed seed.
    """
    draw = random.Random(0)
    parts = [
        [value[window == number] for number in range(num_windows)]
        for value, window in zip(values, windows, strict=True)
    ]
    rows = []
    for _ in range(NUM_RESAMPLES):
        drawn = [int(draw.random() * num_windows) for _ in range(num_windows)]
        rows.append(
            [
                requirement.statistic(np.concatenate([part[number] for number in drawn]))
                for requirement, part in zip(requirements, parts, strict=True)
            ]
        )
    return np.array(rows)


def up_to_degree(table: CostTable, degree: int) -> CostTable:
    """``table`` without the times of more than ``degree`` ranks.

    Raises ``ValueError`` if a model has none left.
    """
    entries = tuple(entry for entry in table.entries if entry.parallel.size <= degree)
    if lost := {entry.model for entry in table.entries} - {entry.model for entry in entries}:
        raise ValueError(f"model {min(lost)!r} has no times for {degree} ranks or fewer")
    return replace(table, entries=entries)


def _least_ranks(study: Study) -> int:
    """Where the search begins: what the work takes at the narrowest degrees, spread evenly."""
    trace = study.demand.sample(study.seeds[0])
    cost = TableCostModel(study.demand.table)
    work_s = sum(narrowest_rank_s(trace, cost, GraphBuilder(cost, study.max_ranks)).values())
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    return min(study.max_ranks, math.ceil(work_s / span_s)) if span_s > 0 else 1


def _samples(study: Study, case: tuple[PolicyChoice, int, int]) -> NDArray[np.float64]:
    """Traces x requirements: one trace of a seed, or many made of the only one."""
    policy, num_ranks, seed = case
    trace = study.demand.sample(seed)
    options = replace(study.options, num_ranks=num_ranks)
    outcome = simulate(Job(policy, trace, study.demand.table, options, study.grace_s))
    if outcome.complaint:
        raise ValueError(f"{policy.label} on {num_ranks} ranks: {outcome.complaint}")
    requests = outcome.result["requests"]
    values = [requirement.values(requests, study.grace_s) for requirement in study.requirements]
    if not study.demand.trace:
        return np.array([[r.statistic(v) for r, v in zip(study.requirements, values, strict=True)]])
    num_windows = max(1, min(MAX_WINDOWS, len(requests) // MIN_PER_WINDOW))
    start_s = requests[0]["arrival_s"]
    width_s = (requests[-1]["arrival_s"] - start_s) / num_windows or 1.0
    windows = []
    for requirement in study.requirements:
        arrivals_s = [r["arrival_s"] for r in requests if requirement.slo_class in (None, r["class"])]
        window = ((np.array(arrivals_s) - start_s) / width_s).astype(np.int64)
        windows.append(np.minimum(window, num_windows - 1))
    return bootstrap(values, study.requirements, windows, num_windows)


def _misses_whatever_follows(study: Study, first: NDArray[np.float64]) -> bool:
    """Whether, if in all other traces everything were in time, the bound of a share would still be too low."""
    others = len(study.seeds) - 1
    for requirement, value in zip(study.requirements, first.tolist(), strict=True):
        if requirement.kind != "attainment" or math.isnan(value):
            continue
        # Concave in what the others have, the bound is highest where they are alike, and linear there up to this
        # value, where it is the value, and from it on: the best is that, or all in time.
        bound = prediction_bound([value, *[1.0] * others], study.confidence, upper=False)
        if not requirement.holds(max(value, bound)):
            return True
    return False


def _verdict(study: Study, policy: str, num_ranks: int, samples: NDArray[np.float64]) -> Verdict:
    means, bounds = [], []
    for requirement, values in zip(study.requirements, samples.T, strict=True):
        known = values[~np.isnan(values)]
        if not len(known):
            raise ValueError(f"no request is of class {requirement.slo_class!r}")
        means.append(float(known.mean()))
        bounds.append(_bound(requirement, known, study))
    met = [all(r.holds(v) for r, v in zip(study.requirements, row, strict=True)) for row in samples]
    is_met = all(r.holds(bound) for r, bound in zip(study.requirements, bounds, strict=True))
    return Verdict(policy, num_ranks, tuple(means), tuple(bounds), sum(met) / len(met), is_met)


def _bound(requirement: Requirement, values: NDArray[np.float64], study: Study) -> float:
    is_share = requirement.kind == "attainment"
    if study.demand.trace:
        # An order statistic, not a value between two: one of them may be infinite.
        if is_share:
            return float(np.quantile(values, 1 - study.confidence, method="lower"))
        return float(np.quantile(values, study.confidence, method="higher"))
    if len(values) < 2:
        return -math.inf if is_share else math.inf
    if is_share:
        return prediction_bound(values.tolist(), study.confidence, upper=False)
    # Latencies are skewed to the right: their logarithms less so.
    with np.errstate(divide="ignore"):
        return math.exp(prediction_bound(np.log(values).tolist(), study.confidence, upper=True))
