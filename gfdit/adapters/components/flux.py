"""FLUX.1 in parts: distilled guidance, or with a negative prompt and ``true_cfg_scale`` > 1 guidance for real."""

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
    pixels_of,
)
from gfdit.adapters.sequence_plan import SequencePlan, Split
from gfdit.workflow import Condition, Image
from gfdit.workflow.model import Call

if TYPE_CHECKING:
    import torch

_VAE_SCALE = 8


class FluxTextEncoder(TextEncoder):
    """CLIP and T5."""

    part = "flux-text"
    folders = ("text_encoder", "text_encoder_2")
    max_sequence_length = 512

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, CLIPTextModel, CLIPTokenizer, T5TokenizerFast
        from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline
        from vllm_omni.diffusion.models.t5_encoder import T5EncoderModel

        from gfdit.adapters.components.shells import config_of, native_shell, pretrained

        def t5(od_config: Any) -> Any:
            config = AutoConfig.from_pretrained(self.source, subfolder="text_encoder_2")
            return T5EncoderModel(config, prefix="text_encoder_2")

        pipeline = native_shell(FluxPipeline, config_of(self.source, dtype), device, "text_encoder_2", t5)
        pipeline.text_encoder = pretrained(CLIPTextModel, self.source, "text_encoder", dtype, device)
        pipeline.tokenizer = CLIPTokenizer.from_pretrained(self.source, subfolder="tokenizer")
        pipeline.tokenizer_2 = T5TokenizerFast.from_pretrained(self.source, subfolder="tokenizer_2")
        pipeline.tokenizer_max_length = pipeline.tokenizer.model_max_length
        return pipeline

    def embed(self, components: Any, prompt: str, max_sequence_length: int) -> dict[str, Any]:
        embeds, pooled, _ = components.encode_prompt(
            prompt=[prompt], prompt_2=None, max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": embeds, "pooled": pooled}


class FluxNoise(Noise):
    part = "flux-noise"

    def empty(self, device: torch.device, dtype: torch.dtype, scheduler: Any, in_channels: int) -> Any:
        from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline

        from gfdit.adapters.components.shells import shell

        channels = in_channels // 4
        return shell(
            FluxPipeline,
            scheduler=scheduler,
            device=device,
            dtype=dtype,
            channels=channels,
            vae_scale_factor=_VAE_SCALE,
        )

    def draw(self, pipeline: Any, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        latents, _ = pipeline.prepare_latents(
            1, pipeline.channels, height, width, pipeline.dtype, pipeline.device, generator
        )
        return latents


class FluxTransformer(BaseTransformer):
    """``guidance_scale`` goes into an embedding, where the model has one; ``true_cfg_scale`` guides for real."""

    default_guidance = 3.5
    # Rotary embeddings are made of positions, text before image: splitting those of the image splits them.
    sequence_plan = SequencePlan({"": {"hidden_states": Split(1, 3), "img_ids": Split(0, 2)}}, gather="proj_out")

    def setup_io(self) -> None:
        super().setup_io()
        self.add_input("true_cfg_scale", float, optional=True)

    def load_pipeline(self, od_config: Any, device: torch.device) -> tuple[Any, Any]:
        from vllm_omni.diffusion.models.flux import FluxTransformer2DModel
        from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline
        from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

        from gfdit.adapters.components.residuals import ResidualSink, in_runs
        from gfdit.adapters.components.shells import native_shell

        def transformer(od_config: Any) -> Any:
            sizes = get_transformer_config_kwargs(od_config.tf_model_config, FluxTransformer2DModel)
            return FluxTransformer2DModel(**sizes, od_config=od_config, quant_config=od_config.quantization_config)

        pipeline = native_shell(FluxPipeline, od_config, device, "transformer", transformer)
        return pipeline, ResidualSink(pipeline.transformer, in_runs)

    def guided(self, inputs: Mapping[str, Any]) -> bool:
        return _given(inputs, "true_cfg_scale", 1.0) > 1

    def branches(
        self,
        pipeline: Any,
        latents: dict[str, Any],
        timestep: torch.Tensor,
        embeds: dict[str, Any],
        settings: dict[str, Any],
    ) -> Branches:
        tensor, guidance = latents["latents"], None
        if pipeline.transformer.guidance_embeds:
            scale = _given(settings, "guidance_scale", self.default_guidance)
            guidance = tensor.new_full([tensor.shape[0]], scale, dtype=_float32())
        common = {
            "hidden_states": tensor,
            "timestep": timestep.expand(tensor.shape[0]).to(tensor) / 1000,
            "guidance": guidance,
            "img_ids": image_ids(pipeline, latents),
            "joint_attention_kwargs": {},
            "return_dict": False,
        }
        scale = _given(settings, "true_cfg_scale", 1.0)
        guided = scale > 1 and "negative_prompt_embeds" in embeds
        pipeline.transformer.do_true_cfg = guided
        return Branches(
            {**common, **text_arguments(embeds)},
            {**common, **text_arguments(embeds, "negative_")} if guided else None,
            scale,
        )


def image_ids(pipeline: Any, latents: dict[str, Any]) -> torch.Tensor:
    """Positions of image tokens, (S, 3)."""
    tensor, rows, columns = latents["latents"], latents["height"] // ALIGNMENT, latents["width"] // ALIGNMENT
    return pipeline._prepare_latent_image_ids(rows, columns, tensor.device, tensor.dtype)


def text_arguments(embeds: dict[str, Any], sign: str = "") -> dict[str, Any]:
    """Of a pass for one branch of guidance."""
    tokens = embeds[f"{sign}prompt_embeds"]
    return {
        "encoder_hidden_states": tokens,
        "pooled_projections": embeds[f"{sign}pooled"],
        "txt_ids": tokens.new_zeros(tokens.shape[1], 3),
    }


class FluxControlNet(ControlNet):
    """``mode`` chooses the kind of control of a Union net. XLabs' nets take the image itself as the condition.

    Both branches of guidance get the residuals of the positive one.
    """

    net_class = "FluxControlNetModel"

    def setup_io(self) -> None:
        super().setup_io()
        self.add_input("mode", int, optional=True)
        self.add_input("guidance_scale", float, optional=True)

    def header(self, net: Any, settings: dict[str, Any]) -> dict[str, bool]:
        return {"repeats": net.input_hint_block is not None}

    def arguments(
        self,
        net: Any,
        latents: dict[str, Any],
        timestep: torch.Tensor,
        embeds: dict[str, Any],
        condition: dict[str, Any],
        settings: dict[str, Any],
    ) -> dict[str, Any]:
        from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline

        tensor = latents["latents"]
        arguments = {
            "hidden_states": tensor,
            "controlnet_cond": condition["latents"],
            "timestep": timestep.expand(tensor.shape[0]).to(tensor) / 1000,
            "img_ids": image_ids(FluxPipeline, latents),
            **text_arguments(embeds),
        }
        if net.union:
            if (mode := settings.get("mode")) is None:
                raise ValueError(f"{self.source} is a Union ControlNet: it needs a mode")
            arguments["controlnet_mode"] = timestep.new_full((tensor.shape[0], 1), mode, dtype=_int64())
        if net.config.guidance_embeds:
            scale = _given(settings, "guidance_scale", FluxTransformer.default_guidance)
            arguments["guidance"] = tensor.new_full([tensor.shape[0]], scale, dtype=_float32())
        return arguments


class _FluxVae(Part):
    part = "vae"

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from diffusers import AutoencoderKL
        from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline

        from gfdit.adapters.components.shells import pretrained, shell

        vae = pretrained(AutoencoderKL, self.source, "vae", dtype, device)
        return shell(FluxPipeline, vae=vae, vae_scale_factor=_VAE_SCALE)


class FluxControlImage(_FluxVae, ControlImage):
    """To packed latents, (1, S, 64)."""

    def encode(self, components: Any, pixels: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
        vae = components.vae
        latents = vae.encode(pixels).latent_dist.sample(generator)
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        return {"latents": components._pack_latents(latents, *latents.shape)}


class FluxControlPixels(Part):
    """An image to a condition for one of XLabs' nets, which encode it themselves."""

    kind = ControlImage.kind
    part = "flux-pixels"
    folders = ()

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_input("height", int)
        self.add_input("width", int)
        self.add_output("condition", Condition)

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        return device, dtype

    def num_bytes(self, components: Any) -> int:
        return 0

    def execute(self, components: Any, call: Call, image: Any, height: int, width: int) -> dict[str, Any]:
        return {"condition": {"latents": pixels_of(image, height, width).to(*components)}}


class FluxDecoder(_FluxVae, Decoder):
    def decode(self, components: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        vae = components.vae
        latents = components._unpack_latents(latents, height, width, _VAE_SCALE)
        latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]


def _given(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name)
    return default if value is None else float(value)


def _float32() -> torch.dtype:
    import torch

    return torch.float32


def _int64() -> torch.dtype:
    import torch

    return torch.int64
