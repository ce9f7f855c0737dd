"""Drives any pipeline that implements vLLM-Omni's step execution.

``prepare_encode`` makes conditioning and initial latents in one go, so the trajectory has no prepare task.
Families that can separate them, or that know more about their parallelism, refine this adapter.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.input_batch import InputBatch
from vllm_omni.diffusion.worker.utils import (
    StepRequestState,
    attach_stage_durations,
    clear_pipeline_stage_durations,
    consume_pipeline_stage_durations,
    merge_stage_durations,
)

from gfdit.adapters.base import TaskCall, TaskOutput, Trajectory
from gfdit.adapters.batching import log_split
from gfdit.adapters.limits import Limits
from gfdit.adapters.sequence_plan import SequencePlan
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.tasks import Shape, TaskKind, trajectory
from gfdit.migration.codec import Artifact, ArtifactCodec, FieldCodec

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


class StepExecutionAdapter:
    """Generic adapter; see :class:`gfdit.adapters.base.ModelAdapter` for the contract."""

    #: Whether encoding and the making of initial latents are tasks of their own.
    separate_prepare = False
    #: Whether steps of several requests may share a forward pass.
    batches: ClassVar[bool] = True
    #: The pipeline's own default.
    default_num_steps: ClassVar[int] = 50
    sequence_plan: SequencePlan | None = None
    #: Whether a pass of the transformer does the same at every step, but for the tensors it is given.
    captures_steps: ClassVar[bool] = False
    ring = False
    limits: Limits | None = None

    def __init__(self, od_config: OmniDiffusionConfig, num_ranks: int) -> None:
        self.od_config = od_config
        self.num_ranks = num_ranks
        self.pipeline: Any = None
        self.device = torch.device("cpu")
        # Nothing is split between steps: vLLM-Omni splits tokens inside the transformer only and gathers its
        # output, and the scheduler steps on whole latents on every rank.
        self._codec = FieldCodec()

    # Engine half

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        shape = self.shape(request)
        num_steps = self.num_steps(request)
        cfg = self.uses_cfg(request)
        if num_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1, got {num_steps}")
        if isinstance(request.sampling_params.generator, list):
            raise ValueError("generator must be one for all outputs of a request, not a list")
        if self.limits is not None:  # before there is a task for every step
            self.limits.check(shape, num_steps, request.sampling_params)
        candidates = self.parallel_candidates(shape, cfg, max_sp)
        graph = trajectory(request.request_id, num_steps, candidates, prepare=self.separate_prepare)
        return Trajectory(shape, num_steps, cfg, graph)

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        sampling = request.sampling_params
        return Shape(sampling.height or 1024, sampling.width or 1024, sampling.num_frames or 1)

    def num_steps(self, request: OmniDiffusionRequest) -> int:
        sampling = request.sampling_params
        if sampling.sigmas is not None:
            return len(sampling.sigmas)
        return sampling.num_inference_steps or self.default_num_steps

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        """Whether both guidance branches run; only a family knows, and False only forgoes CFG parallelism."""
        return False

    def parallel_candidates(self, shape: Shape, cfg: bool, max_sp: int | None) -> tuple[ParallelSpec, ...]:
        """Every sequence-parallel degree that divides the attention heads, alone and with CFG parallelism.

        With a ring that is every degree.
        """
        limit = min(self.num_ranks, max_sp or self.num_ranks)
        degrees = [sp for sp in range(1, limit + 1) if self.ring or self.num_heads % sp == 0]
        specs = [ParallelSpec(sp) for sp in degrees]
        if cfg:
            specs += [ParallelSpec(sp, 2) for sp in degrees if 2 * sp <= self.num_ranks]
        return tuple(sorted(specs, key=lambda spec: (spec.size, spec.cfg)))

    @property
    def num_heads(self) -> int:
        """Attention heads of the transformer; 1, and so no sequence parallelism, where that is not known."""
        return int(self.od_config.tf_model_config.get("num_attention_heads") or 1)

    # Worker half

    def bind(self, pipeline: Any, device: torch.device) -> None:
        if not getattr(pipeline, "supports_step_execution", False):
            raise ValueError(f"{type(pipeline).__name__} does not implement vLLM-Omni's step execution")
        self.pipeline = pipeline
        self.device = device

    def codec(self, artifact: str) -> ArtifactCodec:
        return self._codec

    def sampling_params(self, call: TaskCall) -> Any:
        return call.request.sampling_params if call.request else call.inputs[0]["sampling"]

    def must_replay(self, calls: list[TaskCall]) -> bool:
        return False

    def replay(self, calls: list[TaskCall]) -> None:
        raise NotImplementedError("tasks of this adapter begin with their artifacts")

    def execute(self, calls: list[TaskCall], layout: ExecutionLayout) -> list[TaskOutput]:
        run = {
            TaskKind.ENCODE: self.encode,
            TaskKind.PREPARE: self.prepare,
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

    def prepare(self, call: TaskCall) -> TaskOutput:
        raise NotImplementedError("a trajectory of this adapter has no prepare task")

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

    def new_generator(self, sampling: Any) -> torch.Generator | None:
        """The generator a request starts with: its own, or one from its seed."""
        if sampling.generator is not None or sampling.seed is None:
            return sampling.generator
        return torch.Generator(device=sampling.generator_device or self.device).manual_seed(sampling.seed)

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
