"""Any pipeline task by task, by its own ``forward``.

A request's ``forward`` runs on the ranks of its tasks and stops where a task ends. Where the next task runs on a
rank that it stopped on, it goes on; on any other rank it is replayed up to there
(:mod:`gfdit.adapters.forward.run`). What travels is the request, what its encoders made, and what the last step
made.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import (
    get_classifier_free_guidance_rank,
    get_sequence_parallel_rank,
)
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.errors import OmniClientError

from gfdit.adapters.base import TaskCall, TaskOutput, Trajectory
from gfdit.adapters.batching import log_split
from gfdit.adapters.engine_half import EngineHalf
from gfdit.adapters.forward import seam
from gfdit.adapters.forward.batch import NotAlikeError, Waiting, groups_of, num_rows, together
from gfdit.adapters.forward.families import EXACT_PLANS, Family, family_of
from gfdit.adapters.forward.inpainting import Edit, Inpainting, edit_of, edit_options_of
from gfdit.adapters.forward.known import Known
from gfdit.adapters.forward.overlay import Overlay
from gfdit.adapters.forward.proven import proven_verdicts
from gfdit.adapters.forward.run import Log, Run, Scene
from gfdit.adapters.forward.step_caches import StepCaches
from gfdit.adapters.forward.suspended import Held, Suspended
from gfdit.adapters.forward.templates import NO_FULL_BLOCKS, FullBlocks, Place, Templates, template_of
from gfdit.adapters.forward.verdict import Mode, Signature, Verdicts, has_mask, signature_of
from gfdit.adapters.masked_tokens import (
    FromKept,
    Keeping,
    KeysOfRequests,
    KnownAs,
    Prediction,
    Recording,
    Together,
    blocks_of,
)
from gfdit.comm import operators
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.tasks import Shape, TaskKind, whole_request, with_candidates
from gfdit.templates.keys import TemplateKey

logger = init_logger(__name__)

#: What suspended forwards may hold on one rank.
SUSPENDED_BYTES = 4 << 30
#: What keys and values of tokens that are not computed may hold on one rank.
KEPT_KEYS_BYTES = 8 << 30


class ForwardAdapter(EngineHalf):
    """See :class:`gfdit.adapters.base.ModelAdapter` for the contract."""

    batches: ClassVar[bool] = True
    #: By signature; None before anything is known: every request is cut at its scheduler's steps.
    verdicts: Verdicts | None = None
    #: Whether degrees are offered by plans of transformers that nobody has tried; the engine sets it.
    trusts_plans = False
    #: Makes step caches ready for a request that begins; the worker sets it.
    refresh_caches: Callable[[OmniDiffusionRequest], None] | None = None
    family: Family = Family()

    def __init__(self, od_config: OmniDiffusionConfig, num_ranks: int) -> None:
        super().__init__(od_config, num_ranks)
        self.family = family_of(od_config)
        self.sequence_plan = self.family.sequence_plan
        self.captures_steps = self.family.captures_steps
        self.verdicts = proven_verdicts(od_config)

    # Engine half

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        if has_mask(request) and not (self.family.inpaints or self.family.reads_masks):
            raise ValueError(f"mask_image: {self.od_config.model_class_name} does not inpaint")
        mode = edit_options_of(request).mode
        if mode != "exact" and not self.family.inpaints:
            raise ValueError(f"gfdit.edit.mode {mode}: {self.od_config.model_class_name} does not inpaint")
        made = super().convert(request, max_sp)
        if self._mode_of(request) is None:
            return Trajectory(made.shape, made.num_steps, False, whole_request(request.request_id))
        counts = self._known(request).divided
        specs = tuple(
            spec
            for spec in self.parallel_candidates(made.shape, made.cfg, max_sp)
            if all(count % spec.sp == 0 for count in counts)
            # In a ring no rank has all tokens of its heads.
            and (mode in ("exact", "record") or self.num_heads % spec.sp == 0)
        )
        return replace(made, graph=with_candidates(made.graph, TaskKind.DENOISE, specs))

    def num_steps(self, request: OmniDiffusionRequest) -> int:
        num_steps = self._asked_steps(request)
        if (edit := self._edit_of(request)) is None:
            return num_steps
        if (steps := edit.options.steps) is not None:
            if steps[-1] >= num_steps:
                raise ValueError(f"gfdit.edit.steps must be below num_inference_steps, {num_steps}")
            return len(steps)
        return edit.num_steps(num_steps)

    def computed_percent(self, request: OmniDiffusionRequest, missing: Collection[int] = ()) -> int:
        """Of its tokens, in an average step; of its template ``missing`` steps are not recorded. In steps of 5."""
        if (edit := self._edit_of(request)) is None:
            return 100
        num_steps = edit.num_steps(self._asked_steps(request))
        masked = len(set(self.template_steps(request)) - set(missing)) / num_steps
        share = edit.mask_ratio(*self.shape(request).size[:2])
        return min(100, 5 * math.ceil(20 * (1 - masked + masked * share)))

    def template_bytes_of_step(self, request: OmniDiffusionRequest, value_bytes: int) -> int:
        """About what a step of its template takes, of all heads and branches."""
        config = self.od_config.tf_model_config
        num_blocks = int(config.get("num_layers") or 1) + int(config.get("num_single_layers") or 0)
        num_tokens = self.shape(request).num_tokens * self.family.templates_per_pass
        num_values = 2 * num_blocks * num_tokens * self.num_heads * int(config.get("attention_head_dim") or 64)
        return num_values * value_bytes * (1 + self.uses_cfg(request))

    def template_steps(self, request: OmniDiffusionRequest) -> list[int]:
        """Steps of its template that an edit reads."""
        if (edit := self._edit_of(request)) is None:
            return []
        asked = self._asked_steps(request)
        num_steps = edit.num_steps(asked)
        computed = [step for step in range(num_steps) if not edit.options.computes_all(step, num_steps)]
        return [asked - num_steps + step for step in computed]

    def _asked_steps(self, request: OmniDiffusionRequest) -> int:
        if (known := self._known(request).num_steps) is not None:
            return known
        sampling = request.sampling_params
        asked = (sampling.num_inference_steps if sampling.sigmas is None else len(sampling.sigmas)) or None
        if (verdict := (self.verdicts or {}).get(self._signature(request))) is not None:
            return verdict.num_steps(asked)
        return asked or self.default_num_steps

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        verdicts = self.verdicts or {}
        if (guided := self._known(request).guided) is not None:
            return guided and any(verdict.splits_guidance for verdict in verdicts.values())
        verdict = verdicts.get(self._signature(request))
        return verdict is not None and verdict.splits_guidance

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        return self._known(request).shape

    def _known(self, request: OmniDiffusionRequest) -> Known:
        return self.family.look(self.od_config, request, self.family.default_shape)

    def parallel_candidates(self, shape: Shape, cfg: bool, max_sp: int | None) -> tuple[ParallelSpec, ...]:
        """Sequence parallelism only where it was shown to be right: the self-test is of one rank."""
        is_exact = self.sequence_plan is not None or self.od_config.model_class_name in EXACT_PLANS
        return super().parallel_candidates(shape, cfg, max_sp if is_exact or self.trusts_plans else 1)

    def _edit_of(self, request: OmniDiffusionRequest) -> Edit | None:
        return edit_of(request) if self.family.inpaints else None

    def _signature(self, request: OmniDiffusionRequest) -> Signature:
        """A template is no image to a ``forward`` that is made to inpaint."""
        signature = signature_of(request)
        if self._edit_of(request) is not None and signature not in (self.verdicts or {}):
            return signature._replace(image=False)
        return signature

    def _mode_of(self, request: OmniDiffusionRequest) -> Mode | None:
        """How such a request is cut; None: not at all."""
        if self.family.whole:
            return None
        if self.verdicts is None:
            return Mode()
        verdict = self.verdicts.get(self._signature(request))
        return None if verdict is None else verdict.mode

    # Worker half

    def bind(self, pipeline: Any, device: torch.device) -> None:
        self.pipeline = pipeline
        self.device = device
        self._root = attrgetter(self.family.root)(pipeline) if self.family.root else pipeline
        self._denoisers = seam.denoisers_of(self._root, self.family.denoisers)
        if not self._denoisers and not self.family.whole:
            logger.warning("%s has no denoising model under a name that gfdit knows", type(pipeline).__name__)
        cache = self.od_config.cache_backend
        if cache not in (None, "none") and not (self.family.whole or self._caches.holders):
            raise ValueError(f"{type(pipeline).__name__} keeps its {cache} where gfdit does not look for it")
        if self.family.alter is not None:
            self.family.alter(pipeline)
        seam.install(self._root, self._denoisers)
        self.suspended = Suspended(SUSPENDED_BYTES)
        self._kept_keys = KeysOfRequests(KEPT_KEYS_BYTES)
        self.templates: Templates | None = None
        self._layout: ExecutionLayout | None = None
        self._ready: dict[str, Run] = {}
        #: As what keys are known after a step whose tokens were chosen, by its task.
        self._chosen: dict[str, KnownAs | None] = {}

    @cached_property
    def _scene(self) -> Scene:
        """Made at the first request, when everything that a process changes on a pipeline is changed."""
        overlay = Overlay(_each_once(self.pipeline, self._root, *self._denoisers.values()), self._caches.holders)
        clears = [getattr(module, "clear_cross_attention_cache", None) for module in self._denoisers.values()]
        forget = [clear for clear in clears if clear is not None]
        parts = self._root, self.device, overlay, self._caches, self._call_forward, self._adopt, forget
        return Scene(*parts, self.family.masks, self.family.sent, self.family.splits_rows)

    @cached_property
    def _caches(self) -> StepCaches:
        return StepCaches(self._denoisers.values())

    def must_replay(self, calls: list[TaskCall]) -> bool:
        return any(_goes_on(call) and self._suspended(call) is None for call in calls)

    def replay(self, calls: list[TaskCall]) -> None:
        """Bring the forward of each call to where its task begins."""
        self._drop_ready()
        self._ready = {call.task.id: self._resumed(call) for call in calls if _goes_on(call)}

    def execute(self, calls: list[TaskCall], layout: ExecutionLayout) -> list[TaskOutput]:
        self._layout = layout
        run = {
            TaskKind.ENCODE: self.encode,
            TaskKind.DENOISE: self.step,
            TaskKind.DECODE: self.decode,
            TaskKind.REQUEST: self._whole,
        }
        try:
            if len(calls) > 1 and calls[0].task.kind is TaskKind.DENOISE:
                if not self._ready:
                    self.replay(calls)
                if self._caches.holders:
                    log_split("a step cache compares each of them with the step before")
                elif not any(_records(call) for call in calls):
                    self._predict_together(calls)
            return [run[call.task.kind](call) for call in calls]
        finally:
            self._chosen.clear()
            self._drop_ready()

    def _predict_together(self, calls: list[TaskCall]) -> None:
        """Bring all to the end of their noise prediction, which is one call if that is possible, or few.

        Those that compute the tokens under their masks are together with others that do about as many.
        """
        waiting: list[Waiting] = []
        for call in calls:
            if (run := self._ready.get(call.task.id)) is not None:
                self._chosen[call.task.id] = self._choose_tokens(call, run, is_alone=False)
                if (pending := run.to_denoiser()) is not None:
                    waiting.append((run, pending))
        for group in groups_of(waiting):
            try:
                if any(run.settings != group[0][0].settings for run, _ in group):
                    raise NotAlikeError("their pipelines are set otherwise")  # and the first one makes the call
                make = together([pending for _, pending in group], self.family.text_multiple)
            except NotAlikeError as error:
                log_split(str(error))
                continue
            parts = [run.prediction for run, _ in group if run.prediction is not None]
            if parts:
                rows = [num_rows(pending.args, pending.kwargs) for _, pending in group]
                group[0][0].prediction = Together(parts, rows)
            for number, (run, _) in enumerate(group):  # the first one makes the call
                run.go_on(partial(make, number))

    def encode(self, call: TaskCall, mode: Mode | None = None) -> TaskOutput:
        """``mode`` in place of the request's own."""
        assert call.request is not None, f"{call.task.id} has no request"
        request = _with_seed(call.request)
        mode = mode or self._mode_of(request) or Mode()
        run = self._begin(request, mode, ())
        try:
            run.advance()
        except ValueError as error:  # what a client asked for: nothing was computed but its prompt
            raise OmniClientError(str(error)) from error
        conditioning = {"request": request, "mode": mode, "log": tuple(run.log)}
        if run.inpainting is not None and run.inpainting.edit.options.mode == "record":
            return TaskOutput((conditioning, self._template_itself(run)))
        return TaskOutput((conditioning, self._held(run, len(run.log), 0)))

    def step(self, call: TaskCall) -> TaskOutput:
        conditioning, latents = call.inputs
        if edit_options_of(conditioning["request"]).mode == "record":
            self._record(call)
            return TaskOutput((Held(latents),))
        if latents["output"] is not None:  # the pipeline does fewer steps than was expected
            return TaskOutput((Held(latents),))
        run, keys = self._taken(call), None
        if not run.has_ended:
            if self._caches.holders:
                run.set_caches(self._caches.to_go_on_from(latents["caches"], run.first_caches, self.device))
            if is_alone := call.task.id not in self._chosen:
                self._chosen[call.task.id] = self._choose_tokens(call, run, is_alone)
            keys = self._chosen[call.task.id]
            with self._timed(run) if is_alone else nullcontext():
                run.advance()
            if run.has_ended and run.lacks_decoded:
                run = self._replayed(call, decodes=True)
                while not run.advance():
                    pass
        return TaskOutput((self._held(run, len(conditioning["log"]), latents["step"] + 1, keys),))

    # Tokens under a mask

    def _choose_tokens(self, call: TaskCall, run: Run, is_alone: bool) -> KnownAs | None:
        """What the run's next prediction computes; returns as what keys of the others are known after it."""
        inpainting, layout, known_as = run.inpainting, self._layout, None
        run.prediction = None
        if inpainting is None or layout is None or not inpainting.computes_some:
            return None
        step, options = call.inputs[-1]["step"], inpainting.edit.options
        computes_all = options.computes_all(step, inpainting.num_steps)
        if options.mode == "own":
            run.prediction, known_as = self._of_own(call, inpainting, computes_all, layout)
        elif not computes_all and not self._is_all_of_several(inpainting):
            run.prediction = self._of_template(call, run, inpainting, is_alone)
        return known_as

    def _is_all_of_several(self, inpainting: Inpainting) -> bool:
        """Everything is painted, but a pass has the template, too: what was recorded of that knows no edit."""
        return self.family.templates_per_pass > 1 and len(inpainting.tokens) == inpainting.num_tokens

    def _of_own(
        self, call: TaskCall, inpainting: Inpainting, computes_all: bool, layout: ExecutionLayout
    ) -> tuple[Prediction | None, KnownAs | None]:
        """The artifact says by which step on which ranks keys were kept. A rank may have lost its own since."""
        request_id, latents = call.task.request_id, call.inputs[-1]
        known_as: KnownAs | None = latents["keys"]
        if (
            not computes_all
            and known_as is not None
            and known_as.layout == str(layout)
            and self._agreed(self._kept_keys.has(request_id, known_as))[0]
        ):
            return FromKept(self._kept_keys.of(request_id), inpainting.tokens), known_as
        self._kept_keys.drop(request_id)
        step, num_steps = latents["step"], inpainting.num_steps
        if step + 1 >= num_steps or inpainting.edit.options.computes_all(step + 1, num_steps):
            return None, None  # nobody would read what is kept
        known_as = KnownAs(step, str(layout))
        return Keeping(self._kept_keys.new(request_id, known_as)), known_as

    def _of_template(self, call: TaskCall, run: Run, inpainting: Inpainting, is_alone: bool) -> Prediction | None:
        """None where it is not recorded, or one rank cannot read it: then all compute all.

        A request that ``is_alone`` may compute all in some blocks.
        """
        if self.templates is None:
            return None
        request, step = call.inputs[0]["request"], call.inputs[-1]["step"]
        loads = self.templates.of(call.task.request_id, inpainting.tokens)
        place = self._place(run, template_of(request, self.od_config), inpainting.first_step + step)
        is_there = loads.has(place)
        layers = [num_layers for _, num_layers in blocks_of(self.pipeline.transformer)]
        full_s = self.templates.pace.seconds(self._kind(run))
        num_full = loads.num_full_blocks(place, full_s, layers) if is_there and is_alone else 0
        is_there, num_full = self._agreed(is_there, num_full)
        self.templates.pace.num_full_blocks = num_full
        if not is_there:
            return None
        options, num_steps = inpainting.edit.options, inpainting.num_steps
        is_last = step + 1 >= num_steps or options.computes_all(step + 1, num_steps)
        next_place = None if is_last else place._replace(step=place.step + 1)
        assert self._layout is not None
        full = (
            FullBlocks(num_full, sum(layers[:num_full]), self._layout.parallel.sp) if num_full else NO_FULL_BLOCKS
        )
        return loads.prediction(place, next_place, full)

    def _kind(self, run: Run) -> tuple[int, ParallelSpec, bool]:
        """Of steps that take equally long if they compute all tokens."""
        assert run.inpainting is not None and self._layout is not None
        return run.inpainting.num_tokens, self._layout.parallel, run.splits_guidance

    @contextmanager
    def _timed(self, run: Run) -> Iterator[None]:
        """What is launched, if that is a full step of an edit."""
        if self.templates is None or run.inpainting is None or run.prediction is not None:
            yield
            return
        watch = self.templates.pace.begin(self._kind(run), self.device)
        yield
        watch.stop()

    def _place(self, run: Run, template: TemplateKey, step: int) -> Place:
        assert self._layout is not None
        sp, cfg = self._layout.parallel
        branches = (get_classifier_free_guidance_rank(),) if cfg > 1 else range(1 + run.splits_guidance)
        num_heads = self.num_heads // sp
        first = get_sequence_parallel_rank() * num_heads if sp > 1 else 0
        return Place(template, step, tuple(branches), tuple(range(first, first + num_heads)))

    def _record(self, call: TaskCall) -> None:
        """One step of a template, whatever was recorded before."""
        assert self.templates is not None, "the engine refuses to record without a store"
        conditioning = call.inputs[0]
        request, number = conditioning["request"], call.task.step_index
        options = edit_options_of(request)
        step = number if options.steps is None else options.steps[number]
        run = self._begin(request, conditioning["mode"], conditioning["log"], only_step=step)
        try:
            run.advance()
            with self._timed(run):
                run.prediction = recording = Recording()
                run.advance()
            place = self._place(run, template_of(request, self.od_config), step)
            self.templates.record(place, recording, options.precision)
        finally:
            run.end()

    def _template_itself(self, run: Run) -> Held:
        assert run.inpainting is not None
        output = DiffusionOutput(output=run.inpainting.template_pixels())
        run.end()
        return Held({"step": 0, "splits_guidance": False, "keys": None}, log=(), output=output, caches=None)

    def _agreed(self, flag: bool, number: int = 0) -> tuple[bool, int]:
        """Whether all ranks of the layout say so, and the least number.

        On a GPU this waits for what was launched before.
        """
        assert self._layout is not None
        said = torch.tensor([[flag, number, 0.0, 0.0]], device=self.device)
        for group, degree in zip(("sp", "cfg"), self._layout.parallel, strict=True):
            if degree > 1:
                everyone = operators.all_gather(operators.order(self.device), said, group, degree)
                said = everyone.amin(0, keepdim=True)
        all_say, least, *_ = said.flatten().tolist()
        return bool(all_say), int(least)

    def forget(self, artifacts: tuple[str, ...]) -> None:
        for name in artifacts:
            request_id, _, artifact = name.rpartition("/")
            if artifact == "conditioning":
                self._kept_keys.drop(request_id)
                if self.templates is not None:
                    self.templates.drop(request_id)

    def decode(self, call: TaskCall) -> TaskOutput:
        if (output := call.inputs[-1]["output"]) is not None:
            if self.templates is not None:
                self.templates.flush()  # a template is recorded once its own image comes back
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

    def _whole(self, call: TaskCall) -> TaskOutput:
        assert call.request is not None, f"{call.task.id} has no request"
        return TaskOutput(result=self.run_whole(call.request))

    def run_whole(self, request: OmniDiffusionRequest) -> DiffusionOutput:
        """All of it at once, as stock does, but for what it leaves on the pipeline."""
        overlay = self._scene.overlay
        self._scene.put_on(overlay.fresh())
        try:
            return self._call_forward(self._own(_with_seed(request)))
        finally:
            overlay.take_off()

    def planned_steps(self, request: OmniDiffusionRequest, mode: Mode) -> int | None:
        """Timesteps that the request's scheduler has when denoising begins."""
        run = self._begin(_with_seed(request), mode, ())
        try:
            run.advance()
            return run.num_timesteps()
        finally:
            run.end()

    def sampling_params(self, call: TaskCall) -> Any:
        return (call.request or call.inputs[0]["request"]).sampling_params

    # Runs

    def _taken(self, call: TaskCall) -> Run:
        return self._ready.pop(call.task.id, None) or self._resumed(call)

    def _resumed(self, call: TaskCall) -> Run:
        """The forward of ``call``, at the end of the task before."""
        if (run := self._suspended(call)) is not None:
            self.suspended.take(call.inputs[-1])
            return run
        return self._replayed(call, call.task.kind is TaskKind.DECODE)

    def _replayed(self, call: TaskCall, decodes: bool) -> Run:
        conditioning, latents = call.inputs
        log = (*conditioning["log"], *latents["log"])
        run = self._begin(conditioning["request"], conditioning["mode"], log, decodes)
        run.advance()
        return run

    def _suspended(self, call: TaskCall) -> Run | None:
        """The run that can go on with ``call`` on this rank: to the end only one that has all that was decoded."""
        run = self.suspended.at(call.inputs[-1])
        return None if run is not None and run.lacks_decoded and call.task.kind is TaskKind.DECODE else run

    def _begin(
        self,
        request: OmniDiffusionRequest,
        mode: Mode,
        log: Log,
        decodes: bool = False,
        only_step: int | None = None,
    ) -> Run:
        own = self._own(request)
        generator = own.sampling_params.generator
        generators = [generator] if isinstance(generator, torch.Generator) else []
        return Run(self._scene, mode, own, generators, log, decodes, only_step)

    def _own(self, request: OmniDiffusionRequest) -> OmniDiffusionRequest:
        """A copy for one call of ``forward``, which writes into it and draws from its generator."""
        own = copy.copy(request)
        own.prompt = copy.copy(request.prompt)
        own.sampling_params = sampling = copy.deepcopy(request.sampling_params)
        sampling.generator = self.new_generator(sampling)
        return own

    def _held(self, run: Run, num_conditioning: int, step: int, keys: KnownAs | None = None) -> Held:
        """The artifact that ``run`` stopped at, or ended with."""
        said = {"step": step, "splits_guidance": run.splits_guidance, "keys": keys}
        if run.has_ended:
            return Held(said, log=(), output=run.result, caches=None)
        log = tuple(run.log[num_conditioning:])
        caches = self._caches.kept(run.caches()) if self._caches.holders and step else None
        held = Held(said, log=log, output=None, caches=caches)
        self.suspended.keep(held, run)
        return held

    def _drop_ready(self) -> None:
        for run in self._ready.values():
            run.end()
        self._ready.clear()

    def _call_forward(self, request: OmniDiffusionRequest, run: Run | None = None) -> DiffusionOutput:
        if self.refresh_caches is not None:
            self.refresh_caches(request)
        inpainting = None
        if (edit := self._edit_of(request)) is not None:
            inpainting = Inpainting(self.pipeline, edit, None if run is None else run.only_step)
            inpainting.put_on()
            if run is not None:
                run.inpainting = inpainting
        outputs = self.pipeline.forward(DiffusionRequestBatch(requests=[request]))
        output = outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else outputs
        if not isinstance(output, DiffusionOutput):
            raise TypeError(f"{type(self.pipeline).__name__}.forward returned {type(outputs).__name__}")
        if inpainting is not None:
            output.output = inpainting.pasted(output.output)
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


def _goes_on(call: TaskCall) -> bool:
    """Whether it continues a forward that is not over."""
    return bool(call.inputs) and call.inputs[-1]["output"] is None


def _records(call: TaskCall) -> bool:
    return edit_options_of(call.inputs[0]["request"]).mode == "record"


def _each_once(*objects: Any) -> list[Any]:
    return list({id(one): one for one in objects}.values())


def _with_seed(request: OmniDiffusionRequest) -> OmniDiffusionRequest:
    """A request that draws the same wherever it is begun anew."""
    sampling = request.sampling_params
    if sampling.seed is None and sampling.generator is None:
        request = copy.copy(request)
        request.sampling_params = copy.copy(sampling)
        request.sampling_params.seed = int(torch.randint(2**31, ()).item())
    return request
