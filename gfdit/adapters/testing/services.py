"""What lives in the kit's processes: the engine's half of an adapter, the ranks, and the stock pipeline.

Imported in forked processes only: vLLM-Omni is there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.distributed.sp_plan import get_sp_plan_from_model
from vllm_omni.diffusion.registry import get_diffusion_pre_process_func
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.diffusion_worker import WorkerWrapperBase
from vllm_omni.plugins import load_omni_general_plugins

from gfdit.adapters import batching
from gfdit.adapters.base import TaskCall, TaskOutput
from gfdit.adapters.forward.adapter import ForwardAdapter
from gfdit.adapters.forward.families import family_of
from gfdit.adapters.forward.self_test import self_test
from gfdit.adapters.forward.verdict import Verdicts, signature_of
from gfdit.adapters.registry import make_adapter, register_pipeline
from gfdit.adapters.testing.fingerprint import Fingerprint, differences, fingerprint
from gfdit.adapters.testing.host_waits import HostWaits, on_stand_in
from gfdit.adapters.testing.loaded_state import LoadedState, transformers_of
from gfdit.adapters.testing.messages import How, Loaded, Prepared, TaskRun
from gfdit.adapters.testing.outputs import Output
from gfdit.adapters.testing.requests import KitRequest
from gfdit.comm import GroupFreeComm, HeapDescriptor, attach_heap
from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Task, TaskKind, with_candidates
from gfdit.core.tiling import decode_candidates
from gfdit.migration.transfer import migrate
from gfdit.omni.compatibility import check_config
from gfdit.omni.cuts import Pair, pairs_to_try
from gfdit.omni.executor import OmniExecutor, WorkerPayload

ENGINE = "gfdit.omni.engine.ElasticDiffusionEngine"


class EngineService:
    """Builds configurations and requests as vLLM-Omni's engine and gfdit's do; holds the adapter's engine half."""

    def __init__(self, model: str, dtype: str, options: dict[str, Any], num_ranks: int, ring: bool) -> None:
        load_omni_general_plugins()
        self._model = model
        self._dtype = dtype
        self._options = options
        self._num_ranks = num_ranks
        self._ring = ring
        self._od_config = self._build({}, engine_backend=ENGINE)
        check_config(self._od_config)
        self._verdicts: Verdicts | None = None
        self._pre_process = get_diffusion_pre_process_func(self._od_config)

    def elastic_config(self) -> bytes:
        """For the ranks."""
        self._od_config.parallel_config.data_parallel_size = self._od_config.num_gpus = self._num_ranks
        return pickle.dumps(self._od_config)

    def self_test_pairs(self, size: int) -> list[Pair]:
        """What the engine tries when it starts."""
        family = family_of(self._od_config)
        return pairs_to_try(partial(DiffusionEngine._make_dummy_request, self), self._prepared, size, family)

    def pair_like(self, request: KitRequest) -> Pair:
        """Two of the signature of ``request``: it, and one of another seed and number of steps."""
        first, second = family_of(self._od_config).trial_steps
        other = request.but(seed=request.seed + 1, steps=(request.steps or 4) + first - second)
        pair = [self._prepared(one.to_omni(f"pair-{number}")) for number, one in enumerate((request, other))]
        return signature_of(pair[0]), pair

    @property
    def od_config(self) -> OmniDiffusionConfig:
        """For vLLM-Omni's maker of requests."""
        return self._od_config

    def use_verdicts(self, verdicts: Verdicts) -> None:
        self._verdicts = verdicts

    def stock_config(self, degrees: dict[str, int]) -> tuple[bytes, int]:
        """For stock workers of these static degrees, and how many of them there are."""
        od_config = self._build(degrees)
        od_config.num_gpus = od_config.parallel_config.world_size
        return pickle.dumps(od_config), od_config.num_gpus

    def prepare(self, request: KitRequest, request_id: str, adapter: str | None, loaded: Loaded) -> Prepared:
        omni_request = self._prepared(request.to_omni(request_id))
        half = make_adapter(self._od_config, self._num_ranks, adapter, ring=self._ring)
        if isinstance(half, ForwardAdapter) and self._verdicts is not None:
            half.verdicts = self._verdicts
        trajectory = half.convert(omni_request, None if loaded.sequence_parallel else 1)
        decode = decode_candidates(loaded.tiling, trajectory.shape, self._num_ranks)
        graph = with_candidates(trajectory.graph, TaskKind.DECODE, decode)
        graph.check()
        return Prepared(pickle.dumps(omni_request), graph)

    def _prepared(self, request: OmniDiffusionRequest) -> OmniDiffusionRequest:
        return request if self._pre_process is None else self._pre_process(request)

    def _build(self, degrees: dict[str, int], **more: Any) -> OmniDiffusionConfig:
        # What vLLM-Omni takes for ``extras`` unless told is not a dictionary; its own engine always tells.
        options = {"enforce_eager": True, "dtype": self._dtype, "extras": {}, **self._options, **more}
        parallel = {"mask_sp_padding": True, **options.pop("parallel_config", {}), **degrees}
        od_config = OmniDiffusionConfig.from_kwargs(model=self._model, parallel_config=parallel, **options)
        od_config.enrich_config()
        return od_config


class StockService:
    """One rank of the stock pipeline: vLLM-Omni's worker with its own runner, and nothing of gfdit's in it."""

    def __init__(self, rank: int, od_config: bytes) -> None:
        torch.set_num_threads(1)
        load_omni_general_plugins()
        self._od_config: OmniDiffusionConfig = pickle.loads(od_config)
        register_pipeline(self._od_config)
        self._worker = WorkerWrapperBase(
            gpu_id=rank,
            od_config=self._od_config,
            worker_extension_cls=self._od_config.worker_extension_cls,
            custom_pipeline_args=self._od_config.custom_pipeline_args,
        )
        # What leaves the pipeline is compared, not what is left of it after transport.
        self._worker.model_runner._prepare_output_for_transport = lambda output, sampling_params: output

    def generate(self, payload: bytes) -> Output:
        """The whole request in one ``forward``, as the stock engine runs it."""
        for transformer in transformers_of(self._worker.model_runner.pipeline):
            # Helios' caches know tensors by address, where the last request's may live on. Nobody empties them.
            if (clear := getattr(transformer, "clear_cross_attention_cache", None)) is not None:
                clear()
        return Output.of(self._worker.execute_model(pickle.loads(payload), self._od_config))

    def splits_tokens(self) -> bool:
        """Whether a transformer has vLLM-Omni's plan for sequence parallelism."""
        transformers = transformers_of(self._worker.model_runner.pipeline)
        return any(get_sp_plan_from_model(transformer) for transformer in transformers)

    def close(self) -> None:
        self._worker.shutdown()


class KitExecutor(OmniExecutor):
    """The executor of a real worker, but for the transport of results."""

    def _pack(self, call: TaskCall, output: TaskOutput) -> bytes:
        return pickle.dumps(Output.of(output.result))


class RankService:
    """One rank: the executor of a worker process, its collectives and its side of migrations."""

    def __init__(
        self,
        rank: int,
        heap: HeapDescriptor,
        od_config: bytes,
        num_ranks: int,
        adapter: str | None,
        ring: bool,
        comm_timeout_s: float,
    ) -> None:
        self.comm = GroupFreeComm(attach_heap(heap, rank), timeout_s=comm_timeout_s)
        self.comm.warm_up()
        payload = WorkerPayload(pickle.loads(od_config), num_ranks, threads_per_rank=1, adapter=adapter, ring=ring)
        self.executor = KitExecutor(rank, self.comm, payload)
        self._num_ranks = num_ranks
        self._migrations = self.comm.lane("migration")
        self._loaded = LoadedState(self.executor.runner.pipeline)
        self._num_forwards = 0
        for transformer in transformers_of(self.executor.runner.pipeline):
            transformer.register_forward_pre_hook(self._count)
        self._waits: HostWaits | None = None
        self._reasons: list[str] = []
        batching.logger = _Listener(self._reasons)

    def describe(self) -> Loaded:
        runner = self.executor.runner
        return Loaded(runner.supports_sequence_parallel(), runner.tiling)

    def use_adapter(self, path: str | None) -> None:
        """Drive the loaded pipeline by another adapter."""
        self._loaded.restore()
        pipeline = self.executor.runner.pipeline
        adapter = make_adapter(self.executor.runner.od_config, self._num_ranks, path)
        adapter.bind(pipeline, self.executor.device)
        self.executor.adapter = adapter
        self._loaded = LoadedState(pipeline)

    def run(
        self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: dict[str, bytes], how: How
    ) -> TaskRun:
        """One dispatch. A rank that fails wakes its peers; edges among them need :meth:`reset` then."""
        try:
            execute = partial(self._execute, tasks, layout, payloads, how)
            if how.audit:
                outputs, faults = self._audited(tasks, execute)
            else:
                outputs = execute()
                faults = self._faults_of_waiting()
            views = self.executor.output_views(tasks) if self.comm.rank == layout.ranks[0] else ()
        except Exception:
            self.comm.abort(layout.ranks)
            raise
        return TaskRun(outputs, views, self._num_forwards, tuple(self._reasons), faults)

    def move(self, command: Migrate) -> int:
        """Take part in a migration; bytes that came here."""
        try:
            arrived = migrate(
                self._migrations,
                command,
                lambda: self.executor.export_artifact(command.artifact),
                self.executor.device,
            )
        except Exception:
            self._migrations.abort(command.ranks)
            raise
        if arrived is None:
            return 0
        self.executor.import_artifact(command.artifact, arrived.parts, command.view)
        return arrived.num_bytes

    def self_test(self, pairs: list[Pair]) -> Verdicts:
        """Of all of them, on this rank."""
        adapter = self.executor.adapter
        assert isinstance(adapter, ForwardAdapter), "only a forward is cut"
        return {signature: self_test(adapter, pair, self.executor.alone) for signature, pair in pairs}

    def free(self, artifacts: tuple[str, ...]) -> None:
        self.executor.free(artifacts)

    def held(self) -> list[str]:
        """Artifacts on this rank."""
        return sorted(self.executor.store.sizes())

    def fingerprint(self, artifact: str) -> Fingerprint:
        return fingerprint(self.executor.store.get(artifact))

    def sizes(self, artifact: str) -> tuple[int, int]:
        """Bytes of tensors and of metadata that a migration of ``artifact`` would send."""
        parts = self.executor.export_artifact(artifact)
        return sum(tensor.nbytes for tensor in parts.tensors.values()), len(parts.metadata)

    def reset(self, generation: int) -> None:
        """Start all edges afresh, after a failure."""
        peers = [rank for rank in range(self._num_ranks) if rank != self.comm.rank]
        for lane in (self.comm, self._migrations):
            lane.reset(peers, generation)

    def apply(self, fn: Callable[..., Any], args: tuple) -> Any:
        """``fn(executor, *args)``."""
        return fn(self.executor, *args)

    def close(self) -> None:
        self.executor.close()

    def _execute(
        self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: dict[str, bytes], how: How
    ) -> dict[str, Output]:
        if how.fresh:
            self._loaded.restore()
        self._num_forwards = 0
        self._reasons.clear()
        with self._watched(tasks) if how.waits else nullcontext():
            results = self.executor.execute(tasks, layout, payloads)
        self.executor._synchronize()
        return {request_id: pickle.loads(value) for request_id, value in results().items()}

    def _audited(
        self, tasks: tuple[Task, ...], execute: Callable[[], dict[str, Output]]
    ) -> tuple[dict[str, Output], tuple[str, ...]]:
        """Run twice: neither run may change its inputs, and both must make the same of them."""
        inputs = [name for task in tasks for name in task.inputs]
        made = [name for task in tasks for name in task.outputs]
        before = {name: self.fingerprint(name) for name in inputs}
        first = execute()
        first_made = {name: self.fingerprint(name) for name in made}
        second = execute()
        names = ", ".join(task.id for task in tasks)
        faults = [
            f"{names} changes its input {name} in place at: {_listed(paths)}"
            for name in inputs
            if (paths := differences(before[name], self.fingerprint(name)))
        ]
        faults += [
            f"{names} run again makes another {name}, at: {_listed(paths)}"
            for name in made
            if (paths := differences(first_made[name], self.fingerprint(name)))
        ]
        if not all(output.identical(second[name]) for name, output in first.items()):
            faults.append(f"{names} run again returns something else")
        return second, tuple(faults)

    @contextmanager
    def _watched(self, tasks: tuple[Task, ...]) -> Iterator[None]:
        """With an eye on what would wait for a device in a step. Tensors are followed from task to task."""
        if self._waits is None:
            self._waits = HostWaits(self.executor.runner.pipeline)
        self._waits.watching = tasks[0].kind is TaskKind.DENOISE
        with on_stand_in(self.executor, self._waits):
            yield

    def _faults_of_waiting(self) -> tuple[str, ...]:
        if self._waits is None:
            return ()
        found = tuple(self._waits.found)
        self._waits.found.clear()
        return found

    def _count(self, module: torch.nn.Module, args: Any) -> None:
        self._num_forwards += 1


class _Listener:
    """In place of a logger, which says every reason only once."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def info_once(self, template: str, *args: Any) -> None:
        self._heard.append(template % args)


def _listed(paths: list[str], limit: int = 5) -> str:
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(path or "its type" for path in paths[:limit]) + more
