"""Any pipeline task by task, by its own ``forward``.

A request's ``forward`` runs on the ranks of its tasks and stops where a task ends. Where the next task runs on a rank
that it stopped on, it goes on; on any other rank it is replayed up to there (:mod:`gfdit.adapters.forward.run`). What
travels is the request, what its encoders made, and what the last step made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from gfdit.adapters.base import TaskCall, TaskOutput
from gfdit.adapters.forward import seam
from gfdit.adapters.forward.overlay import Overlay
from gfdit.adapters.forward.run import Log, Mode, Run, Scene
from gfdit.adapters.forward.suspended import Held, Suspended
from gfdit.adapters.step_execution import StepExecutionAdapter
from gfdit.comm import operators
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import TaskKind

logger = init_logger(__name__)

#: What suspended forwards may hold on one rank.
SUSPENDED_BYTES = 4 << 30


class ForwardAdapter(StepExecutionAdapter):
    """See :class:`gfdit.adapters.base.ModelAdapter` for the contract."""

    batches: ClassVar[bool] = False
    replays: ClassVar[bool] = True
    mode: Mode = Mode()

    # Worker half

    def bind(self, pipeline: Any, device: torch.device) -> None:
        self.pipeline = pipeline
        self.device = device
        denoisers = seam.denoisers_of(pipeline)
        if not denoisers:
            raise ValueError(f"{type(pipeline).__name__} has no denoising model under a name that gfdit knows")
        seam.install(pipeline, denoisers)
        self.suspended = Suspended(SUSPENDED_BYTES)
        overlay = Overlay([pipeline, *denoisers.values()])
        self._scene = Scene(pipeline, device, overlay, self._call_forward, self._adopt)
        self._ready: dict[str, Run] = {}

    def ready(self, calls: list[TaskCall]) -> None:
        """Bring the forward of each call to where its task begins; to be called while this rank is alone."""
        self._drop_ready()
        for call in calls:
            if call.inputs and call.inputs[-1]["output"] is None:
                self._ready[call.task.id] = self._resumed(call)

    def execute(self, calls: list[TaskCall], layout: ExecutionLayout) -> list[TaskOutput]:
        run = {TaskKind.ENCODE: self.encode, TaskKind.DENOISE: self._step, TaskKind.DECODE: self.decode}
        try:
            return [run[call.task.kind](call) for call in calls]
        finally:
            self._drop_ready()

    def encode(self, call: TaskCall) -> TaskOutput:
        assert call.request is not None, f"{call.task.id} has no request"
        request = _with_seed(call.request)
        run = self._begin(request, ())
        run.advance()
        conditioning = {"request": request, "log": tuple(run.log)}
        return TaskOutput((conditioning, self._held(run, len(run.log), 0)))

    def _step(self, call: TaskCall) -> TaskOutput:
        conditioning, latents = call.inputs
        if latents["output"] is not None:  # the pipeline does fewer steps than it was asked for
            return TaskOutput((Held(latents),))
        run = self._taken(call)
        run.advance()
        return TaskOutput((self._held(run, len(conditioning["log"]), latents["step"] + 1),))

    def decode(self, call: TaskCall) -> TaskOutput:
        if (output := call.inputs[-1]["output"]) is not None:
            return TaskOutput(result=output)
        run = self._taken(call)
        num_steps = run.num_steps
        while not run.advance():
            pass
        if run.num_steps > num_steps:
            logger.warning_once(
                "%s makes more steps than gfdit expects: %d of %d ran as part of decoding",
                type(self.pipeline).__name__,
                run.num_steps - num_steps,
                run.num_steps,
            )
        return TaskOutput(result=run.result)

    def sampling_params(self, call: TaskCall) -> Any:
        return (call.request or call.inputs[0]["request"]).sampling_params

    # Runs

    def _taken(self, call: TaskCall) -> Run:
        return self._ready.pop(call.task.id, None) or self._resumed(call)

    def _resumed(self, call: TaskCall) -> Run:
        """The forward of ``call``, at the end of the task before."""
        conditioning, latents = call.inputs
        if (run := self.suspended.take(latents)) is not None:
            return run
        run = self._begin(conditioning["request"], (*conditioning["log"], *latents["log"]))
        run.advance()
        return run

    def _begin(self, request: OmniDiffusionRequest, log: Log) -> Run:
        own = copy.copy(request)
        own.prompt = copy.copy(request.prompt)
        own.sampling_params = sampling = copy.deepcopy(request.sampling_params)
        sampling.generator = self.new_generator(sampling)
        generators = sampling.generator if isinstance(sampling.generator, list) else [sampling.generator]
        return Run(self._scene, self.mode, own, [one for one in generators if one is not None], log)

    def _held(self, run: Run, num_conditioning: int, step: int) -> Held:
        """The artifact that ``run`` stopped at, or ended with."""
        if run.has_ended:
            return Held(step=step, log=(), output=run.result)
        held = Held(step=step, log=tuple(run.log[num_conditioning:]), output=None)
        self.suspended.keep(held, run)
        return held

    def _drop_ready(self) -> None:
        for run in self._ready.values():
            run.end()
        self._ready.clear()

    def _call_forward(self, request: OmniDiffusionRequest) -> DiffusionOutput:
        outputs = self.pipeline.forward(DiffusionRequestBatch(requests=[request]))
        output = outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else outputs
        if not isinstance(output, DiffusionOutput):
            raise TypeError(f"{type(self.pipeline).__name__}.forward returned {type(outputs).__name__}")
        return output

    def _adopt(self) -> Callable[[], None]:
        share = operators.shared_with_thread()
        if self.device.type != "cuda":
            return share
        stream = torch.cuda.current_stream(self.device)

        def adopt() -> None:
            share()
            torch.cuda.set_stream(stream)  # and its device

        return adopt


def _with_seed(request: OmniDiffusionRequest) -> OmniDiffusionRequest:
    """A request that draws the same wherever it is begun anew."""
    sampling = request.sampling_params
    if sampling.seed is None and sampling.generator is None:
        request = copy.copy(request)
        request.sampling_params = copy.copy(sampling)
        request.sampling_params.seed = int(torch.randint(2**31, ()).item())
    return request
