"""Requests as graphs of trajectory tasks and the artifacts between them (GF-DiT paper, section 3)."""

from __future__ import annotations

from collections.abc import Container
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gfdit.core.layouts import SINGLE, ParallelSpec


class TaskKind(StrEnum):
    """The kinds of trajectory task, one ``DENOISE`` task per denoising step.

    ``CONTROL`` is what another net (a ControlNet) computes for one such step, ``REQUEST`` all of a request.
    """

    ENCODE = "encode"
    PREPARE = "prepare"
    CONTROL = "control"
    DENOISE = "denoise"
    DECODE = "decode"
    REQUEST = "request"


class Shape(NamedTuple):
    """Size of what a request generates, in pixels and frames, and how many of it: images or videos of one prompt.

    ``computed_percent`` of its tokens are computed in a denoising step, on average: an edit under a mask may leave
    some out (FlashPS §3.1). A tuple as :class:`ParallelSpec` is.
    """

    height: int
    width: int
    num_frames: int = 1
    num_outputs: int = 1
    computed_percent: int = 100

    @property
    def whole(self) -> Shape:
        """Of a request that leaves nothing out."""
        return self if self.computed_percent == 100 else self._replace(computed_percent=100)

    @property
    def size(self) -> tuple[int, int, int]:
        """Height, width and frames of one output."""
        return self[:3]

    @property
    def num_tokens(self) -> int:
        """Nominal length of all sequences: 16 x 16 pixels a token, four frames a latent frame.

        Models differ by a constant factor, so this is a scale to interpolate costs on, not a tensor size.
        """
        latent_frames = (self.num_frames - 1) // 4 + 1
        return max(1, latent_frames * (self.height // 16) * (self.width // 16)) * self.num_outputs

    def __str__(self) -> str:
        frames = f"x{self.num_frames}" if self.num_frames > 1 else ""
        number = f"{self.num_outputs} times " if self.num_outputs > 1 else ""
        part = f" at {self.computed_percent}%" if self.computed_percent < 100 else ""
        return f"{number}{self.height}x{self.width}{frames}{part}"


class Request(Struct, frozen=True, gc=False):
    """What the control plane knows of a request; prompts and tensors stay outside.

    ``arrival_s`` and ``deadline_s`` are absolute, on the clock whose readings are handed to the control
    plane. A larger ``priority`` is more urgent. ``cfg`` says whether both guidance branches are computed.
    """

    id: str
    model: str
    shape: Shape
    num_steps: int
    arrival_s: float
    cfg: bool = False
    deadline_s: float | None = None
    priority: int = 0
    slo_class: str = "default"


class Task(Struct, frozen=True, gc=False):
    """One schedulable unit: reads ``inputs``, makes ``outputs`` (artifact ids).

    What is in ``deferred`` it reads on its way: it may begin once the tasks that make that run, on other
    ranks. ``component`` is what has to be loaded on its ranks, by default the request's model. ``node`` says to
    workers which call of which workflow it is.
    """

    id: str
    request_id: str
    kind: TaskKind
    step_index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    candidates: tuple[ParallelSpec, ...] = (SINGLE,)
    deferred: tuple[str, ...] = ()
    component: str = ""
    node: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """All of them, the deferred ones last."""
        return (*self.inputs, *self.deferred) if self.deferred else self.inputs


class TaskGraph(Struct, frozen=True, gc=False):
    """The tasks of one request, a directed acyclic graph in topological order.

    A task is ready once every input is materialized; the request is complete once every task has finished.
    """

    request_id: str
    tasks: tuple[Task, ...]

    def check(self) -> None:
        """Raise ``ValueError`` unless every input is made by exactly one earlier task.

        What a task reads while it is made, no other one reads.
        """
        made: set[str] = set()
        streamed: set[str] = set()
        read: set[str] = set()
        ids: set[str] = set()
        for task in self.tasks:
            if task.id in ids or task.request_id != self.request_id:
                raise ValueError(f"task {task.id} is repeated or belongs to another request")
            ids.add(task.id)
            if not made.issuperset(task.reads):
                missing = next(name for name in task.reads if name not in made)
                raise ValueError(f"task {task.id} reads {missing}, which no earlier task makes")
            if streamed and not streamed.isdisjoint(task.reads):
                again = next(name for name in task.reads if name in streamed)
                raise ValueError(f"task {task.id} reads {again}, which another one reads while it is made")
            if task.deferred:
                if not read.isdisjoint(task.deferred):
                    again = next(name for name in task.deferred if name in read)
                    raise ValueError(
                        f"task {task.id} reads {again} while it is made, and another one reads it, too"
                    )
                streamed.update(task.deferred)
            read.update(task.inputs)
            if not made.isdisjoint(task.outputs):
                again = next(name for name in task.outputs if name in made)
                raise ValueError(f"task {task.id} makes {again} a second time")
            made.update(task.outputs)
        if not self.tasks:
            raise ValueError(f"request {self.request_id} has no tasks")
        if len({not task.component for task in self.tasks}) > 1:
            raise ValueError(f"request {self.request_id} has tasks with and without a component")


def artifact_kind(request_id: str, artifact: str) -> str:
    """``"latents"`` for ``r1/latents/7``: artifacts of one kind are alike in size."""
    return artifact.removeprefix(f"{request_id}/").partition("/")[0]


def trajectory(
    request_id: str,
    num_steps: int,
    denoise_candidates: tuple[ParallelSpec, ...],
    *,
    prepare: bool = True,
    decode_candidates: tuple[ParallelSpec, ...] = (SINGLE,),
) -> TaskGraph:
    """The usual diffusion trajectory: encode, prepare, ``num_steps`` denoising steps, decode.

    ``conditioning`` is made once and only read; ``latents/i`` is the state before step ``i`` and is consumed
    by that step. With ``prepare=False`` encoding also makes the initial latents (pipelines that fuse both).
    """

    conditioning = f"{request_id}/conditioning"
    latents = [f"{request_id}/latents/{step}" for step in range(num_steps + 1)]
    encode = f"{request_id}/encode"
    if prepare:
        tasks = [
            Task(encode, request_id, TaskKind.ENCODE, 0, (), (conditioning,)),
            Task(f"{request_id}/prepare", request_id, TaskKind.PREPARE, 0, (conditioning,), (latents[0],)),
        ]
    else:
        tasks = [Task(encode, request_id, TaskKind.ENCODE, 0, (), (conditioning, latents[0]))]
    denoise, prefix = TaskKind.DENOISE, f"{request_id}/denoise/"
    for step in range(num_steps):
        reads, writes = (conditioning, latents[step]), (latents[step + 1],)
        tasks.append(Task(f"{prefix}{step}", request_id, denoise, step, reads, writes, denoise_candidates))
    reads = (conditioning, latents[num_steps])
    tasks.append(Task(f"{request_id}/decode", request_id, TaskKind.DECODE, 0, reads, (), decode_candidates))
    return TaskGraph(request_id, tuple(tasks))


def whole_request(request_id: str) -> TaskGraph:
    """One task on one rank: of a model that cannot be stopped on its way."""
    return TaskGraph(request_id, (Task(f"{request_id}/request", request_id, TaskKind.REQUEST, 0, (), ()),))


def with_encoder(graph: TaskGraph, name: str, readers: Container[TaskKind]) -> TaskGraph:
    """``graph`` with one more encode task, ``encode_<name>``, for an input of the request's own.

    It reads nothing, so it may run beside the others; every task of a kind in ``readers`` reads its artifact,
    ``<name>``, after its other inputs.
    """
    request_id, artifact = graph.request_id, f"{graph.request_id}/{name}"
    tasks = [Task(f"{request_id}/encode_{name}", request_id, TaskKind.ENCODE, 0, (), (artifact,))]
    for task in graph.tasks:
        inputs = (*task.inputs, artifact) if task.kind in readers else task.inputs
        step, outputs, candidates = task.step_index, task.outputs, task.candidates
        tasks.append(Task(task.id, request_id, task.kind, step, inputs, outputs, candidates))
    return TaskGraph(request_id, tuple(tasks))


def with_min_sp(graph: TaskGraph, min_sp: int) -> TaskGraph:
    """``graph`` with denoising steps of at least that sequence-parallel degree.

    Raises ``ValueError`` saying which degrees there are if none is left.
    """
    tasks = []
    for task in graph.tasks:
        specs = task.candidates
        if task.kind is TaskKind.DENOISE:
            specs = tuple(spec for spec in specs if spec.sp >= min_sp)
            if not specs:
                degrees = ", ".join(map(str, sorted({spec.sp for spec in task.candidates})))
                raise ValueError(
                    f"min_sp is {min_sp}, but the sequence-parallel degrees of this request are {degrees}"
                )
        tasks.append(replace(task, candidates=specs))
    return TaskGraph(graph.request_id, tuple(tasks))


def with_candidates(graph: TaskGraph, kind: TaskKind, candidates: tuple[ParallelSpec, ...]) -> TaskGraph:
    """``graph`` with other specifications to choose from for tasks of ``kind``."""
    tasks = []
    for task in graph.tasks:
        tasks.append(replace(task, candidates=candidates) if task.kind is kind else task)
    return TaskGraph(graph.request_id, tuple(tasks))
