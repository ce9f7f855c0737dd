"""Runs once, before serving, everything that serving will run: no client waits for what is compiled or allocated.

That is every kind of task, at every degree and batch size, and copies between layouts. The engine has the ranks
run one item after the other, the most used ones first, until the time for it is over.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from vllm_omni.diffusion.request import OmniDiffusionRequest

from gfdit.adapters.base import Artifact, TaskCall
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.commands import Migrate
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec
from gfdit.core.policy.estimates import MAX_BATCH
from gfdit.core.tasks import Shape, Task, TaskGraph, TaskKind, with_candidates, with_min_sp
from gfdit.core.tiling import decode_candidates
from gfdit.migration.codec import ArtifactCodec
from gfdit.migration.parts import ArtifactParts
from gfdit.migration.transfer import migrate
from gfdit.omni.rehearsal import rehearse

if TYPE_CHECKING:
    from gfdit.omni.executor import OmniExecutor


@dataclass(frozen=True, slots=True)
class WarmUp:
    """``requests``: without and with guidance, of one size. ``limit_s``: no item begins later than that.

    Steps are run at ``min_sp`` and wider.
    """

    requests: tuple[OmniDiffusionRequest, ...]
    sequence_parallel: bool
    limit_s: float
    min_sp: int = 1


@dataclass(frozen=True, slots=True)
class Item:
    """Something that all ranks run at the same time, each in a group of its own."""

    name: str
    num_requests: int = 1


OUT_OF_MEMORY = "out of memory"


@dataclass
class WarmUpRun:
    """One rank's side: artifacts and what can be made of them. ``alone``: without what takes several ranks."""

    executor: OmniExecutor
    what: WarmUp
    alone: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    _artifacts: list[dict[str, Artifact]] = field(default_factory=list)  # by request
    _shapes: list[tuple[Shape, bool]] = field(default_factory=list)  # by request, and whether it is guided

    def __post_init__(self) -> None:
        self._items: dict[Item, Callable[[], None]] = dict(self._plan())

    @property
    def items(self) -> list[Item]:
        """The most used ones first. Those of several ranks are the same, in the same order, on every rank."""
        return list(self._items)

    def run(self, item: Item) -> float | str:
        """Seconds that it took here, or :data:`OUT_OF_MEMORY` if a batch is too large: others go on."""
        start_s = time.monotonic()
        try:
            self._items[item]()
        except torch.OutOfMemoryError:
            if item.num_requests == 1:
                raise
            return OUT_OF_MEMORY
        self.seconds[item.name] = time.monotonic() - start_s
        return self.seconds[item.name]

    def run_all(self) -> None:
        """Without an engine that says what comes next."""
        end_s = time.monotonic() + self.what.limit_s
        for item in self.items:
            if time.monotonic() < end_s:
                self.run(item)

    # What there is to run

    def _plan(self) -> Iterator[tuple[Item, Callable[[], None]]]:
        if self.executor.runner.num_compiled_blocks:
            yield Item("compilation"), self._compile
        graphs: list[TaskGraph] = []
        guided = set()
        for request in self.what.requests:
            trajectory = self.executor.adapter.convert(request, None if self.what.sequence_parallel else 1)
            if trajectory.cfg in guided:  # what is asked for makes no difference to this model
                break
            guided.add(trajectory.cfg)
            decode_specs = decode_candidates(self.executor.runner.tiling, trajectory.shape, self._num_ranks)
            wide = with_min_sp(trajectory.graph, self.what.min_sp)
            graphs.append(with_candidates(wide, TaskKind.DECODE, decode_specs))
            self._shapes.append((trajectory.shape, trajectory.cfg))
            self._artifacts.append({})
        names = ["", " guided"][: len(graphs)]
        steps = []
        for index, (graph, suffix) in enumerate(zip(graphs, names, strict=True)):
            steps += [(index, task, suffix) for task in graph.tasks if task.kind is TaskKind.DENOISE][:1]
        for index, (graph, suffix) in enumerate(zip(graphs, names, strict=True)):
            for kind in dict.fromkeys(task.kind for task in graph.tasks):
                tasks = [task for task in graph.tasks if task.kind is kind]
                if index == 0 or kind is not TaskKind.DECODE:  # which knows nothing of guidance
                    name = self._name(tasks[0], tasks[0].candidates[0])
                    yield Item(name + suffix), partial(self._run_narrow, index, tasks)
        if not self.alone:
            wide_tasks = [*steps, (0, graphs[0].tasks[-1], "")]
            yield from self._wide(wide_tasks)
            sizes = {spec.size for _, task, _ in wide_tasks for spec in task.candidates} - {1}
            for size in sorted(sizes, key=_rarity):
                index, step, _ = steps[0]
                yield Item(f"migration to {size}"), partial(self._migrate, index, step, size)
        if self.executor.adapter.batches:
            yield from self._batches(steps)

    def _wide(self, tasks: list[tuple[int, Task, str]]) -> Iterator[tuple[Item, Callable[[], None]]]:
        """Further degrees of tasks, given with the index of their request and what their names end with."""
        found = [(spec, index, task, suffix) for index, task, suffix in tasks for spec in task.candidates[1:]]
        for spec, index, task, suffix in sorted(found, key=lambda one: (_rarity(one[0].size), one[0].cfg, one[1])):
            yield Item(self._name(task, spec) + suffix), partial(self._run, index, [task], spec)

    def _batches(self, steps: list[tuple[int, Task, str]]) -> Iterator[tuple[Item, Callable[[], None]]]:
        """Policies batch where a request is on few ranks."""
        specs = {spec for _, step, _ in steps for spec in step.candidates}
        for spec in sorted(specs, key=lambda spec: (_rarity(spec.size), spec.cfg)):
            if self.alone and spec != SINGLE:
                continue
            for size in sorted(range(2, MAX_BATCH + 1), key=_rarity):
                for index, step, suffix in steps:
                    if spec in step.candidates:
                        name = f"{self._name(step, spec)} x{size}{suffix}"
                        yield Item(name, size), partial(self._run, index, [step] * size, spec)

    @staticmethod
    def _name(task: Task, spec: ParallelSpec) -> str:
        if task.kind is TaskKind.DENOISE:
            return str(spec)
        return str(task.kind) if spec == SINGLE else f"{task.kind} {spec}"

    # Running it

    @property
    def _num_ranks(self) -> int:
        return self.executor.comm.world_size

    def _compile(self) -> None:
        """Each rank by itself, for all degrees: what it runs with others then compiles nothing."""
        for request in self.what.requests:
            rehearse(self.executor, request, self.what.sequence_parallel or self.alone)

    def _run_narrow(self, index: int, tasks: list[Task]) -> None:
        """All of a kind, one after the other, on as few ranks as can be."""
        for task in tasks:
            self._run(index, [task], task.candidates[0])

    def _run(self, index: int, tasks: list[Task], spec: ParallelSpec) -> None:
        """``tasks``, of one kind, as one dispatch; nothing on a rank that has no group, or no inputs for it."""
        ranks = _own_group(self.executor.rank, spec.size, self._num_ranks)
        artifacts = self._artifacts[index]
        if ranks is None or (self.alone and spec != SINGLE):
            return
        if not all(name in artifacts for task in tasks for name in task.inputs):
            return
        calls = []
        for number, task in enumerate(tasks):
            # Copies, because a step consumes its input and every degree starts from the same one.
            inputs = tuple([copy.deepcopy(artifacts[name]) for name in task.inputs])
            request = None if inputs else self.what.requests[index]
            calls.append(TaskCall(replace(task, id=f"{task.id}#{number}"), inputs, request))
        outputs = self.executor.run(calls, ExecutionLayout(ranks, spec))
        self.executor.note_memory(tasks[0].kind, *self._shapes[index], spec, len(calls))
        if spec == tasks[0].candidates[0]:
            artifacts.update(zip(tasks[0].outputs, outputs[0].artifacts, strict=True))

    def _migrate(self, index: int, step: Task, size: int) -> None:
        """What ``step`` reads from the first rank of each group of ``size`` to the others."""
        executor = self.executor
        ranks = _own_group(executor.rank, size, self._num_ranks)
        if ranks is None:
            return
        target, held = ExecutionLayout(ranks, ParallelSpec(size)), {ranks[0]: ExecutionLayout(ranks[:1])}
        for name in step.inputs:
            if name not in self._artifacts[index]:
                continue
            artifact, codec = self._artifacts[index][name], executor.adapter.codec(name)
            view = codec.view(artifact)
            plan = plan_transfers(view, held, target)
            command = Migrate(
                0, step.request_id, name, plan.ranks, plan.transfers, target, tuple(held.items()), view
            )
            export = partial(_packed, codec, artifact, held[ranks[0]])
            arrived = migrate(executor.comm.lane("migration"), command, export, executor.device)
            if arrived is not None:
                codec.unpack(arrived.parts, executor.device)


def _packed(codec: ArtifactCodec, artifact: Artifact, layout: ExecutionLayout) -> ArtifactParts:
    parts = codec.pack(artifact)
    parts.layout = layout
    return parts


def _rarity(number: int) -> tuple[bool, int]:
    """Powers of two first."""
    return bool(number & (number - 1)), number


def _own_group(rank: int, size: int, world_size: int) -> tuple[int, ...] | None:
    """The consecutive group of ``size`` this rank falls in, None for a remainder too small to form one."""
    first = rank // size * size
    return tuple(range(first, first + size)) if first + size <= world_size else None
