"""Z-Image: one stream of image and caption tokens, and guidance whose branches run as one batch.

Both kinds of tokens are split. Upstream pads the shorter caption of a batch with zeros, which attention sees, and
gives all rows the positions of the first, so what a branch computes depends on the other one:
:class:`BranchOfBatch` makes that come out the same where the ranks of a step run a branch each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.distributed.parallel_state import (
    get_cfg_group,
    get_classifier_free_guidance_rank,
    get_classifier_free_guidance_world_size,
)
from vllm_omni.diffusion.models.z_image.pipeline_z_image import calculate_shift, retrieve_timesteps
from vllm_omni.diffusion.models.z_image.z_image_transformer import SEQ_MULTI_OF
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.base import Trajectory
from gfdit.adapters.denoise_loop import DenoiseLoopAdapter, timestep_rows
from gfdit.adapters.image_vae import decode_image
from gfdit.adapters.own_dimensions import transformer_field
from gfdit.adapters.prompts import negative_text, positive_text
from gfdit.adapters.sampling import check_max_sequence_length, check_sides, image_size, num_images
from gfdit.adapters.sequence_plan import SequencePlan, Split
from gfdit.adapters.z_image_branch import BranchOfBatch
from gfdit.core.tasks import Shape

# The VAE halves each side three times and the transformer takes 2 x 2 patches; both are fixed by the family.
_ALIGNMENT = 16
_DEFAULT_TEXT_TOKENS = 512


class ZImageAdapter(DenoiseLoopAdapter):
    """Adapter for ``ZImagePipeline``."""

    captures_steps = True
    pipeline_class = "ZImagePipeline"
    batches = True
    step_extra = frozenset({"progress"})
    # vLLM-Omni's own plan, but that every split pads: it takes only lengths that divide by the degree.
    sequence_plan = SequencePlan(
        {
            "unified_prepare": {
                0: Split(1, 3, output=True),  # tokens
                1: Split(1, 3, output=True),  # cosines
                2: Split(1, 3, output=True),  # sines
                3: Split(1, 2, output=True),  # mask
            }
        },
        gather="all_final_layer.2-1",
    )

    # Engine half

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        sampling, prompt = request.sampling_params, request.prompt
        if not isinstance(prompt, str) and (prompt.get("multi_modal_data") or {}).get("image") is not None:
            raise ValueError("multi_modal_data.image is not supported: gfdit runs Z-Image from text only")
        # A caption is padded to a multiple; the image takes the position after it, and padding that of 0.
        check_max_sequence_length(sampling, (self._positions()[0] - 2) // SEQ_MULTI_OF * SEQ_MULTI_OF)
        truncation = (sampling.extra_args or {}).get("cfg_truncation", 1.0)
        if truncation is not None and not isinstance(truncation, (int, float)):
            raise ValueError(f"cfg_truncation must be a number, got {truncation!r}")
        return super().convert(request, max_sp)

    def shape(self, request: OmniDiffusionRequest) -> Shape:
        height, width = image_size(request.sampling_params)
        _, rows, columns = self._positions()
        check_sides(height, width, _ALIGNMENT, (rows * _ALIGNMENT, columns * _ALIGNMENT))
        return Shape(height, width)

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        return request.sampling_params.guidance_scale > 0

    @property
    def num_heads(self) -> int:
        return int(transformer_field(self.od_config, "n_heads"))

    def _positions(self) -> tuple[int, int, int]:
        """How many rotary positions there are: of captions and what goes with them, rows, columns of patches."""
        return tuple(transformer_field(self.od_config, "axes_lens"))

    # Worker half

    def bind(self, pipeline: Any, device: torch.device) -> None:
        super().bind(pipeline, device)
        self._branch = BranchOfBatch(pipeline.transformer)

    def restore_pipeline(self, state: StepRequestState) -> None:
        super().restore_pipeline(state)
        self.pipeline._guidance_scale = state.sampling.guidance_scale
        self.pipeline._joint_attention_kwargs = None
        self.pipeline._cfg_normalization = state.sampling.cfg_normalize
        self.pipeline._cfg_truncation = _truncation(state)
        self.pipeline._num_timesteps = state.total_steps

    def encode_state(self, state: StepRequestState) -> None:
        sampling = state.sampling
        sampling.height, sampling.width = image_size(sampling)
        state.do_true_cfg = sampling.guidance_scale > 0
        negative = negative_text(state.prompt)
        captions, negatives = self.pipeline.encode_prompt(
            prompt=[positive_text(state.prompt)],
            negative_prompt=None if negative is None else [negative],
            do_classifier_free_guidance=state.do_true_cfg,
            device=self.pipeline._execution_device,
            max_sequence_length=sampling.max_sequence_length or _DEFAULT_TEXT_TOKENS,
        )
        state.prompt_embeds = captions[0]
        if state.do_true_cfg:
            state.negative_prompt_embeds = negatives[0]

    def prepare_state(self, state: StepRequestState) -> None:
        pipeline, sampling = self.pipeline, state.sampling
        device, scheduler = pipeline._execution_device, pipeline.scheduler
        state.latents = pipeline.prepare_latents(
            num_images(sampling),
            pipeline.transformer.in_channels,
            sampling.height,
            sampling.width,
            torch.float32,
            device,
            sampling.generator,
            sampling.latents,
        )
        mu = calculate_shift(
            (state.latents.shape[-2] // 2) * (state.latents.shape[-1] // 2),
            scheduler.config.get("base_image_seq_len", 256),
            scheduler.config.get("max_image_seq_len", 4096),
            scheduler.config.get("base_shift", 0.5),
            scheduler.config.get("max_shift", 1.15),
        )
        scheduler.sigma_min = 0.0
        num_steps = sampling.num_inference_steps or self.default_num_steps
        state.timesteps, _ = retrieve_timesteps(scheduler, num_steps, device, sigmas=sampling.sigmas, mu=mu)
        state.scheduler = self.own_scheduler()
        if _is_truncated(state):  # a step that looked at its timestep would wait for the device
            state.extra["progress"] = ((1000 - state.timesteps.to(torch.float32)) / 1000).tolist()

    def compatible(self, states: Sequence[StepRequestState]) -> bool:
        """Captions must be padded to the same length, which attention sees."""
        return len({_pass_key(state) for state in states}) == 1

    def predict(self, states: Sequence[StepRequestState]) -> torch.Tensor:
        latents = torch.cat([state.latents for state in states]).to(self.pipeline.od_config.dtype)
        timesteps = (1000 - timestep_rows(states, latents.device)) / 1000
        captions = [state.prompt_embeds for state in states for _ in range(state.latents.shape[0])]
        scale = _guidance(states[0])
        if scale <= 0:
            return -torch.stack(self._pass(latents, timesteps, captions)).float().squeeze(2)
        negatives = [state.negative_prompt_embeds for state in states for _ in range(state.latents.shape[0])]
        positive, negative = self._both_branches(latents, timesteps, captions, negatives)
        limit = float(states[0].sampling.cfg_normalize or 0.0)
        guided = [_guided(*pair, scale, limit) for pair in zip(positive, negative, strict=True)]
        return -torch.stack(guided).squeeze(2)

    def _both_branches(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        captions: list[torch.Tensor],
        negatives: list[torch.Tensor],
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Predictions of both branches, row by row, on every rank."""
        num_rows = latents.shape[0]
        if get_classifier_free_guidance_world_size() == 1:
            both = self._pass(latents.repeat(2, 1, 1, 1), timesteps.repeat(2), captions + negatives)
            return both[:num_rows], both[num_rows:]
        own = captions if get_classifier_free_guidance_rank() == 0 else negatives
        with self._branch.of(_padded(captions[0]), _padded(negatives[0]), latents):
            prediction = torch.stack(self._pass(latents, timesteps, own))
        positive, negative = get_cfg_group().all_gather(prediction, separate_tensors=True)
        return positive, negative

    def _pass(
        self, latents: torch.Tensor, timesteps: torch.Tensor, captions: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """One forward pass: latents (N, C, H, W), N captions (tokens, D) to N predictions (C, 1, H, W)."""
        return self.pipeline.transformer(list(latents.unsqueeze(2).unbind(dim=0)), timesteps, captions)[0]

    def step(self, state: StepRequestState, noise: torch.Tensor) -> None:
        (state.latents,) = state.scheduler.step(
            noise.to(torch.float32), state.current_timestep, state.latents, return_dict=False
        )

    def decode_state(self, state: StepRequestState) -> DiffusionOutput:
        if state.sampling.output_type == "latent":
            return DiffusionOutput(output=state.latents)
        return decode_image(self.pipeline.vae, state.latents.to(self.pipeline.vae.dtype))


def _guided(positive: torch.Tensor, negative: torch.Tensor, scale: float, limit: float) -> torch.Tensor:
    """The guided prediction of one row; with ``limit`` its norm is at most so many times the positive one's."""
    positive, negative = positive.float(), negative.float()
    guided = positive + scale * (positive - negative)
    if limit <= 0:
        return guided
    norm = torch.linalg.vector_norm(guided)
    longest = torch.linalg.vector_norm(positive) * limit
    shrunk = (longest / norm.clamp(min=1e-12)).to(guided.dtype)
    return guided * torch.where(norm > longest, shrunk, guided.new_tensor(1.0))


def _pass_key(state: StepRequestState) -> tuple[Any, ...]:
    """Steps with equal ones may share a forward pass."""
    captions = (_padded(state.prompt_embeds), _padded(state.negative_prompt_embeds))
    return state.latents.shape[1:], _guidance(state) > 0, *captions


def _guidance(state: StepRequestState) -> float:
    """The scale of guidance at the current step; 0 where it is off, or cut off from ``cfg_truncation`` on."""
    scale = max(0.0, state.sampling.guidance_scale)
    if scale == 0 or not _is_truncated(state):
        return scale
    return 0.0 if state.extra["progress"][state.step_index] > _truncation(state) else scale


def _is_truncated(state: StepRequestState) -> bool:
    truncation = _truncation(state)
    return truncation is not None and truncation < 1


def _truncation(state: StepRequestState) -> float | None:
    return (state.sampling.extra_args or {}).get("cfg_truncation", 1.0)


def _padded(caption: torch.Tensor | None) -> int:
    """Tokens of a caption in the transformer, which pads every one to a multiple."""
    return 0 if caption is None else -(-caption.shape[0] // SEQ_MULTI_OF) * SEQ_MULTI_OF
