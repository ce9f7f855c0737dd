"""Stable Diffusion 3 and 3.5 in parts; guidance above a scale of 1, against an empty text if no other is given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gfdit.adapters.components.base import (
    BaseTransformer,
    Branches,
    ControlImage,
    ControlNet,
    Decoder,
    Noise,
    Part,
    StepInputs,
    TextEncoder,
    config_file,
    given,
)
from gfdit.adapters.sequence_plan import SequencePlan, Split

if TYPE_CHECKING:
    import torch

_DEFAULT_GUIDANCE = 7.0


class SD3TextEncoder(TextEncoder):
    """CLIP (two) and T5."""

    part = "sd3-text"
    folders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    max_sequence_length = 256

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

        from gfdit.adapters.components.shells import pretrained, shell

        parts: dict[str, Any] = {}
        for suffix, tokenizer, encoder in (
            ("", CLIPTokenizer, CLIPTextModelWithProjection),
            ("_2", CLIPTokenizer, CLIPTextModelWithProjection),
            ("_3", T5Tokenizer, T5EncoderModel),
        ):
            folder = f"text_encoder{suffix}"
            parts[folder] = pretrained(encoder, self.source, folder, dtype, device)
            parts[f"tokenizer{suffix}"] = tokenizer.from_pretrained(self.source, subfolder=f"tokenizer{suffix}")
        return shell(
            _pipeline(),
            **parts,
            device=device,
            tokenizer_max_length=parts["tokenizer"].model_max_length,
            od_config=SimpleNamespace(dtype=dtype),
        )

    def negative(self, prompt: str | None) -> str | None:
        return prompt or ""

    def embed(self, components: Any, prompt: str, max_sequence_length: int) -> dict[str, Any]:
        embeds, pooled = components.encode_prompt(
            prompt=[prompt], prompt_2="", prompt_3="", max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": embeds, "pooled": pooled}


class SD3Noise(Noise):
    part = "sd3-noise"
    pixels_per_token = 1

    def pipeline_class(self) -> type:
        return _pipeline()

    def draw(self, pipeline: Any, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        return pipeline.prepare_latents(1, pipeline.channels, height, width, generator)


class SD3Transformer(BaseTransformer):
    sequence_plan = SequencePlan({"pos_embed": {0: Split(1, 3, output=True)}}, gather="proj_out")

    def load_pipeline(self, od_config: Any, device: torch.device) -> tuple[Any, Any]:
        from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel

        from gfdit.adapters.components.residuals import ResidualSink, in_runs_but_the_last
        from gfdit.adapters.components.shells import native_shell

        def transformer(od_config: Any) -> Any:
            return SD3Transformer2DModel(od_config=od_config)

        pipeline = native_shell(_pipeline(), od_config, device, "transformer", transformer)
        return pipeline, ResidualSink(pipeline.transformer, in_runs_but_the_last)

    def guided(self, inputs: Mapping[str, Any]) -> bool:
        return _guidance(inputs) > 1

    def branches(self, pipeline: Any, inputs: StepInputs) -> Branches:
        tensor, scale = inputs.tensor, _guidance(inputs.settings)
        common = {"hidden_states": tensor, "timestep": inputs.timesteps.to(tensor), "return_dict": False}
        return Branches(
            {**common, **_text_arguments(inputs)},
            {**common, **_text_arguments(inputs, "negative_")} if scale > 1 else None,
            scale,
        )


class SD3ControlNet(ControlNet):
    """Both branches of guidance have residuals of their own, unless ``guidance_scale`` says that there is one.

    A net that embeds no positions uses those of the transformer at ``base`` (SD3.5's large nets).
    """

    net_class = "SD3ControlNetModel"
    settings = (*ControlNet.settings, ("guidance_scale", float))

    @property
    def component(self) -> str:
        base = self.options.get("base")
        return super().component if base is None else f"{super().component}:{base}"

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        loaded = super().load(device, dtype)
        if loaded.net.pos_embed is None:
            base = self.options.get("base")
            if base is None:
                raise ValueError(f"{self.source} embeds no positions: say base=, the checkpoint whose it uses")
            loaded.net.pos_embed = _position_embedding(base).to(device, dtype)
        return loaded

    def header(self, net: Any, settings: dict[str, Any]) -> dict[str, bool]:
        return {"both": _guidance(settings) > 1}

    def arguments(self, net: Any, inputs: StepInputs, condition: dict[str, Any]) -> dict[str, Any]:
        import torch

        tensor, control, text = inputs.tensor, condition["latents"], _text_arguments(inputs)
        if _guidance(inputs.settings) > 1:
            tensor, negative = torch.cat([tensor] * 2), _text_arguments(inputs, "negative_")
            text = {name: torch.cat([negative[name], positive]) for name, positive in text.items()}
        else:
            control = control[:1]
        shift = condition["shift_factor"]
        if net.config.force_zeros_for_pooled_projection:  # InstantX's, which do not shift latents either
            text["pooled_projections"], shift = torch.zeros_like(text["pooled_projections"]), 0
        if net.config.joint_attention_dim is None:
            text["encoder_hidden_states"] = None
        return {
            "hidden_states": tensor,
            "controlnet_cond": (control - shift) * condition["scaling_factor"],
            "timestep": inputs.timestep.expand(tensor.shape[0]),
            **text,
        }


class _SD3Vae(Part):
    part = "vae"

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl import DistributedAutoencoderKL

        from gfdit.adapters.components.shells import pretrained

        return SimpleNamespace(vae=pretrained(DistributedAutoencoderKL, self.source, "vae", dtype, device))

    def num_bytes(self, components: Any) -> int:
        return super().num_bytes(components.vae)


class SD3ControlImage(_SD3Vae, ControlImage):
    """To latents that are neither shifted nor scaled: nets differ in that. Either branch has a row and a draw."""

    def encode(self, components: Any, pixels: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
        vae = components.vae
        latents = vae.encode(pixels.repeat(2, 1, 1, 1)).latent_dist.sample(generator)
        factors = {name: vae.config[name] for name in ("shift_factor", "scaling_factor")}
        return {"latents": latents, **factors}


class SD3Decoder(_SD3Vae, Decoder):
    def decode(self, components: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        vae = components.vae
        latents = (latents.to(vae.dtype) / vae.config.scaling_factor) + vae.config.shift_factor
        return vae.decode(latents, return_dict=False)[0]


def _text_arguments(inputs: StepInputs, sign: str = "") -> dict[str, Any]:
    return {
        "encoder_hidden_states": inputs.embeds[f"{sign}prompt_embeds"],
        "pooled_projections": inputs.embeds[f"{sign}pooled"],
    }


def _guidance(settings: Mapping[str, Any]) -> float:
    return given(settings, "guidance_scale", _DEFAULT_GUIDANCE)


def _position_embedding(source: str) -> Any:
    """That of the transformer at ``source``, without loading the rest of it."""
    from diffusers.models.embeddings import PatchEmbed
    from safetensors import safe_open

    config = config_file(source, "transformer")
    embed = PatchEmbed(
        height=config["sample_size"],
        width=config["sample_size"],
        patch_size=config["patch_size"],
        in_channels=config["in_channels"],
        embed_dim=config["num_attention_heads"] * config["attention_head_dim"],
        pos_embed_max_size=config["pos_embed_max_size"],
    )
    weights: dict[str, Any] = {}
    for path in sorted((Path(source) / "transformer").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith("pos_embed.")]  # noqa: SIM118 - no mapping
            weights |= {name.removeprefix("pos_embed."): file.get_tensor(name) for name in names}
    embed.load_state_dict(weights)
    return embed


def _pipeline() -> Any:
    from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline
