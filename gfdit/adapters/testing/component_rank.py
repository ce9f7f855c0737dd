"""One rank with components and no pipeline: the stock worker, the elastic runner and real collectives.

Imported in forked processes only: vLLM-Omni is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.worker.diffusion_worker import WorkerWrapperBase
from vllm_omni.plugins import load_omni_general_plugins

from gfdit.comm import GroupFreeComm, HeapDescriptor, attach_heap
from gfdit.core.layouts import ExecutionLayout
from gfdit.omni.component_host import ComponentHost
from gfdit.omni.executor import _be_alone, worker_on
from gfdit.omni.runner import ElasticModelRunner
from gfdit.omni.task_scope import TaskScope
from gfdit.workflow import Patch

ENGINE = "gfdit.omni.engine.ElasticDiffusionEngine"


@dataclass
class Call:
    """What a model is told about one of its calls; ``parts`` is what it streamed, by output."""

    layout: ExecutionLayout
    step_index: int = 0
    num_steps: int = 1
    request_id: str = "r1"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    patches: list[Patch] | None = None
    parts: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def emit(self, name: str, index: int, tensor: torch.Tensor) -> None:
        parts = self.parts.setdefault(name, [])
        assert index == len(parts), f"part {index} of {name} comes after {len(parts)} others"
        parts.append(tensor)


@dataclass(frozen=True)
class Arrived:
    """A stream that is all there."""

    parts: Sequence[torch.Tensor]

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    def fetch(self, index: int) -> torch.Tensor:
        return self.parts[index]


class ComponentRank:
    """``model`` is any checkpoint of a pipeline: a worker's configuration begins with one."""

    def __init__(self, rank: int, heap: HeapDescriptor, model: str, comm_timeout_s: float) -> None:
        torch.set_num_threads(1)
        self.comm = GroupFreeComm(attach_heap(heap, rank), timeout_s=comm_timeout_s)
        self.comm.warm_up()
        load_omni_general_plugins()
        od_config = OmniDiffusionConfig.from_kwargs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            extras={},
            engine_backend=ENGINE,
            diffusion_load_format="dummy",
        )
        od_config.enrich_config()
        _be_alone(od_config)
        worker_class = worker_on(self.comm.device)
        self._worker = WorkerWrapperBase(gpu_id=rank, od_config=od_config, base_worker_class=worker_class)
        runner = self._worker.model_runner
        assert isinstance(runner, ElasticModelRunner)
        runner.join(TaskScope.alone(rank, self.comm))
        self.runner = runner
        self.host = ComponentHost(runner)
        self.kept: dict[str, Any] = {}

    def apply(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(self, *args)``. A rank that fails wakes its peers."""
        try:
            return fn(self, *args)
        except Exception:
            self.comm.abort(tuple(range(self.comm.world_size)))
            raise

    def close(self) -> None:
        self.runner.restore_groups()
        self._worker.shutdown()
