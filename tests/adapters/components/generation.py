"""The same images twice: by components, node by node, and by one of diffusers' pipelines with the same weights.

Runs in forked processes that have imported vLLM-Omni. Nothing here knows an engine: nodes are called in order, and
what they make is handed on in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import PIL.Image
import torch

from gfdit.adapters.components import flux, qwen_image, sd3
from gfdit.adapters.testing.component_rank import Arrived, Call, ComponentRank
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec
from gfdit.workflow import Patch

TEXT_TOKENS = 32

Layout = tuple[tuple[int, ...], ParallelSpec]


@dataclass(frozen=True)
class Net:
    """A ControlNet at ``source`` with a control image of its own."""

    source: str
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    mode: int | None = None
    image_seed: int = 0
    pixels: bool = False
    base: str | None = None


@dataclass(frozen=True)
class Asked:
    """An image. ``guidance`` is SD3's ``guidance_scale``, and of the others ``true_cfg_scale``."""

    family: str
    source: str
    nets: tuple[Net, ...] = ()
    lora: Patch | None = None
    guidance: float = 1.0
    steps: int = 4
    height: int = 128
    width: int = 128
    seed: int = 5
    prompt: str = "a red panda"
    negative: str = "blurry"
    dtype: str | None = None

    @property
    def guided(self) -> bool:
        return self.guidance > 1

    @property
    def negative_prompt(self) -> str | None:
        return self.negative if self.guided else None


@dataclass(frozen=True)
class Made:
    """``latents`` before decoding, ``image`` between -1 and 1."""

    latents: torch.Tensor
    image: torch.Tensor

    def latents_difference(self, other: Made) -> float:
        return float((self.latents - other.latents).abs().max())

    def difference(self, other: Made) -> float:
        """The largest of an element, of latents or image."""
        pairs = ((self.latents, other.latents), (self.image, other.image))
        return max(float((one - another).abs().max()) for one, another in pairs)


@dataclass
class Parts:
    """The models of a family, for one request."""

    text: Any
    noise: Any
    base: Any
    decoder: Any
    image: Any
    nets: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, asked: Asked) -> Parts:
        module, name = {
            "flux": (flux, "Flux"),
            "sd3": (sd3, "SD3"),
            "qwen-image": (qwen_image, "QwenImage"),
        }[asked.family]

        def of_source(part: str, source: str = asked.source, **options: Any) -> Any:
            return getattr(module, name + part)(source, dtype=asked.dtype, **options)

        parts = cls(*map(of_source, ("TextEncoder", "Noise", "Transformer", "Decoder", "ControlImage")))
        parts.nets = [of_source("ControlNet", net.source, base=net.base) for net in asked.nets]
        if asked.lora is not None:
            parts.base.add_patch(asked.lora)
        return parts

    def __iter__(self) -> Iterator[Any]:
        yield from (self.text, self.noise, self.base, self.decoder, *self.nets)
        if self.nets:
            yield self.image


def picture(seed: int) -> PIL.Image.Image:
    """Of another size than what is made."""
    values = np.random.default_rng(seed).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    return PIL.Image.fromarray(values).resize((150, 170), PIL.Image.Resampling.BICUBIC)


class Generation:
    """One request on one rank, a step at a time."""

    def __init__(self, rank: ComponentRank, asked: Asked) -> None:
        self.asked = asked
        self._rank = rank
        self._alone = ExecutionLayout((rank.comm.rank,), SINGLE)
        self.parts = Parts.of(asked)
        for model in self.parts:
            rank.host.load(model)
        text: dict[str, Any] = {"prompt": asked.prompt, "negative_prompt": asked.negative_prompt}
        self.embeds = self._call(self.parts.text, **text, max_sequence_length=TEXT_TOKENS)["embeds"]
        self.size: dict[str, Any] = {"height": asked.height, "width": asked.width}
        self.conditions = [self._condition(net) for net in asked.nets]
        self.latents = self._call(self.parts.noise, seed=asked.seed, **self.size)["latents"]

    def step(self, layout: ExecutionLayout | None = None) -> None:
        """On this rank, or as a member of ``layout``."""
        guidance = self.guidance()
        self.latents = self._call(
            self.parts.base,
            layout,
            latents=self.latents,
            embeds=self.embeds,
            residuals=self.residuals(guidance.get("guidance_scale")) or None,
            **guidance,
        )["latents"]

    def guidance(self) -> dict[str, float]:
        name = "guidance_scale" if self.asked.family == "sd3" else "true_cfg_scale"
        return {name: self.asked.guidance}

    def residuals(self, guidance_scale: float | None) -> list[Arrived]:
        streams = []
        for net, model, condition in zip(self.asked.nets, self.parts.nets, self.conditions, strict=True):
            more = {} if guidance_scale is None else {"guidance_scale": guidance_scale}
            if net.mode is not None:
                more["mode"] = net.mode
            call = self._new_call(None)
            inputs = {"latents": self.latents, "embeds": self.embeds, "condition": condition, **more}
            window = {"scale": net.scale, "start": net.start, "end": net.end}
            self._rank.host.execute(model, call, {**inputs, **window})
            streams.append(Arrived(call.parts["residuals"]))
        return streams

    def finish(self) -> Made:
        image = self._call(self.parts.decoder, latents=self.latents)["image"]
        return Made(self.latents["latents"].clone(), image.clone())

    def _condition(self, net: Net) -> Any:
        model = (
            flux.FluxControlPixels(self.asked.source, dtype=self.asked.dtype) if net.pixels else self.parts.image
        )
        self._rank.host.load(model)
        return self._call(model, image=picture(net.image_seed), **self.size)["condition"]

    def _call(self, model: Any, layout: ExecutionLayout | None = None, **inputs: Any) -> Any:
        return self._rank.host.execute(model, self._new_call(layout), inputs)

    def _new_call(self, layout: ExecutionLayout | None) -> Call:
        step = self.latents["step_index"] if hasattr(self, "latents") else 0
        return Call(layout or self._alone, step_index=step, num_steps=self.asked.steps)


def generate(rank: ComponentRank, asked: Asked, layout: Layout | None = None) -> Made:
    """All steps on this rank, or all of them under one layout by all of its ranks."""
    run = Generation(rank, asked)
    for _ in range(asked.steps):
        run.step(None if layout is None else ExecutionLayout(*layout))
    return run.finish()


def generate_in_turns(rank: ComponentRank, several: tuple[Asked, ...]) -> list[Made]:
    """A step of each after the other, in one process."""
    runs = [Generation(rank, asked) for asked in several]
    for step in range(max(asked.steps for asked in several)):
        for run in runs:
            if step < run.asked.steps:
                run.step()
    return [run.finish() for run in runs]


def generate_with(rank: ComponentRank, asked: Asked, error: Any) -> Made:
    """With ``error`` made of the residuals' way through the base transformer."""
    run = Generation(rank, asked)
    sink = rank.host.components(run.parts.base).sink
    spread = sink.spread
    sink.spread = error(spread)
    try:
        for _ in range(asked.steps):
            run.step()
        return run.finish()
    finally:
        sink.spread = spread


def one_block_late(spread: Any) -> Any:
    """A sabotage: block ``i`` gets what was meant for the one before."""
    return lambda block, num_blocks, count: None if block == 0 else spread(block - 1, num_blocks, count)


# The reference


@torch.inference_mode()
def reference(asked: Asked) -> Made:
    """By diffusers' pipeline, in one call."""
    pipeline = _pipeline(asked)
    pipeline.set_progress_bar_config(disable=True)
    drawn = torch.Generator().manual_seed(asked.seed)
    drawing = torch.Generator()
    _reseed_for_every_image(pipeline.vae, drawing)
    latents = _noise(asked, pipeline, drawn)
    arguments: dict[str, Any] = {
        "prompt": asked.prompt,
        "negative_prompt": asked.negative_prompt,
        "num_inference_steps": asked.steps,
        "height": asked.height,
        "width": asked.width,
        "latents": latents,
        "generator": drawing,
        "max_sequence_length": TEXT_TOKENS,
        "output_type": "latent",
    }
    if asked.family == "sd3":
        arguments["guidance_scale"] = asked.guidance
    else:
        arguments["true_cfg_scale"] = asked.guidance
    if asked.family == "flux":
        arguments["guidance_scale"] = 3.5
    if asked.nets:
        arguments |= _control(asked)
    undo = _patched_from_its_step(asked, pipeline, arguments)
    latents = pipeline(**arguments).images
    undo()
    return Made(latents, _decoded(asked, pipeline, latents))


_PIPELINES: dict[Any, Any] = {}


def _pipeline(asked: Asked) -> Any:
    import diffusers

    plain, controlled, net = {
        "flux": ("FluxPipeline", "FluxControlNetPipeline", "FluxControlNetModel"),
        "sd3": ("StableDiffusion3Pipeline", "StableDiffusion3ControlNetPipeline", "SD3ControlNetModel"),
        "qwen-image": ("QwenImagePipeline", "QwenImageControlNetPipeline", "QwenImageControlNetModel"),
    }[asked.family]
    sources = tuple(net.source for net in asked.nets)
    key = asked.source, sources
    if key not in _PIPELINES:
        more: dict[str, Any] = {}
        if sources:
            nets = [getattr(diffusers, net).from_pretrained(source) for source in sources]
            more["controlnet"] = nets[0] if len(nets) == 1 else nets
        name = controlled if sources else plain
        made = getattr(diffusers, name).from_pretrained(asked.source, torch_dtype=torch.float32, **more)
        for part in made.components.values():
            if isinstance(part, torch.nn.Module):
                align(part)
        _PIPELINES[key] = made
    return _PIPELINES[key]


def align(part: torch.nn.Module) -> None:
    """A mapped file's tensors begin anywhere, and some kernels round otherwise where they do."""
    for tensor in (*part.parameters(), *part.buffers()):
        tensor.data = tensor.data.clone()


def _noise(asked: Asked, pipeline: Any, generator: torch.Generator) -> torch.Tensor:
    height, width = asked.height // 8, asked.width // 8
    if asked.family == "sd3":
        return torch.randn(1, 16, height, width, generator=generator)
    shape = (1, 16, height, width) if asked.family == "flux" else (1, 1, 16, height, width)
    return pipeline._pack_latents(torch.randn(shape, generator=generator), 1, 16, height, width)


def _reseed_for_every_image(vae: Any, generator: torch.Generator) -> None:
    """Pipelines draw for one image after the other from one generator, or from that of the process."""
    encode = type(vae).encode

    def encode_from_seed(*args: Any, **kwargs: Any) -> Any:
        generator.manual_seed(0)
        torch.manual_seed(0)
        return encode(vae, *args, **kwargs)

    vae.encode = encode_from_seed


def _control(asked: Asked) -> dict[str, Any]:
    several: dict[str, Any] = {
        "control_image": [picture(net.image_seed) for net in asked.nets],
        "controlnet_conditioning_scale": [net.scale for net in asked.nets],
        "control_guidance_start": [net.start for net in asked.nets],
        "control_guidance_end": [net.end for net in asked.nets],
    }
    if asked.family == "flux":
        several["control_mode"] = [net.mode for net in asked.nets]
    if len(asked.nets) > 1:
        return several
    return {name: values[0] for name, values in several.items()}


def _patched_from_its_step(asked: Asked, pipeline: Any, arguments: dict[str, Any]) -> Any:
    """Fuse the LoRA into the weights before its step; returns what takes it out again."""
    lora = asked.lora
    if lora is None:
        return lambda: None
    before = {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}
    step = lora.step or 0
    if step == 0:
        fuse(pipeline.transformer, lora)

    def after(pipeline: Any, index: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if index + 1 == step:
            fuse(pipeline.transformer, lora)
        return values

    arguments["callback_on_step_end"] = after
    return lambda: pipeline.transformer.load_state_dict(before)


def fuse(transformer: Any, lora: Patch) -> None:
    import json
    from pathlib import Path

    from safetensors.torch import load_file

    weights = load_file(Path(lora.source) / "adapter_model.safetensors")
    config = json.loads((Path(lora.source) / "adapter_config.json").read_text())
    factor = lora.scale * config["lora_alpha"] / config["r"]
    for name in [name for name in weights if ".lora_A." in name]:
        layer = transformer.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A")[0])
        layer.weight.add_(factor * weights[name.replace("lora_A", "lora_B")] @ weights[name])


def _decoded(asked: Asked, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    """As the pipelines do at their end."""
    vae = pipeline.vae
    if asked.family != "sd3":
        latents = pipeline._unpack_latents(latents, asked.height, asked.width, pipeline.vae_scale_factor)
    if asked.family == "qwen-image":
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
        spread = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
        return vae.decode(latents / spread + mean, return_dict=False)[0][:, :, 0]
    latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
    return vae.decode(latents, return_dict=False)[0]
