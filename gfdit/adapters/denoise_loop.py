"""Base of adapters for pipelines whose only entry is ``forward``: its parts, called task by task.

vLLM-Omni's ``forward`` of such a pipeline encodes prompts, draws latents, loops over the timesteps and decodes. A
family names those parts: :meth:`encode_state`, :meth:`prepare_state`, :meth:`predict`, :meth:`decode_state`. The
numbers stay the pipeline's, because the parts are its own methods, called with the arguments ``forward`` gives.

What a family needs beyond vLLM-Omni's state goes into ``state.extra``. Encoding writes there what steps only read;
names in :attr:`step_extra` are made later, or change, and travel with the latents. A family whose graph has more
encode tasks gives each an artifact with an ``extra`` of its own: a task sees those of all its inputs together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.base import TaskCall, TaskOutput
from gfdit.adapters.batching import log_split
from gfdit.adapters.scheduler_waits import WithoutWaits
from gfdit.adapters.step_execution import StepExecutionAdapter, join_state, split_state
from gfdit.migration.codec import Artifact


class DenoiseLoopAdapter(StepExecutionAdapter):
    """Adapter for one pipeline class; see :class:`gfdit.adapters.base.ModelAdapter` for the contract."""

    separate_prepare = True
    #: Class name of the pipeline that the adapter drives, for the error about any other.
    pipeline_class: ClassVar[str]
    #: Names in ``state.extra`` that preparation makes or steps change.
    step_extra: ClassVar[frozenset[str]] = frozenset()
    #: Whether :meth:`predict` takes several requests.
    batches: ClassVar[bool] = False

    # The parts of a family

    def encode_state(self, state: StepRequestState) -> None:
        """Write what depends on prompts and input images alone: embeddings, ``extra``, ``do_true_cfg``."""
        raise NotImplementedError

    def prepare_state(self, state: StepRequestState) -> None:
        """Write latents, timesteps and a scheduler of the request's own (see :meth:`own_scheduler`)."""
        raise NotImplementedError

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        """Guided noise prediction, (rows of all requests in order, ...)."""
        raise NotImplementedError

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        """What ``forward`` makes of the final latents."""
        raise NotImplementedError

    def compatible(self, states: Sequence[StepRequestState]) -> bool:
        """Whether :meth:`predict` may take these together; their sampling parameters agree already."""
        return len({_row_shapes(state) for state in states}) == 1

    def step(self, state: StepRequestState, noise: torch.Tensor) -> None:
        """Scheduler step of one request."""
        state.latents = self.pipeline.scheduler_step_maybe_with_cfg(
            noise,
            state.current_timestep,
            state.latents,
            state.do_true_cfg,
            per_request_scheduler=state.scheduler,
        )

    def own_scheduler(self) -> Any:
        """A copy of the pipeline's scheduler, which preparing timesteps has just set up for this request."""
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        scheduler.set_begin_index(0)
        return scheduler

    # Tasks

    def bind(self, pipeline: Any, device: torch.device) -> None:
        if type(pipeline).__name__ != self.pipeline_class:
            raise ValueError(f"{type(self).__name__} drives {self.pipeline_class}, not {type(pipeline).__name__}")
        self.pipeline = pipeline
        self.device = device

    def encode(self, call: TaskCall) -> TaskOutput:
        state = self.new_state(call)
        self.restore_pipeline(state)
        self.encode_state(state)
        conditioning, latents = self.split(state)
        return TaskOutput(({**conditioning, "generator": latents["generator"]},))

    def prepare(self, call: TaskCall) -> TaskOutput:
        state = join_state(self._with_extra(call))
        state.sampling.generator = copy.deepcopy(state.sampling.generator)  # drawn from; conditioning stays
        self.restore_pipeline(state)
        self.prepare_state(state)
        state.step_index = 0
        return TaskOutput(self.split(state)[1:])

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        states = [self.resume(call) for call in calls]
        for part in self._parts(states):
            self.restore_pipeline(part[0])
            noise = self.predict(part)
            row = 0
            for state in part:
                num_rows = state.latents.shape[0]
                with WithoutWaits():
                    self.step(state, noise[row : row + num_rows])
                state.step_index += 1
                row += num_rows
        return [TaskOutput(self.split(state)[1:]) for state in states]

    def decode(self, call: TaskCall) -> TaskOutput:
        state = self.resume(call)
        self.restore_pipeline(state)
        return TaskOutput(result=self.decode_state(state))

    def _parts(self, states: list[StepRequestState]) -> list[list[StepRequestState]]:
        if len(states) == 1 or (self.batches and self.compatible(states)):
            return [states]
        log_split("the adapter or the shapes of their latents do not allow it")
        return [[state] for state in states]

    # State

    def resume(self, call: TaskCall) -> StepRequestState:
        return super().resume(TaskCall(call.task, self._with_extra(call), call.request))

    def _with_extra(self, call: TaskCall) -> tuple[Artifact, ...]:
        """The inputs, and in the last one the ``extra`` of all: a new one, so that a task may add to it."""
        extra = {name: value for artifact in call.inputs for name, value in artifact["extra"].items()}
        return (*call.inputs, {"extra": extra})

    def split(self, state: StepRequestState) -> tuple[Artifact, Artifact]:
        """(conditioning, latents), with each its share of ``state.extra``; guidance is settled by encoding."""
        conditioning, latents = split_state(state)
        conditioning["do_true_cfg"] = latents.pop("do_true_cfg")
        extra = latents["extra"]
        conditioning["extra"] = {name: extra[name] for name in extra if name not in self.step_extra}
        latents["extra"] = {name: extra[name] for name in extra if name in self.step_extra}
        return conditioning, latents


def rows(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of several requests in order; one row is repeated to as many as its neighbour in ``like`` has.

    Of a single request the tensor as it is: pipelines broadcast over its images themselves.
    """
    if len(tensors) == 1:
        return tensors[0]
    pairs = zip(tensors, like, strict=True)
    return torch.cat([tensor.expand(other.shape[0], *tensor.shape[1:]) for tensor, other in pairs])


def timestep_rows(states: Sequence[StepRequestState], device: torch.device) -> torch.Tensor:
    """The current timestep of every row of latents, on ``device``, of the type that the timesteps have."""
    rows = torch.cat([state.current_timestep.expand(state.latents.shape[0]) for state in states])
    return rows.to(device, non_blocking=True)


def _row_shapes(state: StepRequestState) -> tuple[Any, ...]:
    """What one row of a request looks like; text may be padded to another length."""
    tensors = (state.latents, state.prompt_embeds, state.negative_prompt_embeds)
    return state.do_true_cfg, *(None if tensor is None else tensor.shape[1:] for tensor in tensors)
