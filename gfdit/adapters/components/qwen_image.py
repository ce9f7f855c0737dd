"""Qwen-Image in parts; guidance with a negative prompt, be it empty, and ``true_cfg_scale`` > 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gfdit.adapters.components.base import (
    ALIGNMENT,
    BaseTransformer,
    Branches,
    ControlImage,
    ControlNet,
    Decoder,
    Noise,
    Part,
    TextEncoder,
)

if TYPE_CHECKING:
    import torch

_VAE_SCALE = 8


class QwenImageTextEncoder(TextEncoder):
    """Qwen2.5-VL without its vision tower."""

    part = "qwen-image-text"
    folders = ("text_encoder",)
    max_sequence_length = 1024

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        import diffusers
        from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
        from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

        from gfdit.adapters.components.shells import pretrained, shell

        encoder = pretrained(Qwen2_5_VLForConditionalGeneration, self.source, "text_encoder", dtype, device)
        del encoder.model.visual
        # vLLM-Omni's constructor, which is never run, sets the same template.
        parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
        empty = diffusers.QwenImagePipeline(**parts)
        return shell(
            QwenImagePipeline,
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

    def empty(self, device: torch.device, dtype: torch.dtype, scheduler: Any, in_channels: int) -> Any:
        from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

        from gfdit.adapters.components.shells import shell

        channels = in_channels // 4
        return shell(
            QwenImagePipeline,
            scheduler=scheduler,
            device=device,
            dtype=dtype,
            channels=channels,
            vae_scale_factor=_VAE_SCALE,
        )

    def draw(self, pipeline: Any, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        return pipeline.prepare_latents(
            1, pipeline.channels, height, width, pipeline.dtype, pipeline.device, generator
        )


class QwenImageTransformer(BaseTransformer):
    """The plan by which its tokens are split is the transformer's own."""

    default_guidance = 1.0
    default_true_cfg_scale = 4.0

    def setup_io(self) -> None:
        super().setup_io()
        self.add_input("true_cfg_scale", float, optional=True)

    def load_pipeline(self, od_config: Any, device: torch.device) -> tuple[Any, Any]:
        from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
        from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel
        from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

        from gfdit.adapters.components.residuals import ResidualSink, in_runs
        from gfdit.adapters.components.shells import native_shell

        def transformer(od_config: Any) -> Any:
            sizes = get_transformer_config_kwargs(od_config.tf_model_config, QwenImageTransformer2DModel)
            return QwenImageTransformer2DModel(
                od_config=od_config, quant_config=od_config.quantization_config, **sizes
            )

        pipeline = native_shell(QwenImagePipeline, od_config, device, "transformer", transformer)
        return pipeline, ResidualSink(pipeline.transformer, in_runs)

    def guided(self, inputs: Mapping[str, Any]) -> bool:
        return self._scale(inputs) > 1

    def _scale(self, settings: Mapping[str, Any]) -> float:
        scale = settings.get("true_cfg_scale")
        return self.default_true_cfg_scale if scale is None else float(scale)

    def branches(
        self,
        pipeline: Any,
        latents: dict[str, Any],
        timestep: torch.Tensor,
        embeds: dict[str, Any],
        settings: dict[str, Any],
    ) -> Branches:
        tensor, scale, guidance = latents["latents"], self._scale(settings), None
        negative = embeds.get("negative_prompt_embeds")
        guided = scale > 1 and negative is not None
        if pipeline.transformer.guidance_embeds:
            embedded = settings.get("guidance_scale")
            embedded = self.default_guidance if embedded is None else float(embedded)
            guidance = timestep.new_full([tensor.shape[0]], embedded)
        pipeline.transformer.do_true_cfg = guided
        positive_arguments, negative_arguments, _ = pipeline._build_denoise_kwargs(
            latents=tensor,
            timestep=timestep,
            guidance=guidance,
            prompt_embeds=embeds["prompt_embeds"],
            prompt_embeds_mask=None,
            img_shapes=[image_shape(latents)],
            txt_seq_lens=[embeds["prompt_embeds"].shape[1]],
            do_true_cfg=guided,
            negative_prompt_embeds=negative,
            negative_prompt_embeds_mask=None,
            negative_txt_seq_lens=None if negative is None else [negative.shape[1]],
            extra_transformer_kwargs={"attention_kwargs": {}, "return_dict": False},
        )
        return Branches(positive_arguments, negative_arguments, scale, normalize=True)


def image_shape(latents: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Frames, rows and columns of tokens."""
    return [(1, latents["height"] // ALIGNMENT, latents["width"] // ALIGNMENT)]


class QwenImageControlNet(ControlNet):
    """Both branches of guidance get the residuals of the positive one."""

    net_class = "QwenImageControlNetModel"

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        loaded = super().load(device, dtype)
        if loaded.net.config.extra_condition_channels:
            raise ValueError(f"{self.source} is a ControlNet for inpainting, which takes a mask: not supported")
        return loaded

    def arguments(
        self,
        net: Any,
        latents: dict[str, Any],
        timestep: torch.Tensor,
        embeds: dict[str, Any],
        condition: dict[str, Any],
        settings: dict[str, Any],
    ) -> dict[str, Any]:
        tensor = latents["latents"]
        return {
            "hidden_states": tensor,
            "controlnet_cond": condition["latents"],
            "timestep": timestep.expand(tensor.shape[0]).to(tensor) / 1000,
            "encoder_hidden_states": embeds["prompt_embeds"],
            "img_shapes": image_shape(latents),
        }


class _QwenImageVae(Part):
    part = "vae"

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_qwenimage import (
            DistributedAutoencoderKLQwenImage,
        )
        from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

        from gfdit.adapters.components.shells import pretrained, shell

        vae = pretrained(DistributedAutoencoderKLQwenImage, self.source, "vae", dtype, device)
        return shell(QwenImagePipeline, vae=vae, vae_scale_factor=_VAE_SCALE)


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
