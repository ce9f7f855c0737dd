"""``ElasticDiffusionEngine``: vLLM-Omni's engine interface in front of the gfdit control plane.

The base class keeps admission, output streams, aborts and shutdown. This class replaces the serial loop: it
hands requests to the control process and delivers what comes back. It lives in the API server's process, so it
only passes messages on; every scheduling decision is made in the control process.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import queue
import socket
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine, DiffusionExecutionMode, _RpcTask
from vllm_omni.diffusion.ipc import unpack_diffusion_output_shm
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched.interface import DiffusionRequestStatus
from vllm_omni.diffusion.worker.utils import RunnerOutput
from vllm_omni.errors import OmniClientError
from vllm_omni.platforms import current_omni_platform

from gfdit.adapters.forward.adapter import ForwardAdapter
from gfdit.adapters.forward.verdict import has_mask
from gfdit.adapters.limits import check_lora, num_outputs_of, read_images
from gfdit.adapters.options import EditOptions, RequestOptions
from gfdit.adapters.registry import make_adapter
from gfdit.adapters.workflow_requests import WorkflowAdapter
from gfdit.comm.devices import check_devices, names_of
from gfdit.comm.selector_table import SelectorTable
from gfdit.core import commands as cmd
from gfdit.core.events import RequestCancelled
from gfdit.core.json_fields import shown
from gfdit.core.tasks import Request, TaskKind, with_candidates, with_min_sp
from gfdit.core.tiling import Tiling, decode_candidates
from gfdit.observe.logs import put_under_vllm
from gfdit.observe.metrics import SHOWN, ServerMetrics
from gfdit.observe.otlp import Value
from gfdit.observe.snapshot import Snapshot
from gfdit.observe.traces import Traces
from gfdit.observe.tracing import VERSION, Tracing
from gfdit.omni.admin import RUNNING, Admin, Step
from gfdit.omni.compatibility import check_config, check_process, check_symbols
from gfdit.omni.cuts import RememberedCuts, learn_cuts, pairs_to_try, say
from gfdit.omni.launcher import ElasticExecutor, heap_kind
from gfdit.omni.recordings import Recordings
from gfdit.omni.request_table import RequestTable
from gfdit.omni.retryable import retryable
from gfdit.omni.settings import Settings, TemplateSettings
from gfdit.omni.warm_up import OUT_OF_MEMORY, WarmUp
from gfdit.runtime import messages as msg
from gfdit.runtime.client import RuntimeDownError
from gfdit.runtime.guard import guarded, start_guarded
from gfdit.workflow.caching import CACHE_MISS

check_symbols()
logger = init_logger(__name__)

# From the end of a request to its result, which comes by another way.
_RESULT_TIMEOUT_S = 10.0
# Metrics of the workers' own.
_COUNT_EVERY_S = 5.0


class ElasticDiffusionEngine(DiffusionEngine):
    """Selected with ``engine_backend="gfdit.omni.engine.ElasticDiffusionEngine"``."""

    default_diffusion_model_runner_cls = "gfdit.omni.runner.ElasticModelRunner"

    scheduler: RequestTable
    executor: ElasticExecutor

    # Start

    def _init_process_hooks(self, od_config: OmniDiffusionConfig) -> None:
        """The first step of the base constructor: refuse a bad configuration before any process starts."""
        put_under_vllm()
        check_process()
        self.settings = Settings.parse(od_config.additional_config)
        check_config(od_config)
        self.num_ranks = _resolve_ranks(od_config, self.settings)
        self.workflows: WorkflowAdapter | None = None
        if self.settings.workflows:
            self.workflows = WorkflowAdapter.load(list(self.settings.workflows), self.num_ranks)
            self.workflows.limits = self.settings.limits
        self.adapter = make_adapter(od_config, self.num_ranks, self.settings.adapter, ring=self.settings.ring)
        self.adapter.limits = self.settings.limits
        self.templates: TemplateSettings | None = None
        self.recordings: Recordings | None = None
        if isinstance(self.adapter, ForwardAdapter):
            self.adapter.trusts_plans = self.settings.trust_plans
            if (templates := self.settings.make_templates()) is not None:
                self.templates = templates
                budget_bytes = self.settings.template_bytes
                self.recordings = Recordings(templates.open(), self.adapter, self.num_ranks, budget_bytes)
        super()._init_process_hooks(od_config)

    def _resolve_execution_mode(self, od_config: OmniDiffusionConfig) -> DiffusionExecutionMode:
        self.step_execution = False
        self.supports_request_batch = False
        return DiffusionExecutionMode.REQUEST_BATCH

    def _init_executor(self, od_config: OmniDiffusionConfig) -> None:
        components = [] if self.workflows is None else self.workflows.workflows.components({})
        self.executor = ElasticExecutor(od_config, self.settings, self.num_ranks, components, self.templates)

    def _init_scheduler(
        self, od_config: OmniDiffusionConfig, scheduler: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        self.metrics = SHOWN.server = ServerMetrics(self.num_ranks, self._why_not_ready)
        if self.settings.otlp_endpoint is not None:
            self.metrics.tracing = Tracing(self.settings.otlp_endpoint, self._resource(), self.metrics.count_spans)
        self.scheduler = RequestTable(self.metrics)
        self.scheduler.initialize(od_config)

    def _resource(self) -> dict[str, Value]:
        """What traces say of this server."""
        return {
            "service.name": "gfdit",
            "service.version": VERSION,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            "gfdit.model": self.settings.name_of(str(self.od_config.model)),
            "gfdit.policy": self.settings.policy,
            "gfdit.ranks": self.num_ranks,
        }

    def close(self) -> None:
        if self.stop_event is not None:
            self.stop_event.set()
            self.executor.wake()  # else the loop waits for up to a second before it looks
        super().close()
        if self.metrics.tracing is not None:
            self.metrics.tracing.close()

    def _init_runtime_state(self) -> None:
        super()._init_runtime_state()
        self._submissions: queue.Queue[list[msg.Submit]] = queue.Queue()  # what follows is for after a miss
        self._after_miss: dict[str, msg.Submit] = {}  # of requests that try a cache
        self._changes: queue.Queue[tuple[Step, Future[None]]] = queue.Queue()
        self._change: tuple[Step, Future[None]] | None = None  # which the control process has been told
        self._num_changes = 0
        self._results: dict[str, DiffusionOutput] = {}
        self._completed: dict[str, float] = {}  # when that was said
        self._calls: dict[int, _RpcTask] = {}
        self._pauses: list[_RpcTask] = []
        self._counters_call: int | None = None
        self._counted_s = 0.0
        self._num_alive = 0
        self._num_left = self.num_ranks  # ranks that serve, or will again

    def _init_execute_fn(self) -> None:
        """Nothing to choose: tasks are dispatched by the control plane."""

    def run_startup_warmup(self) -> None:
        """Learn from the loaded model what it can do, then run everything once on every rank."""
        try:
            described = self.executor.collective_rpc("gfdit_describe", unique_reply_rank=0)
            self._sequence_parallel: bool = described["sequence_parallel"]
            if self.settings.min_sp > 1 and not self._sequence_parallel:
                raise ValueError(
                    f"gfdit setting 'min_sp' is {self.settings.min_sp}, but {self.od_config.model_class_name} "
                    "has no sequence parallelism"
                )
            self._tiling: Tiling | None = described["tiling"]
            if (
                isinstance(self.adapter, ForwardAdapter)
                and self.workflows is None
                and self.adapter.verdicts is None
            ):
                self._learn_cuts(self.adapter)
            if self.workflows is None and (requests := self._warm_up_requests()):
                limit_s = self.settings.warmup_limit_s
                if limit_s is None:  # on a CPU nothing is compiled
                    limit_s = 3.0 if current_omni_platform.device_type == "cpu" else 60.0
                what = WarmUp(requests, self._sequence_parallel, limit_s, self.settings.min_sp)
                self._warm_up(what)
                self.executor.change_payload(warm_up=what)
            self._start_loop()
        except Exception:
            logger.exception("warm-up failed")
            self.close()
            raise

    def _learn_cuts(self, adapter: ForwardAdapter) -> None:
        """Whether and how the model's requests can be cut, on all ranks and for those that replace them."""
        remembered = RememberedCuts(Path(self.settings.cache_dir), self.od_config)
        call = self.executor.collective_rpc
        if (verdicts := remembered.load()) is None:
            pairs = pairs_to_try(
                self._make_dummy_request,
                super()._prepare_request_for_admission,
                self._warm_up_size() or 512,
                adapter.family,
            )
            verdicts = learn_cuts(
                pairs,
                self.num_ranks,
                self.settings.self_test_limit_s,
                lambda some: call("gfdit_self_test", args=(some,)),
            )
            remembered.save(verdicts)
        say(str(self.od_config.model_class_name), verdicts)
        adapter.verdicts = verdicts
        call("gfdit_use_verdicts", args=(verdicts,))
        self.executor.change_payload(verdicts=verdicts)

    def _warm_up_size(self) -> int:
        if (size := self.settings.warmup_size) is not None:
            return size
        return 128 if current_omni_platform.device_type == "cpu" else 512

    def _warm_up_requests(self) -> tuple[OmniDiffusionRequest, ...]:
        """One without guidance and one with; none if there is to be no warm-up."""
        size = self._warm_up_size()
        make = partial(self._make_dummy_request, height=size, width=size, num_inference_steps=2)
        plain, guided = make(guidance_scale=0.0), make(guidance_scale=5.0)
        if not size or plain is None or guided is None:
            return ()
        guided.prompt["negative_prompt"] = ""
        guided.sampling_params.true_cfg_scale = 4.0
        prepare = super()._prepare_request_for_admission  # they may be larger than any client's
        return tuple([prepare(request) for request in (plain, guided)])

    def _warm_up(self, what: WarmUp) -> None:
        """Item by item, so that ranks need not agree on when the time is over."""
        call, end_s = self.executor.collective_rpc, time.monotonic() + what.limit_s
        left_out: list[str] = []
        most_requests = math.inf
        seconds: dict[str, float] = {}
        for item in call("gfdit_begin_warm_up", args=(what,), unique_reply_rank=0):
            if time.monotonic() > end_s or item.num_requests >= most_requests:
                left_out.append(item.name)
                continue
            by_rank = call("gfdit_warm_up", args=(item,))
            if OUT_OF_MEMORY in by_rank:
                most_requests = item.num_requests
                left_out.append(f"{item.name} ({OUT_OF_MEMORY})")
            else:
                seconds[item.name] = max(by_rank)
        call("gfdit_end_warm_up")
        logger.info("warmed up in %d items, seconds of each: %s", len(seconds), seconds)
        if left_out:
            logger.warning(
                "warm-up ends after warmup_limit_s (%g s) without %d items, which may be slow the first time: %s",
                what.limit_s,
                len(left_out),
                ", ".join(left_out),
            )

    # Requests in: called on the event loop's thread

    def _prepare_request_for_admission(self, request: OmniDiffusionRequest) -> OmniDiffusionRequest:
        """What the model's own preprocessing refuses is the client's mistake: an input image that is missing."""
        try:
            self.settings.limits.check_fields(request.sampling_params)
            _check_generator(request.sampling_params.generator_device)
            check_lora(request.sampling_params.lora_request)
            read_images(request.prompt)
            return super()._prepare_request_for_admission(request)
        except OmniClientError:
            self.metrics.refused("invalid")
            raise
        except ValueError as error:
            self.metrics.refused("invalid")
            raise OmniClientError(str(error)) from error

    def _add_prepared_request(self, request: OmniDiffusionRequest) -> str:
        """Check and convert the request, enter it in the table and queue it for the control process.

        Raises ``OmniClientError``: HTTP 400 naming the field for what the client got wrong, 413 for more input
        than a request may have, 429 for a request too many.
        """
        arrival_s = time.monotonic()
        if self._submissions.qsize() + self._num_alive >= self.settings.max_requests:
            self.metrics.refused("too_many_requests")
            raise _too_many(f"{self.settings.max_requests} requests are alive already")
        try:
            submissions = self._convert(request, arrival_s)
        except ValueError as error:
            self.metrics.refused("invalid")
            raise OmniClientError(str(error)) from error
        num_bytes = len(submissions[0].payload)
        self._check_payload(num_bytes)
        request_id = super()._add_prepared_request(request)
        self.scheduler.count_payload(request_id, num_bytes)
        self.metrics.arrived(submissions[0].request)
        self._submissions.put(submissions)
        if self.recordings is not None:
            priority = submissions[0].request.priority
            for recording in self.recordings.begin(request, priority):
                self._submissions.put(self._convert(recording, arrival_s))
        self.executor.wake()
        return request_id

    def _convert(self, request: OmniDiffusionRequest, arrival_s: float) -> list[msg.Submit]:
        """What to submit, and, if that tries a cache, what to submit after a miss."""
        extra = request.sampling_params.extra_args
        options = RequestOptions.parse(extra.pop("gfdit", None) if extra else None)
        self._set_edit(request, options)
        max_sp = options.max_sp if self._sequence_parallel else 1
        if self.workflows is not None:
            trajectory = self.workflows.convert(request, max_sp, options)
        elif options.workflow is not None:
            raise ValueError(f"gfdit.workflow is {options.workflow!r}, but this server has no workflows")
        else:
            trajectory = self.adapter.convert(request, max_sp)
        shape = trajectory.shape
        if isinstance(self.adapter, ForwardAdapter) and self.workflows is None:
            missing = () if self.recordings is None else self.recordings.missing(request)
            shape = shape._replace(computed_percent=self.adapter.computed_percent(request, missing))
        min_sp = max(self.settings.min_sp, options.min_sp or 1)
        num_decoders = min(self.num_ranks, options.max_sp or self.num_ranks)
        tried = (trajectory.graph, trajectory.after_miss)
        graphs = [with_min_sp(graph, min_sp) for graph in tried if graph is not None]
        if self.workflows is None:
            specs = decode_candidates(self._tiling, shape, num_decoders)
            graphs = [with_candidates(graph, TaskKind.DECODE, specs) for graph in graphs]
        deadline_s = None if options.deadline_ms is None else arrival_s + options.deadline_ms / 1000.0
        wire_request = Request(
            id=request.request_id,
            model=trajectory.workflow or self.settings.name_of(str(self.od_config.model)),
            shape=shape._replace(num_outputs=num_outputs_of(request.sampling_params)),
            num_steps=trajectory.num_steps,
            arrival_s=arrival_s,
            cfg=trajectory.cfg,
            deadline_s=deadline_s,
            priority=options.priority,
            slo_class=options.slo_class,
        )
        payload = trajectory.payload or pickle.dumps(request)
        return [msg.Submit(wire_request, graph, payload) for graph in graphs]

    def _set_edit(self, request: OmniDiffusionRequest, options: RequestOptions) -> None:
        """How workers are to make it: as it says, else as the server's setting does."""
        if options.edit is None and not (self.settings.edit and has_mask(request)):
            return
        edit = {**self.settings.edit, **(options.edit or {})}
        if EditOptions.parse(edit).reads_template and self.recordings is None:
            raise ValueError(f"gfdit.edit.mode is {edit['mode']!r}, but this server keeps no templates")
        sampling = request.sampling_params
        sampling.extra_args = {**(sampling.extra_args or {}), "gfdit": {"edit": edit}}

    def _check_payload(self, num_bytes: int) -> None:
        """Prompt and input images are kept in three processes until the request ends."""
        settings = self.settings
        if num_bytes > settings.max_payload_bytes:
            self.metrics.refused("payload_too_large")
            message = (
                f"prompt and input images take {num_bytes} bytes, at most {settings.max_payload_bytes} are allowed"
            )
            raise OmniClientError(message, status_code=413, error_type="PayloadTooLarge")
        if self.scheduler.payload_bytes + num_bytes > settings.max_queued_bytes:
            self.metrics.refused("too_many_bytes")
            raise _too_many(f"prompts and input images of requests take {settings.max_queued_bytes} bytes already")

    def abort(self, request_id: Any) -> None:
        super().abort(request_id)
        self.executor.wake()

    def _submit_rpc(self, *args: Any, **kwargs: Any) -> _RpcTask:
        task = super()._submit_rpc(*args, **kwargs)
        if self._closed:  # there may be no loop any more to take it
            super()._fail_pending_rpcs(RuntimeDownError(retryable("the engine is down")))
        self.executor.wake()
        return task

    def _why_not_ready(self) -> str | None:
        """See :meth:`ServerMetrics.why_not`; from any thread."""
        if self._closed or self.executor.is_dead:
            return "the engine is down"
        if not self._loop_started:
            return "starting"
        return "paused" if self._scheduling_paused else None

    def begin_change(self, step: Step) -> Future[None]:
        """See :class:`gfdit.omni.admin.Engine`; from any thread."""
        future: Future[None] = Future()
        self._changes.put((step, future))
        if self._closed:  # there may be no loop any more to take it
            self._fail_changes(RuntimeDownError(retryable("the engine is down")))
        self.executor.wake()
        return future

    # The loop: the only thread that talks to the control process from here on

    def _start_loop(self) -> None:
        """With the engine and not, as in vLLM-Omni, with its first request: a server that nobody has used yet must
        see its control process end, too."""
        self.stop_event = threading.Event()
        model = None if self.workflows else self.settings.name_of(str(self.od_config.model))
        RUNNING.admin = Admin(self, self.executor.run_dir, model)
        self._loop_started = True
        self.worker_thread = start_guarded(self._busy_loop, name="gfdit-engine", on_error=self._fail)

    async def _check_and_start_background_loop(self) -> None:
        """The loop runs already; requests only tell it on which event loop they wait."""
        if self._closed:
            raise RuntimeDownError(retryable("the engine is down"))
        self.main_loop = asyncio.get_running_loop()

    def _busy_loop(self) -> None:
        assert self.stop_event is not None
        while not self.stop_event.is_set():
            for message in self.executor.receive(1.0):
                with guarded(f"taking in {_named(message)}", partial(self._on_bad, message)):
                    self._on_message(message)
            if self._num_left < self.settings.min_ranks:
                left = f"{self._num_left} of {self.num_ranks} ranks are left"
                raise RuntimeDownError(retryable(f"{left}, min_ranks is {self.settings.min_ranks}"))
            self._send_submissions()
            self._process_aborts_queue()
            self._process_rpc_queue()
            self._tell_next_change()
            self._finish_pauses()
            self._fail_late_calls()
            self._fail_without_result()
            self._count_on_workers()
        self._fail_pending_rpcs(RuntimeError("DiffusionEngine is shutting down."))

    def _fail(self, error: BaseException) -> None:
        """The loop has ended: unhealthy from now on, and whoever waits is told."""
        known = isinstance(error, RuntimeDownError)
        reason = str(error) if known else f"the engine's loop ended by {type(error).__name__}"
        self.executor.mark_failed(reason)
        self._fail_engine(RuntimeDownError(retryable(reason)))

    def _on_bad(self, message: msg.ControlMessage | msg.Result, error: BaseException) -> None:
        """A message that cannot be taken in fails the request that it is about, and nothing else."""
        match message:
            case Snapshot() | Traces() | msg.CallDone():
                pass
            case _ if (request_id := getattr(message, "request_id", None)) is not None:
                if self._is_live(request_id):  # there, too
                    self.executor.send(RequestCancelled(request_id))
                self._fail_request(request_id, error)

    def _fail_request(self, request_id: str, error: BaseException) -> None:
        """Answer the client for something that went wrong on this side."""
        self._completed.pop(request_id, None)
        self._results.pop(request_id, None)
        if self._is_live(request_id):
            self.scheduler.finish_requests(request_id, DiffusionRequestStatus.FINISHED_ERROR)
            self._finalize_finished_request(request_id)
        if isinstance(error, OSError):  # most likely its shared memory, which went with a worker
            output = DiffusionOutput(error=retryable("the result was lost"), error_status_code=503)
        else:
            output = DiffusionOutput(error=f"the engine failed at this request: {type(error).__name__}: {error}")
        self._put_output(request_id, output)

    def _send_submissions(self) -> None:
        while not self._scheduling_paused and not self._submissions.empty():
            submission, *after_miss = self._submissions.get()
            request_id = submission.request.id
            if self._is_live(request_id) or self._is_recording(request_id):
                with guarded(f"submitting {request_id!a}", partial(self._fail_request, request_id)):
                    self.executor.send(submission)
                    self._num_alive += 1
                    self._after_miss.update((request_id, other) for other in after_miss)

    def _is_recording(self, request_id: str) -> bool:
        return self.recordings is not None and request_id in self.recordings

    def _is_live(self, request_id: str) -> bool:
        state = self.scheduler.get_request_state(request_id)
        return state is not None and not state.is_finished()

    def _on_message(self, message: msg.ControlMessage | msg.Result) -> None:
        match message:
            case cmd.StartRequest(request_id, queue_wait_s):
                self._on_started(request_id, queue_wait_s)
            case msg.Result(request_id, value):
                # Unpacked even for an aborted request: that is what releases its shared memory.
                result = unpack_diffusion_output_shm(pickle.loads(value))
                if self._is_live(request_id):
                    self._results[request_id] = result
                    self._deliver_if_complete(request_id)
            case cmd.CompleteRequest() | cmd.CancelRequest() | cmd.RejectRequest() | cmd.FailRequest():
                self._on_ended(message)
            case msg.Reconfigured(_, error):
                self._on_changed(error)
            case Snapshot():
                self.metrics.take(message)
                self._num_left = self.num_ranks - message.num_gone
            case Traces():
                if self.metrics.tracing is not None:
                    self.metrics.tracing.take(message)
            case msg.CallDone(call_id) if call_id == self._counters_call:
                self._counters_call = None
                self.metrics.take_worker_counters(self.executor.call_result(message, "gfdit_counters", None))
            case msg.CallDone(call_id):
                if (task := self._calls.pop(call_id, None)) is not None:  # else it was given up
                    self._on_call_done(task, message)

    def _tell_next_change(self) -> None:
        """One after the other: each is made upon the one before."""
        if self._change is None and not self._changes.empty():
            self._change = self._changes.get()
            self._num_changes += 1
            self.executor.change(self._num_changes, self._change[0].control)

    def _on_changed(self, error: str) -> None:
        assert self._change is not None, "a change is under way"
        (step, future), self._change = self._change, None
        if error:
            future.set_exception(ValueError(error))
            return
        self.settings = step.settings
        for adapter in (self.adapter, self.workflows):
            if adapter is not None:
                adapter.limits = step.settings.limits
        future.set_result(None)

    def _fail_changes(self, error: BaseException) -> None:
        while not self._changes.empty():
            with suppress(queue.Empty):
                self._changes.get_nowait()[1].set_exception(error)

    def _on_started(self, request_id: str, queue_wait_s: float) -> None:
        with self._cv:
            known = self.scheduler.mark_running(request_id, queue_wait_s)
            state = self.scheduler.get_request_state(request_id)
            self.metrics.started(request_id, queue_wait_s)
            self._scheduler_num_waiting_reqs = self.scheduler.num_waiting_requests()
        if known and getattr(state.req.sampling_params, "emit_request_lifecycle", False):
            self._put_output(request_id, DiffusionOutput(finished=False, request_started=True))

    def _on_ended(self, message: msg.RequestEnd) -> None:
        self._num_alive -= 1
        request_id = message.request_id
        if self.recordings is not None and request_id in self.recordings:
            is_whole = isinstance(message, cmd.CompleteRequest)
            self.recordings.end(request_id, None if is_whole else _error_output(message).error)
            return
        is_live = self._is_live(request_id)
        after_miss = self._after_miss.pop(request_id, None)
        missed = isinstance(message, cmd.FailRequest) and message.status_code == CACHE_MISS
        if is_live and missed and after_miss is not None:
            self._submissions.put([after_miss])
            return
        if is_live and isinstance(message, cmd.CompleteRequest):
            self._completed[request_id] = time.monotonic()
            self._deliver_if_complete(request_id)
            return
        self._results.pop(request_id, None)  # of a last task that was done and lost all the same
        if is_live:
            self._count_ending(message)
            self._finish(request_id, _error_output(message), DiffusionRequestStatus.FINISHED_ERROR)

    def _count_ending(self, message: msg.RequestEnd) -> None:
        """One that is not completed: what the table of requests does not know of it."""
        request_id = message.request_id
        if isinstance(message, cmd.RejectRequest):
            self.metrics.ended(request_id, "rejected", "admission")
        elif isinstance(message, cmd.FailRequest) and not self.metrics.has_started(request_id):
            reasons = {400: "too_large", 503: "queue_timeout" if message.waited else "unavailable"}
            reason = reasons.get(message.status_code, "")
            self.metrics.ended(request_id, "rejected" if reason else "failed", reason)

    def _deliver_if_complete(self, request_id: str) -> None:
        """Result and terminal message come over two sockets, in either order."""
        if request_id in self._completed and request_id in self._results:
            del self._completed[request_id]
            result = self._results.pop(request_id)
            self._finish(request_id, result, DiffusionRequestStatus.FINISHED_COMPLETED)

    def _fail_without_result(self) -> None:
        """A worker that was killed may have said that it was done and not have sent the result."""
        now_s = time.monotonic()
        for request_id, completed_s in list(self._completed.items()):
            if now_s - completed_s > _RESULT_TIMEOUT_S:
                del self._completed[request_id]
                error = DiffusionOutput(
                    error=retryable("the result was lost with its worker"), error_status_code=503
                )
                self._finish(request_id, error, DiffusionRequestStatus.FINISHED_ERROR)

    def _finish(self, request_id: str, output: DiffusionOutput, status: DiffusionRequestStatus) -> None:
        with self._cv:
            self.scheduler.finish_requests(request_id, status)
            runner_output = RunnerOutput(request_id, finished=True, result=output)
            final = self._finalize_finished_request(request_id, runner_output)
        self._put_output(request_id, final)

    def _abort_requests(self, request_ids: Any) -> None:
        """Answer the client at once; the control plane frees the ranks at the next step boundary."""
        request_ids = [request_ids] if isinstance(request_ids, str) else list(dict.fromkeys(request_ids))
        for request_id in request_ids:
            if not self._is_live(request_id):
                continue
            self.executor.send(RequestCancelled(request_id))
            self._completed.pop(request_id, None)
            self._results.pop(request_id, None)
            self.scheduler.finish_requests(request_id, DiffusionRequestStatus.FINISHED_ABORTED)
            self._put_output(request_id, self._finalize_finished_request(request_id))

    # Calls to workers

    def _run_rpc_task(self, task: _RpcTask) -> None:
        """Start a call; its answer arrives as a message, so requests go on meanwhile."""
        if task.future.done():
            return
        with guarded(f"calling {task.method}", partial(_answer, task, None)):
            if task.deadline is not None and time.monotonic() > task.deadline:
                raise TimeoutError(f"the time for {task.method} was over before it could be called")
            if task.method == "pause_scheduler":
                self._pauses.append(task)
            elif task.method == "resume_scheduler":
                _answer(task, self._open_scheduling_gate())
            else:
                self._calls[self.executor.begin_call(task.method, task.args, task.kwargs)] = task
                if task.deadline is None:
                    task.deadline = time.monotonic() + self.settings.start_timeout_s

    def _on_call_done(self, task: _RpcTask, done: msg.CallDone) -> None:
        with guarded(f"calling {task.method}", partial(_answer, task, None)):
            _answer(task, self.executor.call_result(done, task.method, task.unique_reply_rank))

    def _count_on_workers(self) -> None:
        """Where workers count something: templates, graphs."""
        if (self.recordings is None and not self.settings.graph_bytes) or self._counters_call is not None:
            return
        if (now_s := time.monotonic()) > self._counted_s + _COUNT_EVERY_S:
            self._counted_s = now_s
            self._counters_call = self.executor.begin_call("gfdit_counters", (), {})

    def _fail_late_calls(self) -> None:
        """Give up waiting for answers; ranks that are still at it are the control process's affair."""
        now_s = time.monotonic()
        for call_id, task in list(self._calls.items()):
            if task.deadline is not None and now_s > task.deadline:
                del self._calls[call_id]
                _answer(task, None, TimeoutError(f"{task.method} was not answered by every rank in time"))

    def _finish_pauses(self) -> None:
        """A pause is complete once no request is left in the control plane: no device work is in flight."""
        if self._num_alive == 0:
            while self._pauses:
                _answer(self._pauses.pop(), None)

    def _fail_pending_rpcs(self, exc: BaseException) -> None:
        """Also those that are under way."""
        super()._fail_pending_rpcs(exc)
        if self._change is not None:
            self._changes.put(self._change)
            self._change = None
        self._fail_changes(exc)
        waiting = [*self._calls.values(), *self._pauses]
        self._calls.clear()
        self._pauses.clear()
        for task in waiting:
            _answer(task, None, exc)


def _answer(task: _RpcTask, value: Any, error: BaseException | None = None) -> None:
    """Unless the caller has given up."""
    with suppress(InvalidStateError):
        if error is None:
            task.future.set_result(value)
        else:
            task.future.set_exception(error)


def _named(message: msg.ControlMessage | msg.Result) -> str:
    """For the log: its kind, and the request that it is about."""
    request_id = getattr(message, "request_id", None)
    return type(message).__name__ + ("" if request_id is None else f" of request {request_id}")


def _too_many(what: str) -> OmniClientError:
    return OmniClientError(f"{what} (retry after 1 s)", status_code=429, error_type="TooManyRequests")


def _error_output(message: msg.RequestEnd) -> DiffusionOutput:
    match message:
        case cmd.RejectRequest(_, reason, retry_after_s):
            wait = "" if retry_after_s is None else f" (retry after {math.ceil(retry_after_s)} s)"
            return DiffusionOutput(
                error=f"request rejected: {reason}{wait}", error_status_code=429, error_type="TooManyRequests"
            )
        case cmd.FailRequest(_, error, status_code):
            text = retryable(error) if status_code == 503 else error
            return DiffusionOutput(error=text, error_status_code=status_code)
    return DiffusionOutput(error="the request was cancelled", error_status_code=500)


def _check_generator(device: Any) -> None:
    known = list(dict.fromkeys(("cpu", current_omni_platform.device_type)))
    if device is not None and device not in known:
        raise ValueError(f"generator_device must be {' or '.join(known)}, got {shown(device)}")


def _resolve_ranks(od_config: OmniDiffusionConfig, settings: Settings) -> int:
    """The number of ranks, with the configuration set to a full replica on each.

    Raises ``ValueError`` for a degree of more ranks than there are, for more ranks than this machine has devices,
    for devices that it does not have or that have no symmetric heap, and for a wrong table of collectives.
    """
    num_ranks = settings.ranks or od_config.parallel_config.data_parallel_size or od_config.num_gpus or 1
    if settings.min_sp > num_ranks:
        raise ValueError(f"gfdit setting 'min_sp' is {settings.min_sp}, but there are {num_ranks} ranks")
    if settings.min_ranks > num_ranks:
        raise ValueError(f"gfdit setting 'min_ranks' is {settings.min_ranks}, but there are {num_ranks} ranks")
    num_devices = current_omni_platform.get_device_count()
    if names := settings.device_names:
        if current_omni_platform.device_type == "cpu":
            raise ValueError(f"gfdit setting 'devices' names GPUs ({settings.devices}), and ranks are on a CPU")
        check_devices(num_ranks, names_of(names, num_ranks))
    elif num_ranks > num_devices:
        raise ValueError(f"gfdit was asked for {num_ranks} ranks but this machine has {num_devices} devices")
    heap_kind(current_omni_platform.device_type)
    if settings.comm_table is not None:
        SelectorTable.load(Path(settings.comm_table))
    od_config.parallel_config.data_parallel_size = num_ranks
    od_config.num_gpus = num_ranks
    return num_ranks
