"""A workflow as its author writes it, and its nodes run in the order in which they were recorded."""

from __future__ import annotations

from typing import Any

from gfdit.adapters.components.sd3 import (
    SD3ControlImage,
    SD3ControlNet,
    SD3Decoder,
    SD3Noise,
    SD3TextEncoder,
    SD3Transformer,
)
from gfdit.adapters.testing.component_rank import Arrived, Call, ComponentRank
from gfdit.core.layouts import ExecutionLayout
from gfdit.workflow import Image, Workflow
from gfdit.workflow.compiling import CompiledWorkflow
from gfdit.workflow.recording import Input, Value
from tests.adapters.components.generation import TEXT_TOKENS, Asked, Made, picture


def record(asked: Asked) -> Workflow:
    """Of Stable Diffusion 3 with as many nets as ``asked`` has, and with its LoRA."""
    source = asked.source
    with Workflow("controlled", steps=asked.steps) as workflow:
        prompt, negative = workflow.add_input("prompt", str), workflow.add_input("negative_prompt", str, None)
        seed, guidance = workflow.add_input("seed", int), workflow.add_input("guidance_scale", float, 4.0)
        size: dict[str, Any] = {side: workflow.add_input(side, int, 128) for side in ("height", "width")}
        base = SD3Transformer(source)
        if asked.lora is not None:
            base.add_patch(asked.lora)
        embeds = SD3TextEncoder(source)(prompt=prompt, negative_prompt=negative, max_sequence_length=TEXT_TOKENS)
        latents = SD3Noise(source)(seed=seed, **size)
        encode = SD3ControlImage(source)
        nets = []
        for number, net in enumerate(asked.nets):
            image = workflow.add_input(f"image{number}", Image)
            nets.append((net, SD3ControlNet(net.source), encode(image=image, **size)))
        for step in range(asked.steps):
            residuals = [
                model(
                    step,
                    latents=latents,
                    embeds=embeds,
                    condition=condition,
                    guidance_scale=guidance,
                    scale=net.scale,
                    start=net.start,
                    end=net.end,
                )
                for net, model, condition in nets
            ]
            latents = base(step, latents=latents, embeds=embeds, residuals=residuals, guidance_scale=guidance)
        workflow.add_output(SD3Decoder(source)(latents=latents))
    return workflow


def run_recorded(rank: ComponentRank, asked: Asked) -> tuple[Made, int]:
    """The image, and how many components it took."""
    compiled = CompiledWorkflow(record(asked))
    request = {"prompt": asked.prompt, "negative_prompt": asked.negative, "seed": asked.seed}
    request |= {f"image{number}": picture(net.image_seed) for number, net in enumerate(asked.nets)}
    given = compiled.given(request)
    made: dict[Any, Any] = {}

    def value_of(bound: Any, many: bool) -> Any:
        if many:
            return [value_of(each, False) for each in bound]
        if isinstance(bound, Value):
            return made[bound.node.name, bound.port.name]
        return given[bound.name] if isinstance(bound, Input) else bound

    loaded = set()
    for node in compiled.workflow.nodes:
        model = node.model
        rank.host.load(model)
        loaded.add(model.component)
        call = Call(ExecutionLayout((rank.comm.rank,)), node.step or 0, asked.steps)
        inputs = {name: value_of(bound, model.inputs[name].many) for name, bound in node.bindings.items()}
        outputs = rank.host.execute(model, call, inputs)
        for name, port in model.outputs.items():
            made[node.name, name] = Arrived(call.parts[name]) if port.streamed else outputs[name]
    last = [value for (_, name), value in made.items() if name == "latents"][-1]
    assert compiled.workflow.output is not None
    image = made[compiled.workflow.output.node.name, "image"]
    return Made(last["latents"].clone(), image.clone()), len(loaded)
