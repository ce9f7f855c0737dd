"""vLLM-Omni's executor interface over the gfdit runtime: starts it, calls its workers, reports its health."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
from vllm_omni.diffusion.registry import DiffusionModelRegistry
from vllm_omni.platforms import current_omni_platform

from gfdit.comm import create_heap
from gfdit.core.components import Component
from gfdit.omni.executor import WorkerPayload
from gfdit.omni.retryable import retryable
from gfdit.omni.settings import Settings, TemplateSettings
from gfdit.omni.vllm_logging import vllm_logging
from gfdit.omni.weights import fetch_weights
from gfdit.runtime import messages as msg
from gfdit.runtime.client import ControlClient, RuntimeDownError
from gfdit.runtime.config import RuntimeConfig, make_run_dir

logger = init_logger(__name__)


def heap_kind(device_type: str) -> str:
    """The heap that ranks on such devices share. Raises ``ValueError`` for devices that have none."""
    kinds = {"cpu": "shared_memory", "cuda": "torch_symmetric"}
    if device_type not in kinds:
        raise ValueError(f"gfdit has no symmetric heap for {device_type!r} devices; known: {', '.join(kinds)}")
    return kinds[device_type]


def check_room(components: Sequence[Component], component_bytes: int | None, device_type: str) -> None:
    """Raises ``ValueError`` where loads in advance could fill a device: only the operator knows what to leave."""
    if components and component_bytes is None and device_type != "cpu":
        whole = sum(one.num_bytes for one in components)
        raise ValueError(
            f"gfdit setting 'component_bytes' is needed on {device_type}: how much of a rank's memory components "
            f"may take, beside what steps need; all of them take {whole} bytes"
        )


class ElasticExecutor(DiffusionExecutor):
    """Owns the control process. The engine's loop thread owns the client once it runs."""

    uses_multiproc = True

    def __init__(
        self,
        od_config: OmniDiffusionConfig,
        settings: Settings,
        num_ranks: int,
        components: Sequence[Component] = (),
        templates: TemplateSettings | None = None,
    ) -> None:
        self.settings = settings
        self.templates = templates
        self.components = list(components)
        self.num_ranks = num_ranks
        self._callbacks: list[Callable[[], None]] = []
        self._failure: str | None = None
        self._closed = False
        self._closing = threading.Lock()
        self._num_calls = 0
        super().__init__(od_config)

    def _init_executor(self) -> None:
        check_room(self.components, self.settings.component_bytes, current_omni_platform.device_type)
        fetch_weights(str(self.od_config.model))
        run_dir = make_run_dir()
        payload = WorkerPayload(
            self.od_config,
            self.num_ranks,
            self._threads_per_rank(),
            self.settings.adapter,
            self.settings.ring,
            graph_bytes=self.settings.graph_bytes,
            workflows=self.settings.workflows,
            templates=self.templates,
        )
        payload_path = run_dir / "worker.pickle"
        payload_path.write_bytes(pickle.dumps(payload))
        device_type = current_omni_platform.device_type
        on_cpu = device_type == "cpu"
        settings = self.settings
        table = settings.comm_table or ""
        if on_cpu and table:
            logger.warning("the table of collectives %s has no effect on a CPU", table)
        self.heap = create_heap(
            heap_kind(device_type), self.num_ranks, selector_table=table, devices=settings.device_names
        )
        if on_cpu:
            self.heap = self.heap.held_open()
        self.client = ControlClient(
            RuntimeConfig(
                run_dir=str(run_dir),
                num_ranks=self.num_ranks,
                model=settings.name_of(str(self.od_config.model)),
                policy=settings.policy,
                policy_args=settings.policy_args,
                admission=settings.admission,
                costs_path=settings.costs,
                timeline_path=settings.timeline,
                record_path=settings.record,
                traces=settings.otlp_endpoint is not None,
                logging=vllm_logging(),
                components=self.components,
                component_bytes=settings.component_bytes,
                worker=f"gfdit.omni.{'workflow_executor' if settings.workflows else 'executor'}:make_executor",
                worker_payload_path=str(payload_path),
                start_method="forkserver" if on_cpu else "spawn",
                preload=["gfdit.omni.preload", *self._pipeline_modules()] if on_cpu else [],
                heap=self.heap.to_json(),
                run_ahead=settings.run_ahead,
                max_artifact_bytes=settings.max_artifact_bytes,
                device_memory_bytes=settings.device_memory_bytes,
                max_queue_s=settings.max_queue_s,
                skips_steps=self.od_config.cache_backend not in (None, "none"),
                max_retries=settings.max_retries,
                checkpoint_every_steps=settings.checkpoint_every_steps,
                # On GPUs all ranks attach to the heap at once: a new process finds no way in.
                restart_workers=on_cpu,
                max_restarts=settings.max_restarts,
                heartbeat_timeout_s=settings.heartbeat_timeout_s,
                task_timeout_s=settings.task_timeout_s,
                policy_timeout_s=settings.policy_timeout_s,
                control_timeout_s=settings.control_timeout_s,
                max_control_restarts=settings.max_control_restarts,
                comm_timeout_s=settings.comm_timeout_s,
                start_timeout_s=settings.start_timeout_s,
            )
        )
        try:
            self.client.wait_ready()
        except BaseException:
            self.shutdown()
            raise
        if not on_cpu:
            # Every rank has attached: from here on nothing is left behind, whatever kills the server.
            self.heap.unlink()

    @property
    def run_dir(self) -> Path:
        return Path(self.client.config.run_dir)

    def change_payload(self, **changes: Any) -> None:
        """From now on a worker that replaces another one starts with these in its :class:`WorkerPayload`."""
        path = Path(self.client.config.worker_payload_path)
        payload = replace(pickle.loads(path.read_bytes()), **changes)
        new = path.with_suffix(".new")
        new.write_bytes(pickle.dumps(payload))
        new.replace(path)  # at once: a worker may be starting

    def _pipeline_modules(self) -> list[str]:
        """Where the pipeline is that every worker makes, if it is one of vLLM-Omni's."""
        known = DiffusionModelRegistry.models.get(str(self.od_config.model_class_name))
        module = getattr(known, "module_name", None)
        return [] if module is None else [module]

    def _threads_per_rank(self) -> int:
        """One rank per core is the aim; ranks that share a core must not also share it with their threads."""
        return self.settings.threads_per_rank or max(1, (os.cpu_count() or 1) // self.num_ranks)

    # Calls

    def begin_call(self, method: str, args: tuple, kwargs: dict[str, Any] | None) -> int:
        """Send a call to every worker; :class:`~messages.CallDone` with the returned id answers it."""
        self._num_calls += 1
        data = pickle.dumps((args, kwargs or {}))
        self.send(msg.CallWorkers(self._num_calls, tuple(range(self.num_ranks)), method, data))
        return self._num_calls

    @staticmethod
    def call_result(done: msg.CallDone, method: str, unique_reply_rank: int | None) -> Any:
        """The values of the workers that there are, or one of them: the first, if the rank asked for is gone.

        Raises ``RuntimeError`` if any worker failed.
        """
        for rank, (ok, value) in enumerate(done.replies):
            if not ok:
                raise RuntimeError(f"{method} failed on rank {rank}: {value.decode()}")
        values = {rank: pickle.loads(value) for rank, (_, value) in enumerate(done.replies) if value != msg.GONE}
        if unique_reply_rank is None:
            return list(values.values())
        return values.get(unique_reply_rank, next(iter(values.values())))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        unique_reply_rank: int | None = None,
        exec_all_ranks: bool = False,
    ) -> Any:
        """Call and wait, for ``start_timeout_s`` unless told how long; only before the engine's loop runs.

        From then on the loop owns the client. Raises ``TimeoutError`` if a rank does not answer in time.
        """
        timeout_s = self.settings.start_timeout_s if timeout is None else timeout
        deadline_s = time.monotonic() + timeout_s
        call_id = self.begin_call(method, args, kwargs)
        while True:
            for message in self.receive(max(0.0, deadline_s - time.monotonic())):
                if isinstance(message, msg.CallDone) and message.call_id == call_id:
                    return self.call_result(message, method, unique_reply_rank)
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"{method} was not answered by every rank within {timeout_s:g} s")

    # The control process, as the engine sees it: one that is gone is always a RuntimeDownError with a sentence

    def send(self, message: msg.EngineMessage) -> None:
        with self._connection():
            self.client.send(message)

    def change(self, change_id: int, changes: dict[str, Any]) -> None:
        with self._connection():
            self.client.change(change_id, changes)

    def receive(self, timeout_s: float) -> list[msg.ControlMessage | msg.Result]:
        with self._connection():
            return self.client.receive(timeout_s)

    def wake(self) -> None:
        """Make a blocked :meth:`receive` return; from any thread, and for nothing once all is shut down."""
        with self._closing:
            if not self._closed:
                self.client.wake()

    @contextmanager
    def _connection(self) -> Iterator[None]:
        if self._closed:
            raise RuntimeDownError(retryable(self._failure or "the engine is shut down"))
        try:
            yield
        except (OSError, EOFError, zmq.ZMQError) as error:
            raise RuntimeDownError(retryable("the connection to the control process is broken")) from error

    # Health

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if self._failure is not None:  # before anybody could be told
            callback()

    def mark_failed(self, reason: str) -> None:
        """The runtime is down: unhealthy from now on."""
        self._failure = reason
        for callback in self._callbacks:
            callback()

    @property
    def is_dead(self) -> bool:
        return self._closed or self._failure is not None

    def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError(f"gfdit runtime is down: {self._failure or 'shut down'}")

    def shutdown(self) -> None:
        with self._closing:  # whoever wakes the loop later would write into a file that has the number by then
            if self._closed:
                return
            self._closed = True
        try:
            self.client.close()
        finally:
            self.heap.unlink()
            if self.templates is not None:
                self.templates.close()

    # vLLM-Omni's synchronous execution, which the elastic engine replaces

    def execute_request(self, scheduler_output: Any) -> Any:
        raise NotImplementedError("the control plane dispatches tasks, not the engine")

    execute_batch = execute_request
    execute_step = execute_request
