"""The kinds of part that image pipelines are made of, as models of workflows: what all families have in common.

A value between nodes is a dictionary of tensors and plain data, and none is changed in place: a step makes new
latents from old ones, with a scheduler of its own. So a task can run again, anywhere.

``latents``
    What steps change: ``latents``, ``scheduler`` and ``step_index``; and the image's ``height`` and ``width``. The
    schedulers of these families draw nothing, so there is no generator.
``embeddings``
    Of one prompt and, for guidance, of a negative one: ``prompt_embeds`` (1, T, D) and what else the family's text
    encoders give, each also as ``negative_...``.
``condition``
    A control image, encoded: ``latents``, in the form in which a net takes them.
``residuals``
    A stream, see :mod:`gfdit.adapters.components.residuals`.

A family is a subclass of each. Nothing heavy is imported before weights are loaded, so a workflow can be read
anywhere.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from gfdit.adapters.sequence_plan import SequencePlan
from gfdit.core.layouts import SINGLE, ParallelSpec
from gfdit.core.tasks import TaskKind
from gfdit.workflow import Condition, Embeddings, Image, Latents, Model, Residuals
from gfdit.workflow.model import Call

if TYPE_CHECKING:
    import torch

    from gfdit.adapters.components.lora import LoraSlot
    from gfdit.adapters.components.residuals import ResidualSink, ResidualSource

VAE_SCALE = 8  # it halves each side three times
ALIGNMENT = 2 * VAE_SCALE  # the transformer takes 2 x 2 patches

Settings = tuple[tuple[str, type], ...]


class Part(Model):
    """A part of the checkpoint at ``source``, a folder in the layout of diffusers."""

    #: Models that name the same one share what is loaded, whatever their class.
    part: ClassVar[str]
    #: Inputs that are numbers and need not be given.
    settings: ClassVar[Settings] = ()

    def setup_io(self) -> None:
        for name, kind in self.settings:
            self.add_input(name, kind, optional=True)

    @property
    def component(self) -> str:
        return ":".join((self.part, self.source, str(self.dtype)))

    def num_bytes(self, components: Any) -> int:
        from gfdit.adapters.components.shells import num_bytes

        return num_bytes(components)


def given(settings: Mapping[str, Any], name: str, default: float) -> float:
    """A setting, or what it is by default."""
    value = settings.get(name)
    return default if value is None else float(value)


def config_file(source: str, folder: str) -> dict[str, Any]:
    """That of one part of a checkpoint. Raises ``ValueError`` for a source that has no such part."""
    path = Path(source) / folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{source} is no checkpoint with a folder {folder!r}")
    return dict(json.loads(path.read_text()))


class TextEncoder(Part):
    """Prompts to embeddings."""

    kind = TaskKind.ENCODE
    max_sequence_length: ClassVar[int]
    settings: ClassVar[Settings] = (("max_sequence_length", int),)

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_input("negative_prompt", str, optional=True)
        super().setup_io()
        self.add_output("embeds", Embeddings)

    def execute(
        self,
        components: Any,
        call: Call,
        prompt: str,
        negative_prompt: str | None = None,
        max_sequence_length: int | None = None,
    ) -> dict[str, Any]:
        length = max_sequence_length or self.max_sequence_length
        embeds = self.embed(components, prompt, length)
        negative = self.negative(negative_prompt)
        if negative is not None:
            made = self.embed(components, negative, length)
            embeds |= {f"negative_{name}": tensor for name, tensor in made.items()}
        return {"embeds": embeds}

    def guided(self, inputs: Mapping[str, Any]) -> bool:
        """Whether there is something to guide against."""
        return self.negative(inputs.get("negative_prompt")) is not None

    def negative(self, prompt: str | None) -> str | None:
        """What to guide against; None for nothing."""
        return prompt

    def embed(self, components: Any, prompt: str, max_sequence_length: int) -> dict[str, Any]:
        raise NotImplementedError


class Noise(Part):
    """A seed and a size to the latents before the first step, with a scheduler for all steps; without weights."""

    kind = TaskKind.PREPARE
    folders = ()
    #: Latent pixels that are one token in the pipeline's latents: 4, or 1 where the transformer packs them itself.
    pixels_per_token: ClassVar[int] = 4

    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_input("height", int)
        self.add_input("width", int)
        self.add_output("latents", Latents)

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        from gfdit.adapters.components.shells import shell

        return shell(
            self.pipeline_class(),
            scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(self.source, subfolder="scheduler"),
            device=device,
            dtype=dtype,
            od_config=SimpleNamespace(dtype=dtype),  # where some of them look for it
            channels=int(config_file(self.source, "transformer")["in_channels"]) // self.pixels_per_token,
            vae_scale_factor=VAE_SCALE,
        )

    def num_bytes(self, components: Any) -> int:
        return 0

    def execute(self, components: Any, call: Call, seed: int, height: int, width: int) -> dict[str, Any]:
        import torch

        for name, side in (("height", height), ("width", width)):
            if side < ALIGNMENT or side % ALIGNMENT:
                raise ValueError(f"{name} must be a multiple of {ALIGNMENT} pixels, got {side}")
        pipeline = copy.copy(components)
        pipeline.scheduler = copy.deepcopy(components.scheduler)
        generator = torch.Generator(device=pipeline.device).manual_seed(seed)
        latents = self.draw(pipeline, height, width, generator)
        pipeline.prepare_timesteps(call.num_steps, None, latents.shape[1])
        pipeline.scheduler.set_begin_index(0)
        made = {"latents": latents, "scheduler": pipeline.scheduler, "step_index": 0}
        return {"latents": {**made, "height": height, "width": width}}

    def pipeline_class(self) -> type:
        """vLLM-Omni's, which can draw latents and set up a scheduler."""
        raise NotImplementedError

    def draw(self, pipeline: Any, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a network reads at a step: ``timestep`` is a scalar, the scheduler's."""

    latents: dict[str, Any]
    timestep: torch.Tensor
    embeds: dict[str, Any]
    settings: dict[str, Any]

    @property
    def tensor(self) -> torch.Tensor:
        """The latents themselves."""
        tensor: torch.Tensor = self.latents["latents"]
        return tensor

    @property
    def timesteps(self) -> torch.Tensor:
        """One for every row of the latents."""
        return self.timestep.expand(self.tensor.shape[0])


@dataclass(frozen=True, slots=True)
class LoadedTransformer:
    """A base transformer in its shell, with what is hooked into it."""

    pipeline: Any
    sink: ResidualSink
    loras: LoraSlot


@dataclass(frozen=True, slots=True)
class Branches:
    """Arguments of a transformer's pass for either branch of guidance, and how their predictions become one."""

    positive: dict[str, Any]
    negative: dict[str, Any] | None
    scale: float
    normalize: bool = False


class BaseTransformer(Part):
    """One denoising step per call: the transformer for one or two branches of guidance, then the scheduler."""

    kind = TaskKind.DENOISE
    part = "transformer"
    folders = ("transformer",)
    settings: ClassVar[Settings] = (("guidance_scale", float),)
    #: If any, takes the place of the transformer's own plan.
    sequence_plan: ClassVar[SequencePlan | None] = None
    default_guidance: ClassVar[float]

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_input("residuals", Residuals, deferred=True, many=True, optional=True)
        super().setup_io()
        self.add_output("latents", Latents)

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedTransformer:
        from gfdit.adapters.components.lora import LoraSlot
        from gfdit.adapters.components.shells import config_of

        pipeline, sink = self.load_pipeline(config_of(self.source, dtype), device)
        loras = LoraSlot(pipeline, device, dtype)
        for patch in self.patches:
            loras.prepare(patch.source)
        return LoadedTransformer(pipeline, sink, loras)

    def transformers(self, components: LoadedTransformer) -> list[torch.nn.Module]:
        """Those whose tokens can be split."""
        return [components.pipeline.transformer]

    def num_bytes(self, components: LoadedTransformer) -> int:
        return super().num_bytes(components.pipeline)

    def read_patches(self, components: LoadedTransformer) -> None:
        for patch in self.patches:
            components.loras.read(patch.source)

    def execute(
        self,
        components: LoadedTransformer,
        call: Call,
        latents: dict[str, Any],
        embeds: dict[str, Any],
        residuals: Any = None,
        **settings: Any,
    ) -> dict[str, Any]:
        from gfdit.adapters.forward.waits import WithoutWaits

        step, pipeline = latents["step_index"], components.pipeline
        if step != call.step_index:
            raise ValueError(f"the latents are those before step {step}, not {call.step_index}")
        scheduler = copy.copy(latents["scheduler"])  # it replaces its tensors, and counts in itself
        inputs = StepInputs(latents, scheduler.timesteps[step], embeds, settings)
        branches = self.branches(pipeline, inputs)
        guided = branches.negative is not None
        self._use_patches(components.loras, call)
        with components.sink.adding(_streams(residuals)):
            noise = pipeline.predict_noise_maybe_with_cfg(
                guided, branches.scale, branches.positive, branches.negative, branches.normalize
            )
        with WithoutWaits():
            tensor = pipeline.scheduler_step_maybe_with_cfg(
                noise, inputs.timestep, inputs.tensor, guided, per_request_scheduler=scheduler
            )
        return {"latents": {**latents, "latents": tensor, "scheduler": scheduler, "step_index": step + 1}}

    def candidates(self, num_ranks: int, guided: bool = False) -> tuple[ParallelSpec, ...]:
        """Degrees that divide the attention heads, alone and, if ``guided``, with a rank for either branch."""
        degrees = [sp for sp in range(1, num_ranks + 1) if self.num_heads % sp == 0]
        specs = [ParallelSpec(sp) for sp in degrees]
        specs += [ParallelSpec(sp, 2) for sp in degrees if guided and 2 * sp <= num_ranks]
        return tuple(sorted(specs, key=lambda spec: (spec.size, spec.cfg))) or (SINGLE,)

    @cached_property
    def num_heads(self) -> int:
        return int(config_file(self.source, "transformer")["num_attention_heads"])

    def _use_patches(self, loras: LoraSlot, call: Call) -> None:
        """The control plane says which are active; where it does not, a patch from its own step on, or always."""
        chosen = call.patches
        if chosen is None:
            chosen = [patch for patch in self.patches if patch.step is None or call.step_index >= patch.step]
        if len(chosen) > 1:
            names = ", ".join(patch.source for patch in chosen)
            raise ValueError(f"one LoRA at a time can be active, not {names}")
        if chosen:
            loras.use(chosen[0].source, chosen[0].scale)
        else:
            loras.use(None)

    # Of a family

    def load_pipeline(self, od_config: Any, device: torch.device) -> tuple[Any, ResidualSink]:
        raise NotImplementedError

    def branches(self, pipeline: Any, inputs: StepInputs) -> Branches:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LoadedNet:
    """A ControlNet of diffusers', with hooks that let its residuals go one by one."""

    net: Any
    source: ResidualSource


class ControlNet(Part):
    """One of diffusers' nets at ``source``, run once for every step in its window.

    ``scale`` is the weight of its residuals; outside of ``start`` to ``end``, parts of all steps, it does nothing.
    Each may also be a value of the request's.
    """

    kind = TaskKind.CONTROL
    part = "controlnet"
    net_class: ClassVar[str]
    settings: ClassVar[Settings] = (("scale", float), ("start", float), ("end", float))

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_input("condition", Condition)
        super().setup_io()
        self.add_output("residuals", Residuals, streamed=True)

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedNet:
        import diffusers

        from gfdit.adapters.components.residuals import ResidualSource
        from gfdit.adapters.components.shells import pretrained

        net = pretrained(getattr(diffusers, self.net_class), self.source, "", dtype, device)
        return LoadedNet(net, ResidualSource(net))

    def num_bytes(self, components: LoadedNet) -> int:
        return super().num_bytes(components.net)

    def execute(
        self,
        components: LoadedNet,
        call: Call,
        latents: dict[str, Any],
        embeds: dict[str, Any],
        condition: dict[str, Any],
        **settings: Any,
    ) -> dict[str, Any]:
        from gfdit.adapters.components.residuals import Header

        start, end = given(settings, "start", 0.0), given(settings, "end", 1.0)
        active = in_window(call.step_index, call.num_steps, start, end)
        header = Header(components.source.counts, active, **self.header(components.net, settings))
        call.emit("residuals", 0, header.to_tensor())
        if active:
            timestep = latents["scheduler"].timesteps[latents["step_index"]]
            arguments = self.arguments(components.net, StepInputs(latents, timestep, embeds, settings), condition)
            components.source.run(
                lambda: components.net(**arguments, return_dict=False),
                given(settings, "scale", 1.0),
                lambda index, tensor: call.emit("residuals", index, tensor),
            )
        return {}

    def header(self, net: Any, settings: dict[str, Any]) -> dict[str, bool]:
        """How the residuals of this net are meant."""
        return {}

    def arguments(self, net: Any, inputs: StepInputs, condition: dict[str, Any]) -> dict[str, Any]:
        """Of the net's ``forward``."""
        raise NotImplementedError


def in_window(step: int, num_steps: int, start: float = 0.0, end: float = 1.0) -> bool:
    """Whether a net with this window of steps, in parts of all of them, runs at ``step``; as diffusers decides."""
    return not (step / num_steps < start or (step + 1) / num_steps > end)


class ControlImage(Part):
    """An image to a condition. ``seed`` is that of the draw from the VAE's distribution, 0 unless given."""

    kind = TaskKind.ENCODE
    part = "vae"
    folders = ("vae",)
    settings: ClassVar[Settings] = (("seed", int),)

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_input("height", int)
        self.add_input("width", int)
        super().setup_io()
        self.add_output("condition", Condition)

    def execute(
        self, components: Any, call: Call, image: Any, height: int, width: int, seed: int | None = None
    ) -> dict[str, Any]:
        import torch

        vae = components.vae
        pixels = pixels_of(image, height, width).to(vae.device, vae.dtype)
        generator = torch.Generator(device=vae.device).manual_seed(seed or 0)
        return {"condition": self.encode(components, pixels, generator)}

    def encode(self, components: Any, pixels: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
        raise NotImplementedError


def pixels_of(image: Any, height: int, width: int) -> torch.Tensor:
    """An image of PIL's to (1, 3, height, width), between -1 and 1. Raises ``ValueError`` for what is none."""
    import PIL.Image
    from diffusers.image_processor import VaeImageProcessor

    if not isinstance(image, PIL.Image.Image):
        raise ValueError(f"a control image must be an image, got {type(image).__name__}")
    processor = VaeImageProcessor(vae_scale_factor=ALIGNMENT, do_convert_rgb=True, do_normalize=True)
    # Channels come last in memory otherwise, as they do in PIL, and convolutions round differently.
    return processor.preprocess(image, height=height, width=width).contiguous()


class Decoder(Part):
    """Latents to ``image``, (1, 3, H, W) between -1 and 1."""

    kind = TaskKind.DECODE
    part = "vae"
    folders = ("vae",)

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_output("image", Image)

    def execute(self, components: Any, call: Call, latents: dict[str, Any]) -> dict[str, Any]:
        return {"image": self.decode(components, latents["latents"], latents["height"], latents["width"])}

    def decode(self, components: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        raise NotImplementedError


def _streams(residuals: Any) -> list[Any]:
    if residuals is None:
        return []
    return list(residuals) if isinstance(residuals, (list, tuple)) else [residuals]
