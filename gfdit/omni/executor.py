"""Runs tasks in a worker process on a stock vLLM-Omni worker with an elastic model runner."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import Backend
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend known
from tqdm import tqdm  # type: ignore[import-untyped]
from vllm.utils.gc_utils import freeze_gc_heap
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerWrapperBase
from vllm_omni.errors import OmniClientError
from vllm_omni.platforms import current_omni_platform
from vllm_omni.plugins import load_omni_general_plugins

from gfdit.adapters.base import TaskCall, TaskOutput
from gfdit.adapters.batching import split_by_key
from gfdit.adapters.forward.adapter import ForwardAdapter
from gfdit.adapters.forward.self_test import self_test
from gfdit.adapters.forward.templates import Templates
from gfdit.adapters.forward.verdict import Signature, Verdicts
from gfdit.adapters.registry import make_adapter, register_pipeline
from gfdit.comm import GroupFreeComm
from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.events import MemoryPoint, MemoryUse
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.tasks import Shape, Task, TaskKind, artifact_kind
from gfdit.migration.parts import ArtifactParts
from gfdit.omni.artifact_store import ArtifactStore
from gfdit.omni.compiled_blocks import num_compilations, num_graph_breaks
from gfdit.omni.device_meter import DeviceMeter, reclaim_memory
from gfdit.omni.runner import ElasticModelRunner
from gfdit.omni.settings import TemplateSettings
from gfdit.omni.step_graphs import StepGraphs
from gfdit.omni.task_scope import TaskScope
from gfdit.omni.warm_up import Item, WarmUp, WarmUpRun
from gfdit.runtime.executor import Results, TaskError
from gfdit.runtime.host_memory import FreedMemory
from gfdit.runtime.messages import Holding
from gfdit.runtime.streams import Streams


@dataclass(frozen=True, slots=True)
class WorkerPayload:
    """What the engine hands to every worker. One that replaces another runs ``warm_up`` before it is used."""

    od_config: OmniDiffusionConfig
    num_ranks: int
    threads_per_rank: int
    adapter: str | None
    ring: bool = False
    warm_up: WarmUp | None = None
    graph_bytes: int = 0
    verdicts: Verdicts | None = None
    workflows: tuple[str, ...] = ()
    templates: TemplateSettings | None = None


class OmniExecutor:
    """See :class:`gfdit.runtime.executor.TaskExecutor` for the contract."""

    streams: Streams

    def __init__(self, rank: int, comm: GroupFreeComm, payload: WorkerPayload) -> None:
        od_config = payload.od_config
        if current_omni_platform.device_type == "cpu":
            torch.set_num_threads(payload.threads_per_rank)
        load_omni_general_plugins()
        freeze_gc_heap()  # modules stay: a collection looks at what requests leave, soon and in little time
        _be_alone(od_config)
        register_pipeline(od_config)
        self.rank = rank
        self.comm = comm
        self.store = ArtifactStore()
        self.worker = WorkerWrapperBase(
            gpu_id=rank,
            od_config=od_config,
            base_worker_class=worker_on(comm.device),
            worker_extension_cls=od_config.worker_extension_cls,
            custom_pipeline_args=od_config.custom_pipeline_args,
        )
        runner = self.worker.model_runner
        assert isinstance(runner, ElasticModelRunner), "the engine selects the elastic model runner"
        self.runner = runner
        self.device = runner.device
        self.adapter = make_adapter(od_config, payload.num_ranks, payload.adapter, ring=payload.ring)
        if isinstance(self.adapter, ForwardAdapter) and payload.verdicts is not None:
            self.adapter.verdicts = payload.verdicts
            self.adapter.refresh_caches = runner.refresh_caches
        self.adapter.bind(runner.pipeline, self.device)
        if isinstance(self.adapter, ForwardAdapter) and payload.templates is not None:
            self.adapter.templates = Templates(payload.templates.open(), payload.templates.full_blocks)
        scope, adapter = TaskScope.alone(rank, comm), self.adapter
        runner.make_elastic(scope, adapter.sequence_plan, ring=adapter.ring)
        self.graphs: StepGraphs | None = None
        if payload.graph_bytes and adapter.captures_steps:
            if self.device.type != "cuda":
                raise ValueError("gfdit setting 'graph_bytes' needs a GPU: on a CPU there are no graphs")
            self.graphs = StepGraphs(payload.graph_bytes)
            runner.capture_steps(self.graphs)
        # A GPU has an allocator of its own.
        self.freed_memory = FreedMemory() if self.device.type == "cpu" else None
        self.meter = DeviceMeter(self.device) if self.device.type == "cuda" else None
        self._memory_points: list[MemoryPoint] = []
        self.warm_up_s: dict[str, float] = {}
        self._warm_up: WarmUpRun | None = None
        if payload.warm_up is not None:
            run = WarmUpRun(self, payload.warm_up, alone=True)
            run.run_all()
            self.warm_up_s = run.seconds

    # Tasks

    def execute(self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: Mapping[str, bytes]) -> Results:
        calls = [self._call_of(task, payloads) for task in tasks]
        try:
            outputs = self._launch(calls, layout)
        except OmniClientError as error:
            raise TaskError(error.message, error.status_code) from error
        made = []
        for call, output in zip(calls, outputs, strict=True):
            for name, artifact in zip(call.task.outputs, output.artifacts, strict=True):
                self.store.put(name, artifact, layout)
            if output.result is not None and self.rank == layout.ranks[0]:
                made.append((call, output))
        return lambda: {call.task.request_id: self._pack(call, output) for call, output in made}

    def run(self, calls: list[TaskCall], layout: ExecutionLayout) -> list[TaskOutput]:
        """Run one dispatch without touching the store; returns when the device is done with it."""
        outputs = self._launch(calls, layout)
        self._synchronize()
        return outputs

    def _launch(self, calls: list[TaskCall], layout: ExecutionLayout) -> list[TaskOutput]:
        """Give the device all of one dispatch to do.

        Steps share a forward pass as far as their requests allow; every member of ``layout`` splits them alike.
        """
        with nullcontext() if self.meter is None else self.meter.task():
            return self._launch_parts(calls, layout)

    def _launch_parts(self, calls: list[TaskCall], layout: ExecutionLayout) -> list[TaskOutput]:
        outputs: dict[str, TaskOutput] = {}
        for part in self._parts(calls):
            kind = part[0].task.kind
            if self._uses_lora(kind):
                self._activate_lora(self.adapter.sampling_params(part[0]))
            if self.adapter.must_replay(part):  # before this rank is part of anything that others wait for
                with self.alone():
                    self.adapter.replay(part)
            with self.runner.task(layout, decode=kind is TaskKind.DECODE):
                done = self.adapter.execute(part, layout)
            outputs.update(zip((call.task.id for call in part), done, strict=True))
        return [outputs[call.task.id] for call in calls]

    def alone(self) -> AbstractContextManager[None]:
        """What this rank does by itself runs in it."""
        return self.runner.task(ExecutionLayout((self.rank,)))

    def memory_use(self) -> MemoryUse | None:
        return None if self.meter is None else self.meter.use

    def memory_points(self) -> tuple[MemoryPoint, ...]:
        return tuple(self._memory_points)

    def note_memory(self, kind: TaskKind, shape: Shape, cfg: bool, parallel: ParallelSpec, batch: int) -> None:
        """What was launched last was ``batch`` such tasks, and of no request."""
        if (use := self.memory_use()) is not None:
            self._memory_points.append(MemoryPoint(kind, shape, cfg, parallel, batch, use))

    def reclaim(self) -> None:
        reclaim_memory()

    def output_views(self, tasks: tuple[Task, ...]) -> tuple[tuple[str, ArtifactView], ...]:
        changed = []
        for task in tasks:
            for name in task.outputs:
                kind = artifact_kind(task.request_id, name)
                alike = [other for other in task.inputs if artifact_kind(task.request_id, other) == kind]
                view = self._view(name)
                if not alike or self._view(alike[0]) != view:
                    changed.append((name, view))
        return tuple(changed)

    def _view(self, artifact: str) -> ArtifactView:
        return self.store.view(artifact, self.adapter.codec(artifact))

    def _synchronize(self) -> None:
        """Wait for the device. On a GPU only for this lane's stream: copies of the migration lane go on."""
        if self.comm.device.type != "cuda":
            current_omni_platform.synchronize()
        self.comm.synchronize()

    def _parts(self, calls: list[TaskCall]) -> list[list[TaskCall]]:
        if calls[0].task.kind is not TaskKind.DENOISE or not self.runner.takes_masks:
            return [[call] for call in calls]
        return split_by_key(calls, [self.adapter.sampling_params(call) for call in calls])

    def _call_of(self, task: Task, payloads: Mapping[str, bytes]) -> TaskCall:
        inputs = tuple(self.store.get(name) for name in task.inputs)
        request: OmniDiffusionRequest | None = None
        if task.request_id in payloads:
            request = pickle.loads(payloads[task.request_id])
        return TaskCall(task, inputs, request)

    def _pack(self, call: TaskCall, output: TaskOutput) -> bytes:
        """The result as bytes for the engine; large tensors go through shared memory."""
        result = self.runner._prepare_output_for_transport(output.result, self.adapter.sampling_params(call))
        return pickle.dumps(pack_diffusion_output_shm(result))

    def _uses_lora(self, kind: TaskKind) -> bool:
        """Adapters change the transformer; a change of adapter costs, so other tasks leave it as it is.

        A forward that makes more steps than was expected makes them as part of decoding.
        """
        if kind is TaskKind.DENOISE or isinstance(self.adapter, ForwardAdapter):
            return True
        return bool(getattr(self.runner.pipeline, "_lora_components", ()))

    def _activate_lora(self, sampling: Any) -> None:
        """Does nothing when the adapter is the active one already."""
        if self.worker.lora_manager is not None:
            self.worker.lora_manager.set_active_adapter(sampling.lora_request, sampling.lora_scale)

    # Artifacts, on the migration thread

    def export_artifact(self, artifact: str) -> ArtifactParts:
        return self.store.pack(artifact, self.adapter.codec(artifact))

    def import_artifact(self, artifact: str, parts: ArtifactParts, view: ArtifactView) -> None:
        self.store.put(artifact, self.adapter.codec(artifact).unpack(parts, self.device), parts.layout, view)

    def free(self, artifacts: tuple[str, ...]) -> None:
        self.store.drop(artifacts)
        self.adapter.forget(artifacts)
        if self.freed_memory is not None:
            self.freed_memory.bound()

    def holdings(self) -> tuple[Holding, ...]:
        return tuple(
            Holding(name, layout, self._view(name)) for name, layout in self.store.layouts().items() if layout
        )

    def probe(self) -> None:
        """A product of matrices whose outcome is known: what a device in a bad state cannot do."""
        ones = torch.ones(64, 64, device=self.device)
        if float((ones @ ones).sum()) != 64.0**3:
            raise RuntimeError("the device computes wrong numbers")

    # Components

    def load_component(self, name: str, evict: tuple[str, ...]) -> int:
        raise TaskError(f"{name} cannot be loaded: this server has one model, which is there")

    def resident(self) -> tuple[str, ...]:
        return ()

    # Calls

    def call(self, method: str, payload: bytes) -> bytes:
        """A method of this class named ``gfdit_...``, else one of the vLLM-Omni worker."""
        args, kwargs = pickle.loads(payload)
        target = getattr(self if method.startswith("gfdit_") else self.worker, method)
        return pickle.dumps(target(*args, **kwargs))

    def gfdit_describe(self) -> dict[str, Any]:
        """What only a loaded model knows; ``warm_up_s``: seconds by task, of a process that replaces another."""
        return {
            "sequence_parallel": self.runner.supports_sequence_parallel(),
            "tiling": self.runner.tiling,
            "pid": os.getpid(),
            "warm_up_s": self.warm_up_s,
        }

    def gfdit_artifacts(self) -> dict[str, int]:
        """Bytes held by artifact id."""
        return self.store.sizes()

    def gfdit_memory(self) -> dict[str, int]:
        """Bytes of this process' own memory, and what is kept of it; empty on a GPU."""
        return {} if self.freed_memory is None else asdict(self.freed_memory.measure())

    def gfdit_counters(self) -> dict[str, float]:
        """Of the template store (:meth:`gfdit.templates.TemplateStore.counters`) and of graphs, if any."""
        templates = getattr(self.adapter, "templates", None)
        counters: dict[str, float] = {} if templates is None else dict(templates.store.counters())
        if self.graphs is not None:
            counters["graph_bytes"] = self.graphs.held_bytes
        return counters

    def gfdit_compilations(self) -> dict[str, int]:
        """Graphs that torch has compiled in this process, and how often it had to end one before a block's end."""
        return {"graphs": num_compilations(), "graph_breaks": num_graph_breaks()}

    def gfdit_self_test(self, requests: Sequence[tuple[Signature, list[OmniDiffusionRequest]]]) -> Verdicts:
        """Of this rank's share of ``requests``, two of each signature: how they can be cut."""
        adapter = self.adapter
        assert isinstance(adapter, ForwardAdapter), "only a forward is cut"
        own = requests[self.rank :: self.comm.world_size]
        return {signature: self_test(adapter, pair, self.alone) for signature, pair in own}

    def gfdit_use_verdicts(self, verdicts: Verdicts) -> None:
        """Requests are cut as these say from now on."""
        assert isinstance(self.adapter, ForwardAdapter), "only a forward is cut"
        self.adapter.verdicts = verdicts

    def gfdit_begin_warm_up(self, what: WarmUp) -> list[Item]:
        """What there is to run, the most used first; all ranks run each of it at the same time."""
        self._warm_up = WarmUpRun(self, what)
        return self._warm_up.items

    def gfdit_warm_up(self, item: Item) -> float | str:
        """See :meth:`WarmUpRun.run`."""
        assert self._warm_up is not None, "a warm-up has begun"
        return self._warm_up.run(item)

    def gfdit_end_warm_up(self) -> None:
        """Nothing of it is needed any more."""
        self._warm_up = None

    def close(self) -> None:
        self.runner.restore_groups()
        self.worker.shutdown()


class WorkerOnDevice(DiffusionWorker):
    """vLLM-Omni's worker, which takes the device whose index is its rank, on any device."""

    device_index: ClassVar[int | None] = None
    rank: int

    def init_device(self) -> None:
        rank = self.rank
        if self.device_index is not None:
            self.rank = self.device_index
        try:
            with _groups_of_one():
                super().init_device()
        finally:
            self.rank = rank


def worker_on(device: torch.device) -> type[DiffusionWorker]:
    return type("WorkerOnDevice", (WorkerOnDevice,), {"device_index": device.index})


def _be_alone(od_config: OmniDiffusionConfig) -> None:
    """Give this process a world of torch.distributed to itself, which vLLM-Omni's worker wants and nobody uses.

    Its members would have to start together and end together; ranks are replaced one by one.
    """
    od_config.num_gpus = od_config.parallel_config.data_parallel_size = 1
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(Backend.FAKE, store=store, rank=0, world_size=1)


@contextmanager
def _groups_of_one() -> Iterator[None]:
    """Process groups made meanwhile are of torch's ``fake`` backend, whose collectives of one rank are right.

    vLLM-Omni makes about twenty. Of gloo each would have a thread that wakes a hundred times a second as long as
    the worker lives; of NCCL, a communicator once it is used.
    """
    new_group = torch.distributed.new_group

    def of_one(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | {"backend": Backend.FAKE})

    torch.distributed.new_group = of_one
    try:
        yield
    finally:
        torch.distributed.new_group = new_group


def make_executor(rank: int, comm: GroupFreeComm, payload: bytes) -> OmniExecutor:
    """Factory named in :class:`gfdit.runtime.config.RuntimeConfig`."""
    # By default tqdm makes a lock between processes, whose named semaphore outlives a worker that is killed.
    tqdm.set_lock(threading.RLock())
    return OmniExecutor(rank, comm, pickle.loads(payload))
