"""FLUX.1 in parts: distilled guidance, or with a negative prompt and ``true_cfg_scale`` > 1 guidance for real."""

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
    pixels_of,
)
from gfdit.adapters.sequence_plan import SequencePlan, Split
from gfdit.workflow import Condition, Image
from gfdit.workflow.model import Call

if TYPE_CHECKING:
    import torch


class FluxTextEncoder(TextEncoder):
    """CLIP and T5."""

    part = "flux-text"
    folders = ("text_encoder", "text_encoder_2")
    max_sequence_length = 512

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, CLIPTextModel, CLIPTokenizer, T5TokenizerFast
        from vllm_omni.diffusion.models.t5_encoder import T5EncoderModel

        from gfdit.adapters.components.shells import config_of, native_shell, pretrained

        def t5(od_config: Any) -> Any:
            config = AutoConfig.from_pretrained(self.source, subfolder="text_encoder_2")
            return T5EncoderModel(config, prefix="text_encoder_2")

        pipeline = native_shell(_pipeline(), config_of(self.source, dtype), device, "text_encoder_2", t5)
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

    def pipeline_class(self) -> type:
        return _pipeline()

    def draw(self, pipeline: Any, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        latents, _ = pipeline.prepare_latents(
            1, pipeline.channels, height, width, pipeline.dtype, pipeline.device, generator
        )
        return latents


class FluxTransformer(BaseTransformer):
    """``guidance_scale`` goes into an embedding, where the model has one; ``true_cfg_scale`` guides for real."""

    default_guidance = 3.5
    settings = (*BaseTransformer.settings, ("true_cfg_scale", float))
    # Rotary embeddings are made of positions, text before image: splitting those of the image splits them.
    sequence_plan = SequencePlan({"": {"hidden_states": Split(1, 3), "img_ids": Split(0, 2)}}, gather="proj_out")

    def load_pipeline(self, od_config: Any, device: torch.device) -> tuple[Any, Any]:
        from vllm_omni.diffusion.models.flux import FluxTransformer2DModel
        from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

        from gfdit.adapters.components.residuals import ResidualSink, in_runs
        from gfdit.adapters.components.shells import native_shell

        def transformer(od_config: Any) -> Any:
            sizes = get_transformer_config_kwargs(od_config.tf_model_config, FluxTransformer2DModel)
            return FluxTransformer2DModel(**sizes, od_config=od_config, quant_config=od_config.quantization_config)

        pipeline = native_shell(_pipeline(), od_config, device, "transformer", transformer)
        return pipeline, ResidualSink(pipeline.transformer, in_runs)

    def guided(self, inputs: Mapping[str, Any]) -> bool:
        return given(inputs, "true_cfg_scale", 1.0) > 1

    def branches(self, pipeline: Any, inputs: StepInputs) -> Branches:
        guidance = _guidance(inputs) if pipeline.transformer.guidance_embeds else None
        common = {
            **_image_arguments(inputs),
            "guidance": guidance,
            "joint_attention_kwargs": {},
            "return_dict": False,
        }
        scale = given(inputs.settings, "true_cfg_scale", 1.0)
        guided = scale > 1 and "negative_prompt_embeds" in inputs.embeds
        pipeline.transformer.do_true_cfg = guided
        return Branches(
            {**common, **_text_arguments(inputs)},
            {**common, **_text_arguments(inputs, "negative_")} if guided else None,
            scale,
        )


def _image_arguments(inputs: StepInputs) -> dict[str, Any]:
    """Of a pass; the positions of image tokens are (S, 3)."""
    tensor = inputs.tensor
    sides = [inputs.latents[side] // ALIGNMENT for side in ("height", "width")]
    return {
        "hidden_states": tensor,
        "timestep": inputs.timesteps.to(tensor) / 1000,
        "img_ids": _pipeline()._prepare_latent_image_ids(*sides, tensor.device, tensor.dtype),
    }


def _text_arguments(inputs: StepInputs, sign: str = "") -> dict[str, Any]:
    """Of a pass for one branch of guidance."""
    tokens = inputs.embeds[f"{sign}prompt_embeds"]
    return {
        "encoder_hidden_states": tokens,
        "pooled_projections": inputs.embeds[f"{sign}pooled"],
        "txt_ids": tokens.new_zeros(tokens.shape[1], 3),
    }


def _guidance(inputs: StepInputs) -> torch.Tensor:
    """What is embedded, one for every row of the latents."""
    import torch

    scale = given(inputs.settings, "guidance_scale", FluxTransformer.default_guidance)
    return inputs.tensor.new_full([inputs.tensor.shape[0]], scale, dtype=torch.float32)


class FluxControlNet(ControlNet):
    """``mode`` chooses the kind of control of a Union net. XLabs' nets take the image itself as the condition.

    Both branches of guidance get the residuals of the positive one.
    """

    net_class = "FluxControlNetModel"
    settings = (*ControlNet.settings, ("mode", int), ("guidance_scale", float))

    def header(self, net: Any, settings: dict[str, Any]) -> dict[str, bool]:
        return {"repeats": net.input_hint_block is not None}

    def arguments(self, net: Any, inputs: StepInputs, condition: dict[str, Any]) -> dict[str, Any]:
        import torch

        arguments = {
            **_image_arguments(inputs),
            **_text_arguments(inputs),
            "controlnet_cond": condition["latents"],
        }
        if net.union:
            if (mode := inputs.settings.get("mode")) is None:
                raise ValueError(f"{self.source} is a Union ControlNet: it needs a mode")
            arguments["controlnet_mode"] = inputs.tensor.new_full(
                (inputs.tensor.shape[0], 1), mode, dtype=torch.int64
            )
        if net.config.guidance_embeds:
            arguments["guidance"] = _guidance(inputs)
        return arguments


class _FluxVae(Part):
    part = "vae"

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from diffusers import AutoencoderKL

        from gfdit.adapters.components.shells import pretrained, shell

        vae = pretrained(AutoencoderKL, self.source, "vae", dtype, device)
        return shell(_pipeline(), vae=vae, vae_scale_factor=VAE_SCALE)


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
        latents = components._unpack_latents(latents, height, width, VAE_SCALE)
        latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]


def _pipeline() -> Any:
    from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline

    return FluxPipeline
