"""Qwen-Image in parts; guidance with a negative prompt, be it empty, and ``true_cfg_scale`` > 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gfdit.adapters.components.base import (
    ALIGNMENT,
    VAE_SCALE,
    BaseTransformer,
    Branches,
    ControlImage,
    ControlNet,
    Decoder,
    Noise,
    Part,
    StepInputs,
    TextEncoder,
    given,
)

if TYPE_CHECKING:
    import torch


class QwenImageTextEncoder(TextEncoder):
    """Qwen2.5-VL without its vision tower."""

    part = "qwen-image-text"
    folders = ("text_encoder",)
    max_sequence_length = 1024

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        import diffusers
        from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

        from gfdit.adapters.components.shells import pretrained, shell

        encoder = pretrained(Qwen2_5_VLForConditionalGeneration, self.source, "text_encoder", dtype, device)
        del encoder.model.visual
        # vLLM-Omni's constructor, which is never run, sets the same template.
        parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
        empty = diffusers.QwenImagePipeline(**parts)
        return shell(
            _pipeline(),
            text_encoder=encoder,
            tokenizer=Qwen2Tokenizer.from_pretrained(self.source, subfolder="tokenizer"),
            tokenizer_max_length=empty.tokenizer_max_length,
            prompt_template_encode=empty.prompt_template_encode,
            prompt_template_encode_start_idx=empty.prompt_template_encode_start_idx,
            device=device,
        )

    def embed(self, components: Any, prompt: str, max_sequence_length: int) -> dict[str, Any]:
        embeds, _ = components.encode_prompt([prompt], max_sequence_length=max_sequence_length)
        return {"prompt_embeds": embeds}  # of one text no token is padding


class QwenImageNoise(Noise):
    part = "qwen-image-noise"

    def pipeline_class(self) -> type:
        return _pipeline()

    def draw(self, pipeline: Any, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        return pipeline.prepare_latents(
            1, pipeline.channels, height, width, pipeline.dtype, pipeline.device, generator
        )


class QwenImageTransformer(BaseTransformer):
    """The plan by which its tokens are split is the transformer's own."""

    default_guidance = 1.0
    default_true_cfg_scale = 4.0
    settings = (*BaseTransformer.settings, ("true_cfg_scale", float))

    def load_pipeline(self, od_config: Any, device: torch.device) -> tuple[Any, Any]:
        from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel
        from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

        from gfdit.adapters.components.residuals import ResidualSink, in_runs
        from gfdit.adapters.components.shells import native_shell

        def transformer(od_config: Any) -> Any:
            sizes = get_transformer_config_kwargs(od_config.tf_model_config, QwenImageTransformer2DModel)
            return QwenImageTransformer2DModel(
                od_config=od_config, quant_config=od_config.quantization_config, **sizes
            )

        pipeline = native_shell(_pipeline(), od_config, device, "transformer", transformer)
        return pipeline, ResidualSink(pipeline.transformer, in_runs)

    def guided(self, inputs: Mapping[str, Any]) -> bool:
        return self._scale(inputs) > 1

    def _scale(self, settings: Mapping[str, Any]) -> float:
        return given(settings, "true_cfg_scale", self.default_true_cfg_scale)

    def branches(self, pipeline: Any, inputs: StepInputs) -> Branches:
        scale, guidance = self._scale(inputs.settings), None
        positive, negative = inputs.embeds["prompt_embeds"], inputs.embeds.get("negative_prompt_embeds")
        guided = scale > 1 and negative is not None
        if pipeline.transformer.guidance_embeds:
            embedded = given(inputs.settings, "guidance_scale", self.default_guidance)
            guidance = inputs.timestep.new_full([inputs.tensor.shape[0]], embedded)
        pipeline.transformer.do_true_cfg = guided
        positive_arguments, negative_arguments, _ = pipeline._build_denoise_kwargs(
            latents=inputs.tensor,
            timestep=inputs.timestep,
            guidance=guidance,
            prompt_embeds=positive,
            prompt_embeds_mask=None,
            img_shapes=[_image_shape(inputs)],
            txt_seq_lens=[positive.shape[1]],
            do_true_cfg=guided,
            negative_prompt_embeds=negative,
            negative_prompt_embeds_mask=None,
            negative_txt_seq_lens=None if negative is None else [negative.shape[1]],
            extra_transformer_kwargs={"attention_kwargs": {}, "return_dict": False},
        )
        return Branches(positive_arguments, negative_arguments, scale, normalize=True)


def _image_shape(inputs: StepInputs) -> list[tuple[int, int, int]]:
    """Frames, rows and columns of tokens."""
    return [(1, inputs.latents["height"] // ALIGNMENT, inputs.latents["width"] // ALIGNMENT)]


class QwenImageControlNet(ControlNet):
    """Both branches of guidance get the residuals of the positive one."""

    net_class = "QwenImageControlNetModel"

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        loaded = super().load(device, dtype)
        if loaded.net.config.extra_condition_channels:
            raise ValueError(f"{self.source} is a ControlNet for inpainting, which takes a mask: not supported")
        return loaded

    def arguments(self, net: Any, inputs: StepInputs, condition: dict[str, Any]) -> dict[str, Any]:
        return {
            "hidden_states": inputs.tensor,
            "controlnet_cond": condition["latents"],
            "timestep": inputs.timesteps.to(inputs.tensor) / 1000,
            "encoder_hidden_states": inputs.embeds["prompt_embeds"],
            "img_shapes": _image_shape(inputs),
        }


class _QwenImageVae(Part):
    part = "vae"

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_qwenimage import (
            DistributedAutoencoderKLQwenImage,
        )

        from gfdit.adapters.components.shells import pretrained, shell

        vae = pretrained(DistributedAutoencoderKLQwenImage, self.source, "vae", dtype, device)
        return shell(_pipeline(), vae=vae, vae_scale_factor=VAE_SCALE)


class QwenImageControlImage(_QwenImageVae, ControlImage):
    """To packed latents, (1, S, 64)."""

    def encode(self, components: Any, pixels: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
        import torch

        vae = components.vae
        latents = vae.encode(pixels.unsqueeze(2)).latent_dist.sample(generator)
        mean, spread = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        latents = ((latents - mean) * (1.0 / spread)).permute(0, 2, 1, 3, 4)
        rows, _, channels, height, width = latents.shape
        packed = components._pack_latents(latents, rows, channels, height, width)
        return {"latents": packed.to(vae.dtype)}


class QwenImageDecoder(_QwenImageVae, Decoder):
    def decode(self, components: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return components._decode_latents(latents, height, width).output


def _pipeline() -> Any:
    from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

    return QwenImagePipeline
