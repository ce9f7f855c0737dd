"""An adapter written by hand: it drives any pipeline that implements vLLM-Omni's step execution.

What adapters with errors are made of, and what a stock ``forward`` is compared with. ``prepare_encode`` makes
conditioning and initial latents in one go, so the trajectory has no prepare task.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from vllm_omni.diffusion.worker.input_batch import InputBatch
from vllm_omni.diffusion.worker.utils import (
    StepRequestState,
    attach_stage_durations,
    clear_pipeline_stage_durations,
    consume_pipeline_stage_durations,
    merge_stage_durations,
)

from gfdit.adapters.base import TaskCall, TaskOutput
from gfdit.adapters.batching import log_split
from gfdit.adapters.engine_half import EngineHalf
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import TaskKind
from gfdit.migration.codec import Artifact

# Fields of vLLM-Omni's StepRequestState that are written once, by encoding, and only read afterwards.
CONDITIONING_FIELDS = frozenset(
    {
        "request_id",
        "sampling",
        "prompt",
        "external_req_id",
        "prepared_layout",
        "prompt_embeds",
        "prompt_embeds_mask",
        "negative_prompt_embeds",
        "negative_prompt_embeds_mask",
    }
)
_STATE_FIELDS = tuple(field.name for field in dataclasses.fields(StepRequestState))


class StepExecutionAdapter(EngineHalf):
    """See :class:`gfdit.adapters.base.ModelAdapter` for the contract."""

    # Worker half

    def bind(self, pipeline: Any, device: torch.device) -> None:
        if not getattr(pipeline, "supports_step_execution", False):
            raise ValueError(f"{type(pipeline).__name__} does not implement vLLM-Omni's step execution")
        self.pipeline = pipeline
        self.device = device

    def sampling_params(self, call: TaskCall) -> Any:
        return call.request.sampling_params if call.request else call.inputs[0]["sampling"]

    def must_replay(self, calls: list[TaskCall]) -> bool:
        return False

    def replay(self, calls: list[TaskCall]) -> None:
        raise NotImplementedError("tasks of this adapter begin with their artifacts")

    def execute(self, calls: list[TaskCall], layout: ExecutionLayout) -> list[TaskOutput]:
        run = {
            TaskKind.ENCODE: self.encode,
            TaskKind.DECODE: self.decode,
        }
        if calls[0].task.kind is TaskKind.DENOISE:
            return self.denoise(calls)
        return [run[call.task.kind](call) for call in calls]

    def encode(self, call: TaskCall) -> TaskOutput:
        state = self.new_state(call)
        self.restore_pipeline(state)
        clear_pipeline_stage_durations(self.pipeline)
        self.pipeline.prepare_encode(state)
        merge_stage_durations(state, consume_pipeline_stage_durations(self.pipeline))
        return TaskOutput(split_state(state))

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        """One step of each request, in one forward pass if vLLM-Omni can make a batch of them."""
        states = [self.resume(call) for call in calls]
        try:
            batch = self.make_batch(states)
        except ValueError as error:
            if len(calls) == 1:
                raise
            log_split(str(error))
            return [output for call in calls for output in self.denoise([call])]
        self.restore_pipeline(states[0])
        clear_pipeline_stage_durations(self.pipeline)
        noise = self.pipeline.denoise_step(batch, states=states)
        durations = consume_pipeline_stage_durations(self.pipeline)
        row = 0
        for state in states:
            num_rows = state.latents.shape[0]
            merge_stage_durations(state, durations)
            self.pipeline.step_scheduler(state, noise[row : row + num_rows] if noise is not None else None)
            row += num_rows
        return [TaskOutput(split_state(state)[1:]) for state in states]

    def make_batch(self, states: list[StepRequestState]) -> InputBatch:
        """For one forward pass. Raises ``ValueError`` for states that cannot share one."""
        return InputBatch.make_batch(states)

    def decode(self, call: TaskCall) -> TaskOutput:
        state = self.resume(call)
        self.restore_pipeline(state)
        clear_pipeline_stage_durations(self.pipeline)
        result = self.pipeline.post_decode(state)
        merge_stage_durations(state, consume_pipeline_stage_durations(self.pipeline))
        attach_stage_durations(state, result)
        return TaskOutput(result=result)

    # State

    def new_state(self, call: TaskCall) -> StepRequestState:
        """A fresh state for a request that has just arrived at its first task."""
        request = call.request
        assert request is not None, f"{call.task.id} has no request"
        sampling = copy.deepcopy(request.sampling_params)
        sampling.generator = self.new_generator(sampling)
        return StepRequestState(
            request_id=request.request_id,
            sampling=sampling,
            prompt=request.prompt,
            prepared_layout=request.prepared_layout,
            external_req_id=getattr(request, "external_req_id", None),
        )

    def resume(self, call: TaskCall) -> StepRequestState:
        """The state a task goes on from, put together from its input artifacts."""
        state = join_state(call.inputs)
        expected, actual = call.task.step_index, state.step_index
        if call.task.kind is TaskKind.DENOISE and (expected != actual or expected >= state.total_steps):
            raise ValueError(f"{call.task.id}: the scheduler is at step {actual} of {state.total_steps}")
        return state

    def restore_pipeline(self, state: StepRequestState) -> None:
        """Set what pipelines keep on themselves between steps, for a rank that never encoded this request."""
        if hasattr(type(self.pipeline), "interrupt"):
            self.pipeline._interrupt = False
        if hasattr(type(self.pipeline), "attention_kwargs"):
            self.pipeline._attention_kwargs = {}


def split_state(state: StepRequestState) -> tuple[Artifact, Artifact]:
    """(conditioning, latents): what is only read from now on, and what changes with every step.

    The random generator belongs to the latter, although the sampling parameters carry it.
    """
    fields = {name: getattr(state, name) for name in _STATE_FIELDS}
    conditioning = {name: fields.pop(name) for name in CONDITIONING_FIELDS}
    conditioning["sampling"] = _with_generator(state.sampling, None)
    fields["generator"] = state.sampling.generator
    return conditioning, fields


def join_state(artifacts: tuple[Artifact, ...]) -> StepRequestState:
    """Inverse of :func:`split_state`. What a step changes in place is copied: a failed one may run again."""
    fields = {name: value for artifact in artifacts for name, value in artifact.items()}
    generator = fields.pop("generator", None)
    fields["sampling"] = _with_generator(fields["sampling"], generator and generator.clone_state())
    fields["extra"] = {name: _own(value) for name, value in fields.get("extra", {}).items()}
    if (scheduler := fields.get("scheduler")) is not None:
        fields["scheduler"] = _copy_of(scheduler)
    return StepRequestState(**fields)


def _own(value: Any) -> Any:
    """A field of ``extra``, of which steps replace the tensors, but change containers and generators in place."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def _copy_of(scheduler: Any) -> Any:
    """Schedulers replace their tensors, but count steps and shift their history in place."""
    copied = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        if isinstance(value, (list, dict)):
            setattr(copied, name, copy.copy(value))
    return copied


def _with_generator(sampling: Any, generator: torch.Generator | None) -> Any:
    copied = copy.copy(sampling)
    copied.generator = generator
    return copied
