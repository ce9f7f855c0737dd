"""Helios: a video in chunks of frames, each denoised with the end of the one before in view.

vLLM-Omni keeps the solver of the running request and two caches on the pipeline. Here the solver travels with the
latents, and the caches are emptied when the text embeddings change that they were made from.

One task is one denoising step of one chunk, at one size if there is a pyramid of sizes. The last step of a chunk
also draws the noise for the next one. Frames are decoded at the end, chunk by chunk: no step needs them.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.models.helios.pipeline_helios import load_json_config
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.input_batch import InputBatch
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.base import TaskCall, TaskOutput, Trajectory
from gfdit.adapters.batching import log_split
from gfdit.adapters.denoise_loop import DenoiseLoopAdapter
from gfdit.adapters.helios_plan import ChunkPlan
from gfdit.adapters.scheduler_waits import WithoutWaits
from gfdit.adapters.step_execution import join_state
from gfdit.core.tasks import Shape, TaskKind, with_candidates

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
        with WithoutWaits():
            self.pipeline.step_scheduler(state, noise)
        state.extra["num_steps_done"] += 1
        if state.chunk_denoise_completed:
            self._end_chunk(state)
        return TaskOutput(self.split(state)[1:])

    def _start_chunk(self, state: StepRequestState) -> None:
        """Draw its noise and set the pipeline's scheduler, this request's own, to its first step."""
        self.pipeline.prepare_next_chunk(state)
        state.scheduler = self.pipeline.scheduler
        for name in [name for name in state.extra if name.startswith("indices_")]:
            state.extra[name] = state.extra[name].to(self.device)  # once, and not at every step

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
