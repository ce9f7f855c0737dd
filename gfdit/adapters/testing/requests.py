"""What a test asks for, without vLLM-Omni; made into its request in a process that has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni.diffusion.request import OmniDiffusionRequest


@dataclass(frozen=True)
class KitRequest:
    """Sizes in pixels and frames. None is vLLM-Omni's "not given": the pipeline's own default.

    ``images`` are PIL images, the conditioning of an edit or image-to-video model. ``lora`` is a PEFT folder and
    a scale. ``sampling`` are further fields of ``OmniDiffusionSamplingParams`` by name (also ``extra_args``),
    ``prompt_fields`` further keys of the prompt.
    """

    height: int | None = 128
    width: int | None = 128
    num_frames: int = 1
    steps: int | None = 4
    seed: int = 1
    prompt: str = "a red panda"
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    true_cfg_scale: float | None = None
    num_images: int = 1
    max_sequence_length: int | None = None
    images: tuple[Any, ...] = field(default=(), hash=False, repr=False)
    lora: tuple[str, float] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prompt_fields: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)

    def but(self, **changes: Any) -> KitRequest:
        """The same request with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        frames = f"x{self.num_frames}" if self.num_frames > 1 else ""
        guided = " guided" if self.negative_prompt is not None else ""
        return f"{self.height}x{self.width}{frames} {self.steps} steps seed {self.seed}{guided}"

    def to_omni(self, request_id: str) -> OmniDiffusionRequest:
        """vLLM-Omni's request, before the pipeline's own preprocessing."""
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams
        from vllm_omni.lora.request import LoRARequest
        from vllm_omni.lora.utils import stable_lora_int_id

        prompt: dict[str, Any] = {"prompt": self.prompt, **self.prompt_fields}
        if self.negative_prompt is not None:
            prompt["negative_prompt"] = self.negative_prompt
        if self.images:
            image = self.images[0] if len(self.images) == 1 else list(self.images)
            prompt["multi_modal_data"] = {"image": image}
        sampling: dict[str, Any] = {
            "height": self.height,
            "width": self.width,
            "num_frames": self.num_frames,
            "num_inference_steps": self.steps,
            "seed": self.seed,
            "guidance_scale": self.guidance_scale,
            "guidance_scale_2": self.guidance_scale_2,
            "true_cfg_scale": self.true_cfg_scale,
            "num_outputs_per_prompt": self.num_images,
            "max_sequence_length": self.max_sequence_length,
        }
        if self.lora is not None:
            path, scale = self.lora
            sampling["lora_request"] = LoRARequest(path, stable_lora_int_id(path), path)
            sampling["lora_scale"] = scale
        return OmniDiffusionRequest(
            prompt, OmniDiffusionSamplingParams(**{**sampling, **self.sampling}), request_id
        )
