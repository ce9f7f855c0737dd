"""The components that a worker process holds: loaded by name, shared by all workflows that name the same one.

A component is a part of a model, with weights: a transformer, a VAE, a net, text encoders. Which process holds
which is decided elsewhere; this is where they are. Everything here belongs to the thread that runs tasks.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.platforms import current_omni_platform

from gfdit.adapters.components.base import BaseTransformer
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import TaskKind
from gfdit.omni.runner import ElasticModelRunner
from gfdit.workflow import Model, Patch

logger = init_logger(__name__)


class ComponentHost:
    """One per worker process, over its ``runner``, which has joined and may hold no pipeline of its own."""

    def __init__(self, runner: ElasticModelRunner) -> None:
        self._runner = runner
        self._components: dict[str, Any] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        #: Bytes of weights by component.
        self.resident: dict[str, int] = {}

    def load(self, model: Model) -> int:
        """Make the component of ``model`` resident, if it is not; returns its bytes.

        Raises ``ValueError`` for one that is there in another dtype, and for what cannot be loaded, of which
        nothing is left.
        """
        name, dtype = model.component, self._dtype(model)
        if name in self._components:
            if self._dtypes[name] != dtype:
                there = _name(self._dtypes[name])
                raise ValueError(f"component {name} is loaded as {there}, not as {_name(dtype)}")
            return self.resident[name]
        try:
            with self._loading():
                components = model.load(self._runner.device, dtype)
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"component {name} cannot be loaded: {reason[0]}") from error
        if isinstance(model, BaseTransformer):
            root, transformers = components.pipeline, model.transformers(components)
            self._runner.exchange.attach(root, transformers, model.sequence_plan)
        self._components[name], self._dtypes[name] = components, dtype
        self.resident[name] = model.num_bytes(components)
        return self.resident[name]

    def unload(self, component: str) -> None:
        """Free it. Raises ``KeyError`` for one that is not there."""
        del self._components[component], self._dtypes[component], self.resident[component]
        gc.collect()  # hooks refer to what they are on
        current_omni_platform.empty_cache()

    def execute(self, model: Model, call: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of one call of ``model``, whose component is resident, under ``call.layout``.

        Returns artifacts by output name; what is streamed went by ``call.emit``.
        """
        with self.task(model, call.layout):
            return dict(model.execute(self.components(model), call, **inputs))

    def components(self, model: Model) -> Any:
        """Raises ``ValueError`` for what is not resident."""
        try:
            return self._components[model.component]
        except KeyError:
            rank = self._runner.scope.rank
            raise ValueError(f"component {model.component} is not loaded on rank {rank}") from None

    def read_patches(self, model: Model) -> None:
        """Begin to read the LoRAs of ``model`` from disk; does not wait."""
        model.read_patches(self.components(model))

    def patches_read(self, model: Model) -> list[Patch]:
        """Those that could be used without a wait. Raises the ``ValueError`` of one that is no LoRA."""
        loras = self.components(model).loras
        reads = [(patch, loras.read(patch.source)) for patch in model.patches]
        return [patch for patch, read in reads if read.done() and read.result()]

    def task(self, model: Model, layout: ExecutionLayout) -> AbstractContextManager[None]:
        """The parallelism of a call of ``model``."""
        return self._runner.task(layout, decode=model.kind is TaskKind.DECODE)

    def _loading(self) -> ExitStack:
        runner, stack = self._runner, ExitStack()
        context = set_forward_context(vllm_config=runner.vllm_config, omni_diffusion_config=runner.od_config)
        stack.enter_context(context)
        stack.enter_context(set_current_vllm_config(runner.vllm_config))
        stack.enter_context(torch.inference_mode(False))
        return stack

    def _dtype(self, model: Model) -> torch.dtype:
        named = getattr(model, "dtype", None)
        return self._runner.od_config.dtype if named is None else getattr(torch, named)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
