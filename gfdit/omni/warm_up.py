"""Runs every kind of task once at every degree, so that nothing is compiled or allocated first while serving."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

from vllm_omni.diffusion.request import OmniDiffusionRequest

from gfdit.adapters.base import Artifact, TaskCall
from gfdit.core.layouts import SINGLE, ExecutionLayout
from gfdit.core.tasks import Task, TaskKind, with_candidates
from gfdit.core.tiling import decode_candidates
from gfdit.omni.rehearsal import rehearse

if TYPE_CHECKING:
    from gfdit.omni.executor import OmniExecutor


def warm_up(
    executor: OmniExecutor, request: OmniDiffusionRequest, sequence_parallel: bool, by_itself: bool = False
) -> dict[str, float]:
    """All ranks call this together; each is in one group of every size. Returns seconds by specification.

    A rank can do it ``by_itself``, but for what takes several ranks.
    """
    if executor.runner.num_compiled_blocks:
        rehearse(executor, request, sequence_parallel or by_itself)
    trajectory = executor.adapter.convert(request, None if sequence_parallel else 1)
    num_ranks = executor.comm.world_size
    decode = decode_candidates(executor.runner.tiling, trajectory.shape, num_ranks)
    graph = with_candidates(trajectory.graph, TaskKind.DECODE, decode)
    artifacts: dict[str, Artifact] = {}
    seconds: dict[str, float] = {}

    def run(task: Task, layout: ExecutionLayout) -> None:
        start_s = time.monotonic()
        # Copies, because a step consumes its input and every degree starts from the same one.
        inputs = tuple(copy.deepcopy(artifacts[name]) for name in task.inputs)
        (output,) = executor.run([TaskCall(task, inputs, None if inputs else request)], layout)
        artifacts.update(zip(task.outputs, output.artifacts, strict=True))
        label = str(layout.parallel) if task.kind is TaskKind.DENOISE else str(task.kind)
        if task.kind is TaskKind.DECODE and layout.parallel != SINGLE:
            label = f"{label} {layout.parallel}"
        seconds[label] = time.monotonic() - start_s

    for task in graph.tasks:
        if task.kind is TaskKind.DENOISE and task.step_index > 1:
            continue
        # The second step goes on from where every rank has the first one's output: after the narrowest degree.
        for spec in (SINGLE,) if task.step_index else reversed(task.candidates):
            layout = _own_group(executor.rank, spec.size, num_ranks)
            if layout and (spec == SINGLE or not by_itself):
                run(task, ExecutionLayout(layout, spec))
    return seconds


def _own_group(rank: int, size: int, world_size: int) -> tuple[int, ...] | None:
    """The consecutive group of ``size`` this rank falls in, None for a remainder too small to form one."""
    first = rank // size * size
    return tuple(range(first, first + size)) if first + size <= world_size else None
