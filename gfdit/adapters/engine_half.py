"""The engine half of an adapter, with what most families share: tasks in a row, degrees by attention heads."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest

from gfdit.adapters.base import Trajectory
from gfdit.adapters.limits import Limits
from gfdit.adapters.sequence_plan import SequencePlan
from gfdit.core.layouts import ParallelSpec
from gfdit.core.tasks import Shape, trajectory
from gfdit.migration.codec import ArtifactCodec, FieldCodec


class EngineHalf:
    """See :class:`gfdit.adapters.base.ModelAdapter` for the contract."""

    #: Whether steps of several requests may share a forward pass.
    batches: ClassVar[bool] = True
    #: The pipeline's own default.
    default_num_steps: ClassVar[int] = 50
    sequence_plan: SequencePlan | None = None
    #: Whether a pass of the transformer does the same at every step, but for the tensors it is given.
    captures_steps: bool = False
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
        graph = trajectory(request.request_id, num_steps, candidates, prepare=False)
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
        config = self.od_config.tf_model_config
        return int(config.get("num_attention_heads") or config.get("n_heads") or 1)

    # What worker halves share

    def codec(self, artifact: str) -> ArtifactCodec:
        return self._codec

    def forget(self, artifacts: tuple[str, ...]) -> None:
        """This rank has dropped ``artifacts``. Called on any thread."""

    def new_generator(self, sampling: Any) -> torch.Generator | None:
        """The generator a request starts with: its own, or one from its seed."""
        if sampling.generator is not None or sampling.seed is None:
            return sampling.generator
        return torch.Generator(device=sampling.generator_device or self.device).manual_seed(sampling.seed)
