"""What an adapter does for one family of pipelines (GF-DiT paper, section 5.2).

An adapter has two halves that never meet in one process. The engine half turns a request into a task graph and
says which parallel specifications its steps can take. The worker half, once bound to a loaded pipeline, runs
tasks: artifacts in, artifacts out. An artifact is a plain dictionary of fields; everything a task needs comes
in with its inputs, so interleaved requests cannot touch each other and any rank can go on where another
stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gfdit.adapters.limits import Limits
from gfdit.adapters.sequence_plan import SequencePlan
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.tasks import Shape, Task, TaskGraph
from gfdit.migration.codec import Artifact, ArtifactCodec

if TYPE_CHECKING:
    import torch
    from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
    from vllm_omni.diffusion.request import OmniDiffusionRequest


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What the engine half says about a request; of a workflow also its name, and what first tasks get.

    ``after_miss`` is the graph to run if the first one finds that a cache lacks what it needs.
    """

    shape: Shape
    num_steps: int
    cfg: bool
    graph: TaskGraph
    workflow: str = ""
    payload: bytes = b""
    after_miss: TaskGraph | None = None


@dataclass(frozen=True, slots=True)
class TaskCall:
    """One task with its input artifacts, in the order of ``task.inputs``; ``request`` for tasks without any."""

    task: Task
    inputs: tuple[Artifact, ...]
    request: OmniDiffusionRequest | None


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """Artifacts in the order of ``task.outputs``; ``result`` from the task that completes the request."""

    artifacts: tuple[Artifact, ...] = ()
    result: DiffusionOutput | None = None


class ModelAdapter(Protocol):
    """One instance per process; ``bind`` and what follows it are used in workers only."""

    #: Whether steps of several requests may share a forward pass.
    batches: ClassVar[bool]
    #: Whether a pass of the transformer does the same at every step, but for the tensors it is given.
    captures_steps: bool

    #: If any, takes the place of the transformer's own plan.
    sequence_plan: SequencePlan | None
    #: Whether degrees that do not divide the attention heads are offered.
    ring: bool
    #: What requests may ask for at most; the engine sets it, workers have none.
    limits: Limits | None

    def __init__(self, od_config: OmniDiffusionConfig, num_ranks: int) -> None: ...

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        """Raises ``ValueError`` naming the field for a request the model cannot take, or that asks for too much.

        The latter before a graph is made: a request may ask for any number of steps.
        """
        ...

    def parallel_candidates(self, shape: Shape, cfg: bool, max_sp: int | None) -> tuple[ParallelSpec, ...]:
        """Feasible specifications of a denoising step, narrowest first."""
        ...

    def bind(self, pipeline: Any, device: torch.device) -> None:
        """Take the loaded pipeline. Raises ``ValueError`` for one that this adapter cannot drive."""
        ...

    def must_replay(self, calls: list[TaskCall]) -> bool:
        """Whether there is anything of these tasks that this rank should do before it enters their layout."""
        ...

    def replay(self, calls: list[TaskCall]) -> None:
        """Do it, alone: nobody waits for this rank meanwhile."""
        ...

    def execute(self, calls: list[TaskCall], layout: ExecutionLayout) -> list[TaskOutput]:
        """Run tasks inside their task scope; several calls are one batched step, of one step-batch key."""
        ...

    def sampling_params(self, call: TaskCall) -> Any:
        """The request's ``OmniDiffusionSamplingParams``, which select its LoRA adapter."""
        ...

    def forget(self, artifacts: tuple[str, ...]) -> None:
        """This rank has dropped ``artifacts``, and what was kept for them is of no use. Called on any thread."""
        ...

    def codec(self, artifact: str) -> ArtifactCodec:
        """Which fields ``artifact`` has and how they are split, by its id."""
        ...
