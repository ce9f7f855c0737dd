"""Wan2.2 as a text-to-video pipeline: one transformer or two experts, and FastWan's distilled sampling.

With a checkpoint of the 5B kind a request may bring a first frame. A task of its own encodes it, which may run
beside the text encoder on another rank; every step then has a timestep per token, 0 for the tokens of that frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import PIL.Image
import torch
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import FASTWAN_DMD_TIMESTEPS, build_wan_scheduler
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import StepRequestState
from vllm_omni.platforms import current_omni_platform

from gfdit.adapters.base import TaskCall, TaskOutput, Trajectory
from gfdit.adapters.denoise_loop import DenoiseLoopAdapter
from gfdit.adapters.wan_request import (
    DMD,
    WanCheckpoint,
    WanOptions,
    given_embeds,
    input_image,
    prompt_text,
)
from gfdit.adapters.wan_vae import as_media, decode_video, encode_frame
from gfdit.core.tasks import Shape, TaskKind, artifact_kind, with_encoder

IMAGE = "image"
"""The artifact that the image encoder makes."""

_DEFAULT_MAX_SEQUENCE_LENGTH = 512  # tokens of a prompt


class WanAdapter(DenoiseLoopAdapter):
    """Adapter for ``Wan22Pipeline``."""

    captures_steps = True
    pipeline_class = "Wan22Pipeline"
    # Timesteps on the host, as shares of the training steps, and the step at which the second expert takes over.
    step_extra = frozenset({"noise_levels", "boundary_step"})
    batches = True
    default_guidance_scale: ClassVar[float] = 4.0
    #: Which tasks read the encoded image.
    image_readers: ClassVar[frozenset[TaskKind]] = frozenset({TaskKind.DENOISE, TaskKind.DECODE})

    # Engine half

    @cached_property
    def checkpoint(self) -> WanCheckpoint:
        return WanCheckpoint.of(self.od_config)

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        self.check(request)
        made = super().convert(request, max_sp)
        if input_image(request, "image") is None:
            return made
        graph = with_encoder(made.graph, IMAGE, self.image_readers)
        return Trajectory(made.shape, made.num_steps, made.cfg, graph)

    def check(self, request: OmniDiffusionRequest) -> None:
        """Raises ``ValueError`` naming the field for what the pipeline would ignore or fail at."""
        if not prompt_text(request.prompt) and given_embeds(request.prompt, "prompt_embeds") is None:
            raise ValueError("prompt must not be empty where no prompt_embeds are given")
        if isinstance(request.sampling_params.generator, list):
            raise ValueError("generator must be one generator, also for several videos, not a list")
        self.check_images(request)

    def check_images(self, request: OmniDiffusionRequest) -> None:
        """Raises ``ValueError`` for images that are missing or that the checkpoint has no use for."""
        if input_image(request, "image") is not None and not self.checkpoint.expand_timesteps:
            raise ValueError("image is given, but this checkpoint makes videos of text alone")

    def options(self, request: OmniDiffusionRequest) -> WanOptions:
        return WanOptions.of(request, self.od_config, self.default_guidance_scale)

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        return self.checkpoint.shape(request.sampling_params)

    def num_steps(self, request: OmniDiffusionRequest) -> int:
        return self.options(request).num_steps

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        return self.options(request).guided

    # Worker half

    def bind(self, pipeline: Any, device: torch.device) -> None:
        super().bind(pipeline, device)
        if any(getattr(module, "to_gate_compress", None) is not None for module in pipeline.modules()):
            raise ValueError("gfdit does not support gated video sparse attention (FASTVIDEO_VSA); choose another")

    @property
    def dtype(self) -> torch.dtype:
        """Of what goes into the transformer."""
        return next(expert.dtype for expert in self._experts if expert is not None)

    @property
    def model_config(self) -> Any:
        """The transformer's."""
        return self.pipeline.transformer_config

    @property
    def _experts(self) -> tuple[Any, Any]:
        return self.pipeline.transformer, self.pipeline.transformer_2

    def new_state(self, call: TaskCall) -> StepRequestState:
        state = super().new_state(call)
        assert call.request is not None
        state.sampling.height, state.sampling.width, state.sampling.num_frames = self.shape(call.request).size
        state.extra["options"] = self.options(call.request)
        return state

    # Encode

    def encode(self, call: TaskCall) -> TaskOutput:
        if artifact_kind(call.task.request_id, call.task.outputs[0]) == IMAGE:
            assert call.request is not None
            return TaskOutput(({"extra": self.encode_image(call.request)},))
        return super().encode(call)

    def encode_state(self, state: StepRequestState) -> None:
        """Text embeddings (videos, tokens, width), zero after the prompt's end; negative ones under guidance."""
        prompt = state.prompt
        negative = None if isinstance(prompt, str) else prompt.get("negative_prompt")
        embeds, negative_embeds = (
            given_embeds(prompt, name) for name in ("prompt_embeds", "negative_prompt_embeds")
        )
        guided = state.extra["options"].guided
        text = {
            "negative_prompt": None if negative is None or negative_embeds is not None else [negative],
            "num_videos_per_prompt": self.num_videos(state.sampling),
            "max_sequence_length": state.sampling.max_sequence_length or _DEFAULT_MAX_SEQUENCE_LENGTH,
            "device": self.device,
            "dtype": self.dtype,
        }
        if embeds is None:
            embeds, negative_embeds = self.pipeline.encode_prompt(
                prompt=[prompt_text(prompt)], do_classifier_free_guidance=guided, **text
            )
        else:
            embeds = self._repeated(embeds, state)
            if negative_embeds is not None:
                negative_embeds = self._repeated(negative_embeds, state)
            elif guided:
                _, negative_embeds = self.pipeline.encode_prompt(
                    prompt=[""], do_classifier_free_guidance=True, **text
                )
        state.prompt_embeds, state.negative_prompt_embeds = embeds, negative_embeds
        state.prompt = {"prompt": prompt_text(prompt)}  # images and embeddings would travel with it

    def encode_image(self, request: OmniDiffusionRequest) -> dict[str, Any]:
        """``condition``: the first frame as latents (videos, channels, 1, height, width), float32."""
        shape = self.shape(request)
        image = input_image(request, "image")
        assert image is not None
        image = image.resize((shape.width, shape.height), PIL.Image.Resampling.LANCZOS)
        pixels = self._processor.preprocess(image, height=shape.height, width=shape.width)
        pixels = pixels.repeat_interleave(self.num_videos(request.sampling_params), dim=0)
        return {"condition": encode_frame(self.pipeline.vae, pixels.to(self.device))}

    def num_videos(self, sampling: Any) -> int:
        """Rows of every tensor of a request."""
        return sampling.num_outputs_per_prompt or 1

    def _repeated(self, embeds: torch.Tensor, state: StepRequestState) -> torch.Tensor:
        return embeds.to(self.device, self.dtype).repeat_interleave(self.num_videos(state.sampling), dim=0)

    @property
    def _processor(self) -> VideoProcessor:
        return VideoProcessor(vae_scale_factor=self.pipeline.vae_scale_factor_spatial)

    # Prepare

    def prepare_state(self, state: StepRequestState) -> None:
        options = state.extra["options"]
        state.scheduler = self.new_scheduler(options)
        state.timesteps = state.scheduler.timesteps
        if options.solver == DMD:
            state.timesteps = torch.tensor(FASTWAN_DMD_TIMESTEPS, dtype=torch.float32, device=self.device)
        # On the host, so that no step has to wait for the device to tell which expert is its own.
        num_train_steps = state.scheduler.config.num_train_timesteps
        timesteps = state.timesteps.cpu()
        state.extra["noise_levels"] = [float(timestep) / num_train_steps for timestep in timesteps]
        below = timesteps < options.boundary_ratio * num_train_steps  # timesteps fall
        state.extra["boundary_step"] = len(timesteps) - int(below.sum())
        state.latents = self.noise(state)

    def new_scheduler(self, options: WanOptions) -> Any:
        """One of the request's own: the pipeline's is shared, and keeps what the last request asked for."""
        if options.solver == DMD:
            return self.own_scheduler()
        scheduler = build_wan_scheduler(options.solver, options.flow_shift)
        shift = {"shift": options.flow_shift} if options.solver == "unipc" else {}
        scheduler.set_timesteps(options.num_steps, device=self.device, **shift)
        scheduler.set_begin_index(0)
        return scheduler

    def noise(self, state: StepRequestState) -> torch.Tensor:
        """Initial latents (videos, channels, frames, height, width), float32."""
        sampling, pipeline = state.sampling, self.pipeline
        if sampling.latents is not None:
            return sampling.latents.to(self.device, torch.float32)
        shape = (
            self.num_videos(sampling),
            self.model_config.out_channels,
            (sampling.num_frames - 1) // pipeline.vae_scale_factor_temporal + 1,
            sampling.height // pipeline.vae_scale_factor_spatial,
            sampling.width // pipeline.vae_scale_factor_spatial,
        )
        return self._draw(state, shape, torch.float32)

    def _draw(self, state: StepRequestState, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Noise, video by video from the request's one generator."""
        generators = [state.sampling.generator] * self.num_videos(state.sampling)
        return randn_tensor(shape, generator=generators, device=self.device, dtype=dtype)

    # Denoise

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        first = states[0]
        expert, scale = self.expert(first)
        guided = self._is_guided(first)
        inputs = [self.model_input(state) for state in states]
        common = {
            "hidden_states": _joined([latents for latents, _ in inputs]),
            "timestep": _joined([timestep for _, timestep in inputs]),
            "attention_kwargs": {},
            "return_dict": False,
            "current_model": expert,
            **self.image_kwargs(states),
        }
        positive = _joined([state.prompt_embeds for state in states])
        negative = _joined([state.negative_prompt_embeds for state in states]) if guided else None
        level = first.extra["noise_levels"][first.step_index]
        self.pipeline.record_denoise_step(first.step_index, normalized_timestep=level)
        return self.pipeline.predict_noise_maybe_with_cfg(
            do_true_cfg=guided,
            true_cfg_scale=scale,
            positive_kwargs={**common, "encoder_hidden_states": positive},
            negative_kwargs={**common, "encoder_hidden_states": negative} if guided else None,
            cfg_normalize=False,
        )

    def compatible(self, states: Sequence[StepRequestState]) -> bool:
        return super().compatible(states) and len({self._forward_key(state) for state in states}) == 1

    def _forward_key(self, state: StepRequestState) -> tuple[object, ...]:
        """What must agree for one forward pass: expert, guidance, length of the text, with an image or without."""
        expert, scale = self.expert(state)
        extra = {name: value.shape[1:] for name, value in state.extra.items() if isinstance(value, torch.Tensor)}
        return id(expert), scale, self._is_guided(state), state.prompt_embeds.shape[1:], frozenset(extra.items())

    def _is_guided(self, state: StepRequestState) -> bool:
        return self.expert(state)[1] > 1.0 and state.negative_prompt_embeds is not None

    def expert(self, state: StepRequestState) -> tuple[Any, float]:
        """The transformer of this step and its guidance scale; one that is not loaded is stood in for."""
        (first, second), (first_scale, second_scale) = self._experts, state.extra["options"].guidance
        if state.step_index >= state.extra["boundary_step"]:
            return second if second is not None else first, second_scale
        return first if first is not None else second, first_scale

    def model_input(self, state: StepRequestState) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents, with the first frame in its place, and timesteps: (videos,) or (videos, tokens)."""
        latents, timestep = state.latents, state.current_timestep
        if "condition" not in state.extra:
            return latents.to(self.dtype), timestep.expand(latents.shape[0])
        mask = _all_but_first_frame(latents)
        _, patch_height, patch_width = self.model_config.patch_size
        tokens = mask[0, 0, :, ::patch_height, ::patch_width]
        tokens = tokens[:, : latents.shape[3] // patch_height, : latents.shape[4] // patch_width]
        timesteps = (tokens * timestep).flatten().unsqueeze(0).expand(latents.shape[0], -1)
        return self._with_first_frame(state).to(self.dtype), timesteps

    def image_kwargs(self, states: Sequence[StepRequestState]) -> dict[str, Any]:
        """What the transformer is told of the image beside its latents."""
        return {}

    def _with_first_frame(self, state: StepRequestState) -> torch.Tensor:
        mask = _all_but_first_frame(state.latents)
        return (1 - mask) * state.extra["condition"] + mask * state.latents

    def step(self, state: StepRequestState, noise: torch.Tensor) -> None:
        if state.extra["options"].solver != DMD:
            super().step(state, noise)
            return
        scheduler = state.scheduler
        clean = scheduler.predict_clean(noise, state.latents, state.current_timestep).to(noise.dtype)
        if state.step_index + 1 < state.total_steps:
            fresh = self._draw(state, tuple(clean.shape), clean.dtype)
            clean = scheduler.add_noise(clean, fresh, state.timesteps[state.step_index + 1])
        state.latents = clean

    # Decode

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        output_type = state.sampling.output_type or "np"
        latents = self._with_first_frame(state) if "condition" in state.extra else state.latents
        if current_omni_platform.is_available():
            current_omni_platform.empty_cache()  # as the pipeline does: decoding needs one large piece of memory
        if output_type == "latent":
            return DiffusionOutput(output=latents)
        decoded = decode_video(self.pipeline.vae, latents, state.sampling, output_type)
        return decoded if isinstance(decoded, DiffusionOutput) else self.output_of(decoded)

    def output_of(self, video: torch.Tensor) -> DiffusionOutput:
        """``video`` (videos, 3, frames, height, width) in [-1, 1], in the form this pipeline returns it.

        Where ranks share the tiles of a decode, those without the result hold a placeholder of fewer dimensions.
        """
        return as_media(video) if video.ndim == len("BCTHW") else DiffusionOutput(output=video)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _all_but_first_frame(latents: torch.Tensor) -> torch.Tensor:
    """(videos, 1, frames, height, width): 0 for the frame that is given, 1 for those to make."""
    mask = torch.ones_like(latents[:, :1], dtype=torch.float32)
    mask[:, :, 0] = 0
    return mask
