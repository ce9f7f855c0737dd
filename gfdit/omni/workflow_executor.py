"""Runs the tasks of workflows in a worker process: components instead of a pipeline (LegoDiffusion paper)."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import WorkerWrapperBase
from vllm_omni.platforms import current_omni_platform
from vllm_omni.plugins import load_omni_general_plugins

from gfdit.comm import GroupFreeComm
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Task, TaskKind
from gfdit.migration.codec import Artifact, ArtifactCodec, FieldCodec
from gfdit.omni.artifact_store import ArtifactStore
from gfdit.omni.component_host import ComponentHost
from gfdit.omni.device_meter import DeviceMeter
from gfdit.omni.executor import OmniExecutor, WorkerPayload, _be_alone, worker_on
from gfdit.omni.runner import ElasticModelRunner
from gfdit.omni.task_scope import TaskScope
from gfdit.runtime.executor import Results, TaskError
from gfdit.runtime.host_memory import FreedMemory
from gfdit.runtime.streams import Streams
from gfdit.workflow.caching import CACHE_MISS, CacheMiss
from gfdit.workflow.compiling import REQUEST_INPUTS, CompiledWorkflow, load_workflows
from gfdit.workflow.model import Model, Patch
from gfdit.workflow.recording import Input, Node, Value


@dataclass
class NodeCall:
    """See :class:`gfdit.workflow.model.Call`."""

    step_index: int
    num_steps: int
    layout: ExecutionLayout
    device: torch.device
    request_id: str
    patches: list[Patch] | None
    streams: Streams
    artifacts: Mapping[str, str]  # of streamed outputs, by name
    parts: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def emit(self, name: str, index: int, part: torch.Tensor) -> None:
        parts = self.parts.setdefault(name, [])
        if index != len(parts):
            raise ValueError(f"part {index} of {name} comes after {len(parts)} others")
        part = part.detach().clone()
        parts.append(part)
        self.streams.emit(self.artifacts[name], part)


@dataclass(frozen=True, slots=True)
class Stored:
    """A deferred input that is here as a whole."""

    parts: Sequence[torch.Tensor]

    def fetch(self, index: int) -> torch.Tensor:
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class Streamed:
    """A deferred input that comes part by part."""

    artifact: str
    streams: Streams

    def fetch(self, index: int) -> torch.Tensor:
        return self.streams.fetch(self.artifact, index)


class _Codecs:
    """What the store asks an adapter for: values of workflows are dictionaries, each rank has all of them."""

    def forget(self, artifacts: tuple[str, ...]) -> None:
        """Nothing is kept for them."""

    def codec(self, artifact: str) -> ArtifactCodec:
        return FieldCodec()


class WorkflowExecutor(OmniExecutor):
    """A worker without a pipeline. See :class:`gfdit.runtime.executor.TaskExecutor` for the contract."""

    def __init__(self, rank: int, comm: GroupFreeComm, payload: WorkerPayload) -> None:
        od_config = payload.od_config
        if current_omni_platform.device_type == "cpu":
            torch.set_num_threads(payload.threads_per_rank)
        load_omni_general_plugins()
        _be_alone(od_config)
        od_config.diffusion_load_format = "dummy"  # what is served is loaded part by part
        self.rank = rank
        self.comm = comm
        self.store = ArtifactStore()
        self.workflows = load_workflows(payload.workflows)
        self.worker = WorkerWrapperBase(gpu_id=rank, od_config=od_config, base_worker_class=worker_on(comm.device))
        runner = self.worker.model_runner
        assert isinstance(runner, ElasticModelRunner), "the engine selects the elastic model runner"
        self.runner = runner
        self.device = runner.device
        runner.join(TaskScope.alone(rank, comm))
        runner.takes_masks, runner.tiling = False, None
        self.adapter: Any = _Codecs()
        self.host = ComponentHost(runner)
        self.freed_memory = FreedMemory() if self.device.type == "cpu" else None
        self.meter = DeviceMeter(self.device) if self.device.type == "cuda" else None
        self._memory_points = []
        self.warm_up_s = {}
        self._warm_up = None
        self._models = self.workflows.models
        for model in self._models.values():
            if model.pinned and (model.ranks is None or rank in model.ranks):
                self.host.load(model)

    # Components

    def load_component(self, name: str, evict: tuple[str, ...]) -> int:
        for other in evict:
            if other in self.host.resident:
                self.host.unload(other)
        if name not in self._models:
            raise TaskError(f"no workflow has a component {name}")
        return self.host.load(self._models[name])

    def resident(self) -> tuple[str, ...]:
        return tuple(self.host.resident)

    # Tasks

    def execute(self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: Mapping[str, bytes]) -> Results:
        made: dict[str, Any] = {}
        for task in tasks:
            compiled, node = self.workflows.node(task.node)
            values = self._values(task, payloads)
            call = self._call(task, compiled, node, layout)
            inputs = {name: self._bound(task, compiled, node, name, values) for name in node.bindings}
            inputs = {name: value for name, value in inputs.items() if value is not None}
            active = self._active_patches(node.model, call, inputs)
            try:
                outputs = dict(self.host.execute(node.model, call, inputs))
            except CacheMiss as miss:
                raise TaskError(str(miss), CACHE_MISS) from miss
            except ValueError as error:
                if task.inputs and node.model.kind is not TaskKind.PREPARE:
                    raise
                raise TaskError(str(error), 400) from error  # what the request brings is wrong
            if active and isinstance(latents := outputs.get("latents"), dict):
                outputs["latents"] = {**latents, "patched": active}
            self._keep(task, node, layout, call, outputs, values)
            if not task.outputs and self.rank == layout.ranks[0]:
                made[task.request_id] = outputs[next(iter(node.model.outputs))]
        return lambda: {request_id: self._packed(image) for request_id, image in made.items()}

    def _values(self, task: Task, payloads: Mapping[str, bytes]) -> Mapping[str, Any]:
        """What the request brings."""
        if not task.inputs:
            return dict(pickle.loads(payloads[task.request_id]))
        name = f"{task.request_id}/{REQUEST_INPUTS}"
        return dict(self.store.get(name)["values"]) if name in task.inputs else {}

    def _call(self, task: Task, compiled: CompiledWorkflow, node: Node, layout: ExecutionLayout) -> NodeCall:
        streamed = {
            port.name: artifact
            for port, artifact in zip(node.model.outputs.values(), task.outputs, strict=False)
            if port.streamed
        }
        return NodeCall(
            task.step_index,
            compiled.num_steps,
            layout,
            self.device,
            task.request_id,
            None,
            self.streams,
            streamed,
        )

    def _bound(
        self, task: Task, compiled: CompiledWorkflow, node: Node, name: str, values: Mapping[str, Any]
    ) -> Any:
        """The value of one input."""
        port, bound = node.model.inputs[name], node.bindings[name]
        found = [
            self._value(task, compiled, one, values, deferred=port.deferred)
            for one in (bound if port.many else [bound])
        ]
        return found if port.many else found[0]

    def _value(
        self, task: Task, compiled: CompiledWorkflow, one: Any, values: Mapping[str, Any], *, deferred: bool
    ) -> Any:
        if isinstance(one, Input):
            return values[one.name]
        if not isinstance(one, Value):
            return one
        artifact = f"{task.request_id}/{compiled.artifact(one)}"
        if not deferred:
            return self.store.get(artifact)
        if self.streams.is_stream(artifact):
            return Streamed(artifact, self.streams)
        return Stored(self.store.get(artifact)["parts"])

    def _active_patches(self, model: Model, call: NodeCall, inputs: Mapping[str, Any]) -> tuple[str, ...]:
        """Choose those of this step, the same on all of its ranks; returns what stays active from now on.

        A patch without a step of its own is active once every rank of a step has read it (§4.2).
        """
        if not model.patches:
            return ()
        latents = inputs.get("latents") or {}
        known = set(latents.get("patched", ()))
        self.host.read_patches(model)
        waiting = [patch for patch in model.patches if patch.step is None and patch.source not in known]
        if waiting:
            read = self.host.patches_read(model)
            ready = torch.tensor([float(all(patch in read for patch in waiting))], device=self.comm.device)
            if len(call.layout.ranks) > 1:
                self.comm.all_reduce(ready, self.comm.group(call.layout.ranks))
            if float(ready) == len(call.layout.ranks):
                known.update(patch.source for patch in waiting)
        call.patches = [
            patch
            for patch in model.patches
            if patch.source in known or (patch.step is not None and call.step_index >= patch.step)
        ]
        return tuple(sorted(known))

    def _keep(
        self,
        task: Task,
        node: Node,
        layout: ExecutionLayout,
        call: NodeCall,
        outputs: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        for port, artifact in zip(node.model.outputs.values(), task.outputs, strict=False):
            value: Artifact = {"parts": call.parts.get(port.name, [])} if port.streamed else outputs[port.name]
            self.store.put(artifact, value, layout)
        if task.outputs and task.outputs[-1] == (name := f"{task.request_id}/{REQUEST_INPUTS}"):
            self.store.put(name, {"values": dict(values)}, layout)

    def _packed(self, image: torch.Tensor) -> bytes:
        return pickle.dumps(pack_diffusion_output_shm(DiffusionOutput(output=image.cpu())))

    def gfdit_describe(self) -> dict[str, Any]:
        return {**super().gfdit_describe(), "sequence_parallel": True}


def make_executor(rank: int, comm: GroupFreeComm, payload: bytes) -> WorkflowExecutor:
    """Factory named in :class:`gfdit.runtime.config.RuntimeConfig`."""
    tqdm.set_lock(threading.RLock())  # as in ``gfdit.omni.executor``
    return WorkflowExecutor(rank, comm, pickle.loads(payload))
