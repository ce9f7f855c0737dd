"""Helios: a video in chunks of frames, each denoised with the end of the one before in view.

vLLM-Omni keeps the solver of the running request and two caches on the pipeline. Here the solver travels with the
latents, and the caches are emptied when the text embeddings change that they were made from.

One task is one denoising step of one chunk, at one size if there is a pyramid of sizes. The last step of a chunk
also draws the noise for the next one. Frames are decoded at the end, chunk by chunk: no step needs them.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.models.helios.pipeline_helios import load_json_config
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.input_batch import InputBatch
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.base import TaskCall, TaskOutput, Trajectory
from gfdit.adapters.batching import log_split
from gfdit.adapters.denoise_loop import DenoiseLoopAdapter
from gfdit.adapters.step_execution import join_state
from gfdit.core.tasks import Shape, TaskKind, with_candidates

# Of the family's VAE: pixels and frames that one latent stands for.
_PIXELS_PER_LATENT = 8
_FRAMES_PER_LATENT = 4
_ALIGNMENT = 16
_PATCH = 2
# Latents (frames, height, width) of which one token is made, by how long ago the frames were.
_HISTORY_PATCHES = ((1, 2, 2), (2, 4, 4), (4, 8, 8))

# In ``state.extra``: what changes from chunk to chunk, and what a chunk's steps need besides.
_OF_A_REQUEST = ("history_latents", "image_latents", "total_generated_latent_frames", "num_steps_done")
_OF_A_CHUNK = (
    "is_first_chunk",
    "is_second_chunk",
    "latents_history_long",
    "latents_history_mid",
    "latents_history_short",
    "stage1_start_latents",
    "stage2_height",
    "stage2_width",
    "stage2_start_point_list",
    "stage_index",
    "stage_step_index",
)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What a request asks of Helios; field for field what ``prepare_encode`` reads, with its defaults.

    ``height`` and ``width`` in pixels, ``frames_per_chunk`` in latent frames. ``steps`` of the first chunk and of
    every other one. ``history`` are the latent frames in view, the most recent first; ``num_sizes`` is 1 without a
    pyramid.
    """

    height: int
    width: int
    num_chunks: int
    frames_per_chunk: int
    steps: tuple[int, int]
    history: tuple[int, int, int]
    num_sizes: int
    guidance_scale: float
    zero_star: bool

    @classmethod
    def of(cls, request: OmniDiffusionRequest, distilled: bool) -> Self:
        """Raises ``ValueError`` naming what Helios cannot take."""
        sampling = request.sampling_params
        extra = sampling.extra_args or {}
        frames_per_chunk = _whole("num_latent_frames_per_chunk", extra.get("num_latent_frames_per_chunk", 9))
        window = (frames_per_chunk - 1) * _FRAMES_PER_LATENT + 1
        num_frames = _whole("num_frames", sampling.num_frames or extra.get("frame_num", 132))
        pyramid = bool(extra.get("is_enable_stage2", False))
        num_sizes = _whole("pyramid_num_stages", extra.get("pyramid_num_stages", 3)) if pyramid else 1
        height, width = (
            _side(name, given or extra.get(name, default), num_sizes)
            for name, given, default in (("height", sampling.height, 384), ("width", sampling.width, 640))
        )
        guidance_scale = extra.get("guidance_scale", 5.0)
        if sampling.guidance_scale_provided:
            guidance_scale = sampling.guidance_scale
        long, mid, recent = _history(extra.get("history_sizes", [16, 2, 1]))
        return cls(
            height=height,
            width=width,
            num_chunks=-(-num_frames // window),
            frames_per_chunk=frames_per_chunk,
            steps=_steps(sampling, extra, pyramid, num_sizes, distilled),
            history=(recent + 1, mid, long),  # with the first frame, or one more
            num_sizes=num_sizes,
            guidance_scale=float(guidance_scale),
            zero_star=bool(extra.get("use_cfg_zero_star", False)),
        )

    @property
    def shape(self) -> Shape:
        window = (self.frames_per_chunk - 1) * _FRAMES_PER_LATENT + 1
        return Shape(self.height, self.width, self.num_chunks * window)

    @property
    def num_steps(self) -> int:
        first, other = self.steps
        return first + (self.num_chunks - 1) * other

    def token_counts(self) -> list[int]:
        """Tokens of each part that the transformer splits by itself: the chunk at every size, and the history."""
        height, width = self.height // _PIXELS_PER_LATENT, self.width // _PIXELS_PER_LATENT
        counts = [
            self.frames_per_chunk * (height // 2**size // _PATCH) * (width // 2**size // _PATCH)
            for size in range(self.num_sizes)
        ]
        for num_frames, (frames, rows, columns) in zip(self.history, _HISTORY_PATCHES, strict=True):
            counts.append(-(-num_frames // frames) * -(-height // rows) * -(-width // columns))
        return counts


class HeliosAdapter(DenoiseLoopAdapter):
    """Adapter for ``HeliosPipeline``."""

    pipeline_class = "HeliosPipeline"
    separate_prepare = False
    step_extra = frozenset({*_OF_A_REQUEST, *_OF_A_CHUNK})

    def __init__(self, od_config: OmniDiffusionConfig, num_ranks: int) -> None:
        super().__init__(od_config, num_ranks)
        model = str(od_config.model)
        scheduler = load_json_config(model, "scheduler", "scheduler_config.json", os.path.exists(model))
        self._distilled = scheduler.get("scheduler_type") == "dmd"
        self._scheduler: Any = None
        self._cached: tuple[torch.Tensor | None, ...] = (None, None)

    # Engine half

    def plan(self, request: OmniDiffusionRequest) -> ChunkPlan:
        return ChunkPlan.of(request, self._distilled)

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        return self.plan(request).shape

    def num_steps(self, request: OmniDiffusionRequest) -> int:
        return self.plan(request).num_steps

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        return self.plan(request).guidance_scale > 1

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        """Steps have only degrees by which every part divides: Helios pads others with tokens that attention sees.

        A pyramid of sizes and the scaled guidance of CFG-Zero* compute both branches one after the other.
        """
        plan, trajectory = self.plan(request), super().convert(request, max_sp)
        in_parallel = trajectory.cfg and plan.num_sizes == 1 and not plan.zero_star
        counts = plan.token_counts()
        specs = self.parallel_candidates(trajectory.shape, in_parallel, max_sp)
        fitting = tuple(spec for spec in specs if all(count % spec.sp == 0 for count in counts))
        return replace(trajectory, graph=with_candidates(trajectory.graph, TaskKind.DENOISE, fitting))

    # Worker half

    def bind(self, pipeline: Any, device: torch.device) -> None:
        super().bind(pipeline, device)
        self._scheduler = pipeline.scheduler

    def encode(self, call: TaskCall) -> TaskOutput:
        """Text embeddings and, with an input image or video, its latents; then the noise of the first chunk."""
        state = self.new_state(call)
        self.restore_pipeline(state)
        self.pipeline.prepare_encode(state)
        given = state.sampling.extra_args or {}
        state.sampling.extra_args = {name: given[name] for name in given if name not in ("image", "video")}
        state.extra["num_steps_done"] = 0
        self._start_chunk(state)
        return TaskOutput(self.split(state))

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        if len(calls) > 1:
            log_split("Helios denoises one request at a time")
        return [self._denoise(call) for call in calls]

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        extra, vae = state.extra, self.pipeline.vae
        if state.chunk_index != state.total_chunks:
            raise ValueError(f"only {state.chunk_index} of {state.total_chunks} chunks were denoised")
        frames = extra["num_latent_frames_per_chunk"]
        generated = extra["history_latents"][:, :, -frames * state.total_chunks :]
        chunks = [
            chunk.to(extra["vae_dtype"]) / extra["latents_std"] + extra["latents_mean"]
            for chunk in generated.split(frames, dim=2)
        ]
        if extra["output_type"] != "latent":
            chunks = [vae.decode(chunk, return_dict=False)[0] for chunk in chunks]
        return DiffusionOutput(
            output=torch.cat(chunks, dim=2), stage_durations=getattr(self.pipeline, "stage_durations", None)
        )

    def _denoise(self, call: TaskCall) -> TaskOutput:
        state = self.resume(call)
        self.restore_pipeline(state)
        noise = self.pipeline.denoise_step(InputBatch.make_batch([state]), states=[state])
        self.pipeline.step_scheduler(state, noise)
        state.extra["num_steps_done"] += 1
        if state.chunk_denoise_completed:
            self._end_chunk(state)
        return TaskOutput(self.split(state)[1:])

    def _start_chunk(self, state: StepRequestState) -> None:
        """Draw its noise and set the pipeline's scheduler, this request's own, to its first step."""
        self.pipeline.prepare_next_chunk(state)
        state.scheduler = self.pipeline.scheduler

    def _end_chunk(self, state: StepRequestState) -> None:
        """What ``post_decode`` does but for decoding: the chunk becomes history."""
        extra, latents = state.extra, state.latents
        assert latents is not None
        is_first = extra["is_first_chunk"] and extra["image_latents"] is None
        if extra["keep_first_frame"] and (is_first or (extra["is_skip_first_chunk"] and extra["is_second_chunk"])):
            extra["image_latents"] = latents[:, :, 0:1].clone()
        extra["total_generated_latent_frames"] += latents.shape[2]
        extra["history_latents"] = torch.cat([extra["history_latents"], latents], dim=2)
        state.chunk_index += 1
        if not state.request_denoise_completed:
            self._start_chunk(state)
            return
        state.latents = state.scheduler = None
        for name in _OF_A_CHUNK:
            extra.pop(name, None)

    # State

    def new_state(self, call: TaskCall) -> StepRequestState:
        state = super().new_state(call)
        assert call.request is not None
        plan = self.plan(call.request)
        state.sampling.height, state.sampling.width = plan.height, plan.width
        # To prepare_encode a request counts as having named its scale, be it vLLM-Omni's neutral one.
        state.sampling.guidance_scale = plan.guidance_scale
        return state

    def restore_pipeline(self, state: StepRequestState) -> None:
        super().restore_pipeline(state)
        pipeline = self.pipeline
        pipeline.scheduler = copy.deepcopy(self._scheduler) if state.scheduler is None else state.scheduler
        # Keys of the caches are addresses, which mean nothing once the embeddings there are gone: these are kept.
        texts = (state.prompt_embeds, state.negative_prompt_embeds)
        if any(now is not then for now, then in zip(texts, self._cached, strict=True)):
            pipeline.transformer.clear_cross_attention_cache()
            self._cached = texts

    def split(self, state: StepRequestState) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self._distilled:
            state.extra.pop("stage1_start_latents", None)  # only a distilled model goes back to the noise
        conditioning, latents = super().split(state)
        conditioning["extra"].pop("generator", None)  # the request's own, which the latents have
        return conditioning, latents

    def resume(self, call: TaskCall) -> StepRequestState:
        state = join_state(self._with_extra(call))
        state.extra["generator"] = state.sampling.generator
        expected, actual = call.task.step_index, state.extra["num_steps_done"]
        if call.task.kind is TaskKind.DENOISE and expected != actual:
            raise ValueError(f"{call.task.id}: {actual} steps have been made")
        return state


def _steps(
    sampling: Any, extra: dict[str, Any], pyramid: bool, num_sizes: int, distilled: bool
) -> tuple[int, int]:
    """Of the first chunk and of every other one, as the scheduler makes them."""
    if not pyramid:
        asked = sampling.num_inference_steps or extra.get("num_inference_steps", 50)
        count = _whole("num_inference_steps", asked)
        # The scheduler of a distilled model drops the last step, but for a single one.
        count = max(1, count - 1) if distilled else count
        return count, count
    per_size = extra.get("pyramid_num_inference_steps_list", [10, 10, 10])
    if not isinstance(per_size, (list, tuple)) or len(per_size) != num_sizes:
        raise ValueError(
            f"pyramid_num_inference_steps_list must be a list of {num_sizes} numbers, one for each of "
            f"pyramid_num_stages, got {per_size!r}"
        )
    count = sum(_whole("pyramid_num_inference_steps_list", steps) for steps in per_size)
    return (2 * count if distilled and extra.get("is_amplify_first_chunk") else count), count


def _whole(name: str, value: Any) -> int:
    """Raises ``ValueError`` naming the field unless ``value`` is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return int(value)


def _side(name: str, value: Any, num_sizes: int) -> int:
    """In pixels, rounded down as Helios does; every size of a pyramid must be one of whole patches."""
    side = _whole(name, value) // _ALIGNMENT * _ALIGNMENT
    smallest = _ALIGNMENT * 2 ** (num_sizes - 1)
    if not side or side % smallest:
        several = "a multiple of" if num_sizes > 1 else "at least"
        raise ValueError(f"{name} must be {several} {smallest} pixels, got {value}")
    return side


def _history(sizes: Any) -> list[int]:
    if not isinstance(sizes, (list, tuple)) or len(sizes) != len(_HISTORY_PATCHES):
        raise ValueError(f"history_sizes must be a list of {len(_HISTORY_PATCHES)} numbers, got {sizes!r}")
    return sorted((_whole("history_sizes", size) for size in sizes), reverse=True)
