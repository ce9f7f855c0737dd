"""FLUX, Stable Diffusion 3 and Qwen-Image with no, one and two ControlNets, which share what they have in common.

Where the weights are is read from a file beside this one, `controlnets.json`; `gfdit tiny-model` makes small ones.
"""

import json
from pathlib import Path

from gfdit.adapters.components import flux, qwen_image, sd3
from gfdit.workflow import Image, Workflow, workflow

WEIGHTS = json.loads(Path(__file__).with_suffix(".json").read_text())
FAMILIES = {"flux": (flux, "Flux"), "sd3": (sd3, "SD3"), "qwen-image": (qwen_image, "QwenImage")}


def record(family: str, num_nets: int, steps: int) -> Workflow:
    module, name = FAMILIES[family]
    base = WEIGHTS[family]
    text, noise, control, transformer, decoder = (
        getattr(module, name + part)(base)
        for part in ("TextEncoder", "Noise", "ControlImage", "Transformer", "Decoder")
    )
    nets = [
        getattr(module, name + "ControlNet")(source, name=f"net-{number}")
        for number, source in enumerate(WEIGHTS[f"{family}-nets"][:num_nets])
    ]
    with Workflow(f"{family}-{num_nets}", steps) as made:
        prompt, negative = made.add_input("prompt", str), made.add_input("negative_prompt", str, None)
        seed = made.add_input("seed", int, 0)
        size = {name: made.add_input(name, int, 1024) for name in ("height", "width")}
        if family == "sd3":
            guidance = {"guidance_scale": made.add_input("guidance_scale", float, 7.0)}
        else:
            scale = 4.0 if family == "qwen-image" else 1.0
            guidance = {"true_cfg_scale": made.add_input("true_cfg_scale", float, scale)}
        images = [made.add_input(f"image_{number}", Image) for number in range(num_nets)]
        length = made.add_input("max_sequence_length", int, None)
        embeds = text(prompt=prompt, negative_prompt=negative, max_sequence_length=length)
        conditions = [control(image=image, **size) for image in images]
        latents = noise(seed=seed, **size)
        for step in range(steps):
            residuals = [
                net(step, latents=latents, embeds=embeds, condition=condition, scale=0.7)
                for net, condition in zip(nets, conditions, strict=True)
            ]
            latents = transformer(step, latents=latents, embeds=embeds, residuals=residuals, **guidance)
        made.add_output(decoder(latents=latents))
    return made


def builder(family: str, num_nets: int) -> object:
    @workflow(steps=28)
    def build(steps: int) -> Workflow:
        return record(family, num_nets, steps)

    return build


for _family in [name for name in FAMILIES if name in WEIGHTS]:
    for _num_nets in range(1 + len(WEIGHTS[f"{_family}-nets"])):
        globals()[f"{_family}_{_num_nets}"] = builder(_family, _num_nets)
