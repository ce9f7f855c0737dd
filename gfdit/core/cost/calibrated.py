"""What cost models share: reference times, corrected by the times measured online."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from gfdit.core.bounded import AnswerCache
from gfdit.core.cost import UnknownCostError
from gfdit.core.cost.calibration import Calibration, Measured
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec, widest
from gfdit.core.policy import RequestView, TaskView
from gfdit.core.tasks import Shape, TaskKind

MAX_ANSWERS = 16384
"""Of each kind that are remembered, in 5 MB: about 1000 sizes at four degrees each."""

UNMASKED_SHARE = 0.05
"""Of a step's time, what a mask does not make less, where a table does not say; measurements correct it, too."""


class CostKey(NamedTuple):
    """What a time depends on."""

    model: str
    kind: TaskKind
    shape: Shape
    cfg: bool
    parallel: ParallelSpec
    batch: int


class CalibratedCostModel:
    """A :class:`~gfdit.core.cost.CostModel`: reference times, corrected by the times measured online.

    With ``skips_steps`` some steps take much less than others, and a time is what one takes on average.
    Subclasses give the reference times and say how far a measurement carries.
    """

    trusted_count = 3  # measurements before they correct a reference: the first ones are warm-up

    def __init__(self, *, skips_steps: bool = False) -> None:
        self._calibration = Calibration(takes_mean=skips_steps)
        self._version = 0
        self._references: dict[tuple[Any, ...], tuple[float, tuple[Hashable, ...]]] = {}  # seconds, levels
        self._seconds: dict[tuple[Any, ...], float] = {}  # corrected; emptied when a correction changes
        # What to say where there is no reference at any shape, by a key without one.
        self._missing: AnswerCache[tuple[Any, ...], str] = AnswerCache(MAX_ANSWERS)
        self._candidates: AnswerCache[tuple[Any, ...], tuple[ParallelSpec, ...]] = AnswerCache(MAX_ANSWERS)
        self._specs: AnswerCache[tuple[Any, ...], ParallelSpec] = AnswerCache(MAX_ANSWERS)

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_entries(self) -> int:
        """How much is remembered: of a server that runs for long it has an upper bound, whatever is asked for."""
        num_times = len(self._references) + len(self._missing) + len(self._seconds)
        return len(self._calibration) + num_times + len(self._candidates) + len(self._specs)

    @property
    def measured(self) -> Mapping[Hashable, Measured]:
        """Count, ratio to the reference and spread of what was measured, by :class:`CostKey`."""
        return self._calibration.measured

    def task_s(self, task: TaskView, layout: ExecutionLayout, batch: int = 1) -> float:
        key = (task.model, task.kind, task.shape, task.cfg, layout.parallel, batch)
        return self._corrected_s(key, task.request_id)

    def remaining_s(self, request: RequestView, layout: ExecutionLayout) -> float:
        """Times of all unfinished tasks, a running one in full; steps and decoding take ``layout.parallel``."""
        total_s = 0.0
        left = request.parts or {(request.model, kind): count for kind, count in request.tasks_left.items()}
        for (model, kind), count in left.items():
            if count:
                spec = self._spec(request, kind, layout)
                key = (model, kind, request.shape, request.cfg, spec, 1)
                total_s += count * self._corrected_s(key, request.id)
        return total_s

    def candidates(self, task: TaskView) -> tuple[ParallelSpec, ...]:
        return self._known_of(task.model, task.kind, task.cfg, task.candidates, task.shape, task.request_id)

    def migration_s(self, task: TaskView, layout: ExecutionLayout) -> float:
        return 0.0

    def observe(self, task: TaskView, layout: ExecutionLayout, seconds: float, batch: int = 1) -> None:
        key = (task.model, task.kind, task.shape, task.cfg, layout.parallel, batch)
        try:
            reference_s, levels = self._reference(key, task.request_id)
        except UnknownCostError:
            return
        for level in levels:
            if self._calibration.add(level, seconds / reference_s, self.trusted_count):
                self._seconds.clear()
                self._version += 1

    def _corrected_s(self, key: tuple[Any, ...], request_id: str) -> float:
        if (seconds := self._seconds.get(key)) is None:
            seconds, levels = self._reference(key, request_id)
            for level in levels:
                if (ratio := self._calibration.ratio(level, self.trusted_count)) is not None:
                    seconds *= ratio
                    break
            self._seconds[key] = seconds
        return seconds

    def _reference(self, key: tuple[Any, ...], request_id: str) -> tuple[float, tuple[Hashable, ...]]:
        if (reference := self._references.get(key)) is None:
            setting = key[:2] + key[3:]
            if setting in self._missing:  # policies ask which batch sizes are known
                raise UnknownCostError(self._missing[setting], request_id)
            if len(self._references) >= MAX_ANSWERS:
                self._references.clear()
                self._seconds.clear()  # its keys are among those
            asked = CostKey(*key)
            whole = asked._replace(shape=asked.shape.whole)
            if asked.kind is not TaskKind.DENOISE:  # others compute all
                asked = whole
            unmasked = self._unmasked_share(asked.model)
            part = unmasked + (1 - unmasked) * asked.shape.computed_percent / 100  # FlashPS §4.4
            try:
                reference = self._references[key] = (part * self._reference_s(whole), self._levels(asked))
            except UnknownCostError as error:
                if not self._has_time(whole):
                    self._missing[setting] = str(error)
                raise UnknownCostError(str(error), request_id) from None
        return reference

    def _spec(self, request: RequestView, kind: TaskKind, layout: ExecutionLayout) -> ParallelSpec:
        """The layout's specification; for a task that cannot take it, the widest that is not wider."""
        wanted = layout.parallel
        if kind is TaskKind.DENOISE:
            offered = request.candidates
        elif kind is TaskKind.DECODE and len(request.decode_candidates) > 1:
            specs = request.decode_candidates
            offered = self._known_of(request.model, kind, request.cfg, specs, request.shape, request.id)
        else:
            return SINGLE
        if (spec := self._specs.get((wanted, offered))) is None:
            spec = wanted if wanted in offered else widest(offered, wanted.size) or offered[0]
            self._specs[wanted, offered] = spec
        return spec

    def _known_of(
        self,
        model: str,
        kind: TaskKind,
        cfg: bool,
        candidates: tuple[ParallelSpec, ...],
        shape: Shape,
        request_id: str,
    ) -> tuple[ParallelSpec, ...]:
        """Those of ``candidates`` that have a time, narrowest first."""
        key = (model, kind, cfg, candidates)
        if (known := self._candidates.get(key)) is None:
            specs = sorted(candidates, key=lambda spec: (spec.size, spec.sp))
            keys = [CostKey(model, kind, shape, cfg, spec, 1) for spec in specs]
            if not (known := tuple(each.parallel for each in keys if self._has_time(each))):
                raise UnknownCostError(self._unknown(keys[0]), request_id)
            self._candidates[key] = known
        return known

    def _reference_s(self, key: CostKey) -> float:
        """Raises :class:`UnknownCostError` where there is none."""
        raise NotImplementedError

    def _unmasked_share(self, model: str) -> float:
        """Of a step's time, what is left as a mask gets small."""
        return UNMASKED_SHARE

    def _has_time(self, key: CostKey) -> bool:
        """Whether there is a time for ``key``, at some shape."""
        return True

    def _unknown(self, key: CostKey) -> str:
        """What to say where there is none."""
        raise NotImplementedError

    def _levels(self, key: CostKey) -> tuple[Hashable, ...]:
        """What a measurement under ``key`` is recorded as, the closest first."""
        return (key,)
