"""What `gfdit profile` measures, one cell after the other, until the medians are known well enough."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gfdit.cli.http_requests import mask_of
from gfdit.cli.profile_server import ProfileServer, Wanted, script_between, script_on
from gfdit.core import ParallelSpec, Shape, TaskKind
from gfdit.core.cost.table import CostKey
from gfdit.core.events import RequestArrived
from gfdit.core.layouts import SINGLE
from gfdit.observe.samples import median_error, typical

STEPS_PER_REQUEST = 6
# In a mix, so that steps take most of the time, as they do in a server, and few ranks are idle at the end.
STEPS_IN_MIX = 12
PASSES = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """A median is good enough once its standard error is below ``spread``, relative to it.

    At least ``min_reps`` measurements are made, and no more once there are ``max_reps``. With ``busy`` the ranks
    that a layout leaves free run the same tasks and those of the other shapes, as in a server under load.
    """

    spread: float
    min_reps: int
    max_reps: int
    busy: bool

    def __post_init__(self) -> None:
        if not 0 < self.spread < 1:
            raise ValueError(f"--spread must be between 0 and 1, got {self.spread}")
        if not 2 <= self.min_reps <= self.max_reps:
            raise ValueError(
                f"--min-reps must be at least 2 and at most --max-reps, got {self.min_reps} and {self.max_reps}"
            )

    def suffices(self, values: Sequence[float]) -> bool:
        enough = len(values) >= self.min_reps and median_error(values) <= self.spread
        return enough or len(values) >= self.max_reps


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request the model knows: the shape it makes of the one asked for, guidance, and its tasks.

    ``parallel`` are the specifications of each task.
    """

    shape: Shape
    cfg: bool
    model: str
    parallel: Mapping[TaskKind, tuple[ParallelSpec, ...]]

    @classmethod
    def of(cls, arrived: RequestArrived) -> Kind:
        request, tasks = arrived.request, arrived.graph.tasks
        return cls(request.shape, request.cfg, request.model, {task.kind: task.candidates for task in tasks})

    def tasks_at(self, parallel: ParallelSpec) -> tuple[TaskKind, ...]:
        """The tasks that can take ``parallel``."""
        return tuple(task for task, specs in self.parallel.items() if parallel in specs)

    def key(self, task: TaskKind, parallel: ParallelSpec = SINGLE, batch: int = 1) -> CostKey:
        return CostKey(self.model, task, self.shape, self.cfg, parallel, batch)

    def keys(self, batches: Iterable[int]) -> list[CostKey]:
        """Everything there is to measure of it."""
        others = [
            self.key(task, spec)
            for task, specs in self.parallel.items()
            if task is not TaskKind.DENOISE
            for spec in specs
        ]
        denoise = TaskKind.DENOISE
        steps = [self.key(denoise, spec, batch) for spec in self.parallel[denoise] for batch in batches]
        return [*others, *steps]


class Profiler:
    """Measures cells with ``server``, which has ``num_ranks`` ranks."""

    def __init__(self, server: ProfileServer, num_ranks: int, effort: Effort) -> None:
        self.server = server
        self.num_ranks = num_ranks
        self.effort = effort
        self._rng = random.Random(0)

    def explore(self, shape: Shape, cfg: bool) -> Kind | None:
        """Send such a request through every rank, which also warms them up; None if the model has no guidance."""
        scripts = [script_on((rank,), SINGLE) for rank in range(self.num_ranks)]
        kind = Kind.of(self.server.run([Wanted(shape, cfg, 2, script) for script in scripts])[0])
        self.forget(kind)
        return kind if kind.cfg == cfg else None

    def forget(self, kind: Kind) -> None:
        """Drop what has been measured of ``kind``: the first time is always slow."""
        for key in kind.keys((1,)):
            self.server.samples.task_s.pop(key, None)

    def measure(self, keys: Sequence[CostKey], kinds: Sequence[Kind]) -> Iterator[CostKey]:
        """Keys of ``kinds`` in the order in which the effort suffices for them.

        Busy ranks are measured all at once, one degree after the other, batched steps and idle ranks one by one.
        """
        mixed = [key for key in keys if self.effort.busy and key.batch == 1]
        for parallel in dict.fromkeys(key.parallel for key in mixed):
            yield from self._measure_mix([key for key in mixed if key.parallel == parallel], kinds)
        for key in keys:
            if key not in mixed:
                self._measure_alone(key)
                yield key

    def _measure_mix(self, keys: Sequence[CostKey], kinds: Sequence[Kind]) -> Iterator[CostKey]:
        """Requests of all kinds follow each other on every group of ranks, in an order of its own.

        What a task takes depends on what its neighbours do, where ranks share memory bandwidth, power or cores.
        """
        left = list(keys)
        while left:
            self.run_mix(keys[0].parallel, kinds)
            done = [key for key in left if self.effort.suffices(self._seconds(key))]
            left = [key for key in left if key not in done]
            yield from done

    def run_mix(self, parallel: ParallelSpec, kinds: Sequence[Kind]) -> None:
        """Some requests of every kind that can run at ``parallel``, on all ranks."""
        kinds = [kind for kind in kinds if kind.tasks_at(parallel)]
        groups = list(self._groups(parallel.size))
        queues = [self._rng.sample(kinds * PASSES, len(kinds) * PASSES) for _ in groups]
        self.server.run(
            [
                Wanted(
                    kind.shape, kind.cfg, STEPS_IN_MIX, script_on(ranks, parallel, tasks=kind.tasks_at(parallel))
                )
                for turn in zip(*queues, strict=True)
                for kind, ranks in zip(turn, groups, strict=True)
            ]
        )

    def _measure_alone(self, key: CostKey) -> None:
        scripts = [
            script_on(ranks, key.parallel, key.batch, (key.kind,))
            for ranks in self._groups(key.parallel.size)
            for _ in range(key.batch)
        ]
        num_steps = STEPS_PER_REQUEST if key.kind is TaskKind.DENOISE else 1
        while not self.effort.suffices(self._seconds(key)):
            self.server.run([Wanted(key.shape, key.cfg, num_steps, script) for script in scripts])

    def measure_copies(self, kind: Kind) -> None:
        """Requests that change ranks at every step, as many as fit."""
        pairs = [(first, first + 1) for first in range(0, self.num_ranks - 1, 2)]
        scripts = [script_between(*pair) for pair in (pairs if self.effort.busy else pairs[:1])]
        for _ in range(0, self.effort.min_reps, len(scripts)):
            self.server.run([Wanted(kind.shape, kind.cfg, STEPS_PER_REQUEST, script) for script in scripts])

    def measure_mask(self, kind: Kind, mask_ratio: float) -> tuple[float, float]:
        """Of edits with about so much under a mask, in rows of tokens: the share, and seconds of a step."""
        mask, mask_ratio = mask_of(kind.shape.width, kind.shape.height, mask_ratio)
        scripts = [script_on((rank,), SINGLE) for rank in range(self.num_ranks if self.effort.busy else 1)]
        wanted = [Wanted(kind.shape, kind.cfg, STEPS_IN_MIX, script) for script in scripts]
        self.server.run(wanted[:1], mask)  # warms up
        seconds: list[float] = []
        while not self.effort.suffices(seconds):
            for arrived in self.server.run(wanted, mask):
                seconds += self.server.samples.steps_s[arrived.request.id][1:]  # the first one computes all
        return mask_ratio, typical(seconds)

    def _seconds(self, key: CostKey) -> list[float]:
        return self.server.samples.task_s.get(key, [])

    def _groups(self, size: int) -> Iterator[tuple[int, ...]]:
        last = self.num_ranks if self.effort.busy else size
        for first in range(0, last - size + 1, size):
            yield tuple(range(first, first + size))
