"""A rank runs a step of every degree and class of shapes by itself, so that all it will need is compiled.

Compiling takes from seconds to a minute, and collectives wait for no peer that long. So it happens where nobody
waits: operators give zeros instead of communicating (:func:`gfdit.comm.operators.rehearsal`), and what comes out
is thrown away. A rank that takes the place of another can do it while the others serve.

Compiled blocks take tensors of any size, yet not one graph takes them all: padding is masked or there is none, and
torch treats one row apart from several. These are the classes of shapes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.errors import OmniClientError

from gfdit.adapters.base import Artifact, TaskCall
from gfdit.comm import operators
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec
from gfdit.core.tasks import TaskKind
from gfdit.omni.compiled_blocks import num_compilations

if TYPE_CHECKING:
    from gfdit.omni.executor import OmniExecutor

logger = init_logger(__name__)

# Less of either side makes an odd number of tokens of an even one, where sides are multiples of 16 or 32 pixels.
_LESS_PIXELS = 16


def rehearse(executor: OmniExecutor, request: OmniDiffusionRequest, sequence_parallel: bool) -> None:
    """Run the first step of requests like ``request`` at every degree, alone."""
    start_s, before = time.monotonic(), num_compilations()
    for variant in _variants(request):
        try:
            _rehearse(executor, variant, sequence_parallel)
        except OmniClientError as error:  # not every model takes every variant
            logger.info("not compiled ahead for a variant of the warm-up's request: %s", error)
    num_graphs, seconds = num_compilations() - before, time.monotonic() - start_s
    logger.info("rank %d compiled %d graphs in %.1f s", executor.rank, num_graphs, seconds)


def _rehearse(executor: OmniExecutor, request: OmniDiffusionRequest, sequence_parallel: bool) -> None:
    graph = executor.adapter.convert(request, None if sequence_parallel else 1).graph
    artifacts: dict[str, Artifact] = {}
    for task in graph.tasks:
        # Copies, because a step consumes its input and every degree starts from the same one.
        inputs = {name: artifacts[name] for name in task.inputs}
        if task.kind is TaskKind.DENOISE:
            for spec in task.candidates:
                call = TaskCall(task, tuple(copy.deepcopy(value) for value in inputs.values()), None)
                with operators.rehearsal():
                    executor.run([call], _layout(executor, spec))
            return
        (output,) = executor.run(
            [TaskCall(task, tuple(inputs.values()), None if inputs else request)], _layout(executor, SINGLE)
        )
        artifacts.update(zip(task.outputs, output.artifacts, strict=True))


def _layout(executor: OmniExecutor, spec: ParallelSpec) -> ExecutionLayout:
    """This rank and as many others as it takes."""
    num_ranks = executor.comm.world_size
    return ExecutionLayout(tuple((executor.rank + i) % num_ranks for i in range(spec.size)), spec)


def _variants(request: OmniDiffusionRequest) -> Iterator[OmniDiffusionRequest]:
    """Of each class of shapes one."""
    yield request
    sampling = request.sampling_params
    if sampling.height and sampling.width and min(sampling.height, sampling.width) > _LESS_PIXELS:
        yield _changed(request, height=sampling.height - _LESS_PIXELS, width=sampling.width - _LESS_PIXELS)
    yield _changed(request, num_outputs_per_prompt=2)


def _changed(request: OmniDiffusionRequest, **sampling: int) -> OmniDiffusionRequest:
    changed = copy.deepcopy(request)
    for name, value in sampling.items():
        setattr(changed.sampling_params, name, value)
    return changed
