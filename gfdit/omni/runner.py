"""The model runner of an elastic worker: vLLM-Omni's own, whose parallelism answers to the running task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

from gfdit.adapters.sequence_plan import SequencePlan
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tiling import Tiling
from gfdit.omni.compiled_blocks import compilations, prepare_compiled_blocks
from gfdit.omni.elastic import Exchange, plans_of, put_groups_back, put_in_groups
from gfdit.omni.parallel_decode import share_tiles
from gfdit.omni.step_graphs import StepGraphs
from gfdit.omni.task_scope import TaskScope

logger = init_logger(__name__)


class ElasticModelRunner(DiffusionModelRunner):
    """Loads and holds the pipeline as vLLM-Omni does; :meth:`make_elastic` is called once after loading."""

    scope: TaskScope
    exchange: Exchange
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
        self.num_compiled_blocks = prepare_compiled_blocks(self.pipeline)
        self._sequence_plan = sequence_plan
        self.join(scope, ring=ring)
        self.takes_masks = self.exchange.attach(self.pipeline, self._transformers(), sequence_plan)
        self.tiling = share_tiles(self.pipeline, scope)

    def join(self, scope: TaskScope, *, ring: bool = False) -> None:
        """Let tasks set this process's parallelism; what is loaded into it is then attached to ``exchange``."""
        self.scope = scope
        self._original_groups = put_in_groups(scope)
        self.od_config.parallel_config.mask_sp_padding = False  # there is none when attention begins
        self.exchange = Exchange(scope, ring=ring)

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
        put_groups_back(self._original_groups)

    def supports_sequence_parallel(self) -> bool:
        """Whether the model says how to split its tokens, at any length.

        A split without automatic padding would fail in the middle of a collective for lengths that do not
        divide by the degree. A plan that only gathers is of a model that splits its tokens by itself.
        """
        plans = [plan for _, plan in plans_of(self._transformers(), self._sequence_plan)]
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
