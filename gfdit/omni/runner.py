"""The model runner of an elastic worker: vLLM-Omni's own, whose parallelism answers to the running task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.distributed import parallel_state
from vllm_omni.diffusion.distributed.sp_plan import get_sp_plan_from_model
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

from gfdit.adapters.sequence_plan import SequencePlan
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tiling import Tiling
from gfdit.omni.compiled_blocks import compilations, prepare_compiled_blocks
from gfdit.omni.joint_attention import JointAttention, gather_tokens
from gfdit.omni.parallel_decode import share_tiles
from gfdit.omni.ring import GroupFreeRing, UlyssesOrRing, allow_ring
from gfdit.omni.split_tokens import split_tokens
from gfdit.omni.step_graphs import StepGraphs
from gfdit.omni.task_scope import GroupStandIn, TaskDegrees, TaskScope
from gfdit.omni.ulysses import GroupFreeUlysses

logger = init_logger(__name__)


class ElasticModelRunner(DiffusionModelRunner):
    """Loads and holds the pipeline as vLLM-Omni does; :meth:`make_elastic` is called once after loading."""

    scope: TaskScope
    #: Of the VAE, if decode tasks may share its tiles.
    tiling: Tiling | None
    #: Whether the attention backend can leave keys out. Only batches of texts that differ in length need that.
    takes_masks: bool
    #: Of the transformer, by torch; 0 if everything runs as it is written.
    num_compiled_blocks: int
    _original_groups: tuple[Any, Any]
    _sequence_plan: SequencePlan | None = None

    def make_elastic(
        self,
        scope: TaskScope,
        sequence_plan: SequencePlan | None = None,
        *,
        ring: bool = False,
    ) -> None:
        """Give the loaded pipeline stand-in groups, sequence-parallel hooks and the group-free strategy.

        The hooks are installed once, and at degree 1 they do nothing. ``sequence_plan`` takes the place of the
        transformer's own plan. With ``ring`` any degree works; raises ``ValueError`` naming an attention layer
        that cannot do it.
        """
        self.scope = scope
        self.num_compiled_blocks = prepare_compiled_blocks(self.pipeline)
        self._sequence_plan = sequence_plan
        self._original_groups = parallel_state._SP, parallel_state._CFG
        parallel_state._SP, parallel_state._CFG = GroupStandIn(scope, "sp"), GroupStandIn(scope, "cfg")
        self.od_config.parallel_config.mask_sp_padding = False  # there is none when attention begins
        ulysses = GroupFreeUlysses(scope)
        exchange = UlyssesOrRing(scope, ulysses, GroupFreeRing(scope)) if ring else ulysses
        strategy = exchange if sequence_plan is None else JointAttention(scope, exchange)
        self.takes_masks = True
        for name, module in self.pipeline.named_modules():
            if isinstance(module, Attention) and not module.skip_sequence_parallel:
                module.parallel_strategy = strategy
                self.takes_masks &= _takes_masks(module)
                if ring:
                    allow_ring(module, name, scope)
        for transformer, plan in self._plans():
            split_tokens(transformer, TaskDegrees(scope), plan)
            if sequence_plan is not None:
                transformer.get_submodule(sequence_plan.gather).register_forward_hook(gather_tokens)
        self.tiling = share_tiles(self.pipeline, scope)

    def capture_steps(self, graphs: StepGraphs) -> None:
        """Replay passes of the transformers from graphs; ``make_elastic`` comes first."""
        scope = self.scope
        for transformer in self._transformers():
            graphs.wrap(transformer, lambda: (scope.sp.ranks, scope.cfg.ranks))

    def refresh_caches(self, request: OmniDiffusionRequest) -> None:
        """As before each request of a stock worker; it does nothing without a step cache."""
        self._refresh_cache_for_requests([request], od_config=self.od_config)

    def restore_groups(self) -> None:
        """Put vLLM-Omni's own coordinators back, so that its shutdown destroys them."""
        parallel_state._SP, parallel_state._CFG = self._original_groups

    def supports_sequence_parallel(self) -> bool:
        """Whether the model says how to split its tokens, at any length.

        A split without automatic padding would fail in the middle of a collective for lengths that do not
        divide by the degree. A plan that only gathers is of a model that splits its tokens by itself.
        """
        plans = [plan for _, plan in self._plans()]
        splits = [
            split
            for plan in plans
            for entry in plan.values()
            if isinstance(entry, dict)
            for split in entry.values()
        ]
        return bool(plans) and all(getattr(split, "auto_pad", False) for split in splits)

    @contextmanager
    def task(self, layout: ExecutionLayout, *, decode: bool = False) -> Iterator[None]:
        """Run the body as one rank's part of a task under ``layout``; ``decode`` says that it is a decode task."""
        with (
            torch.inference_mode(),
            self.scope.enter(layout, self.od_config.parallel_config, decode=decode),
            set_forward_context(
                vllm_config=self.vllm_config, omni_diffusion_config=self.od_config, attn_metadata={}
            ),
            compilations() as compiled,
        ):
            yield
            if num_graphs := compiled():
                logger.info("compiled %d graphs during a task on %s", num_graphs, layout)

    def _plans(self) -> list[tuple[torch.nn.Module, Mapping[str, Any]]]:
        found = []
        for transformer in self._transformers():
            own = self._sequence_plan
            if plan := get_sp_plan_from_model(transformer) if own is None else own.splits:
                found.append((transformer, plan))
        return found

    def _transformers(self) -> list[torch.nn.Module]:
        names = getattr(self.pipeline, "_dit_modules", None) or ("transformer", "transformer_2")
        found = []
        for name in names:
            try:
                transformer = attrgetter(name)(self.pipeline)
            except AttributeError:
                continue
            if transformer is not None:
                found.append(transformer)
        return found


def _takes_masks(layer: Attention) -> bool:
    """As vLLM-Omni asks it before every call."""
    backend = layer.attn_backend
    return backend is None or backend.supports_attention_mask(getattr(layer, "attn_spec", None))
