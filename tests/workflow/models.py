"""Models without weights, and workflows of them: an image is the list of what was done to make it."""

from __future__ import annotations

from typing import Any

from gfdit.core import ParallelSpec
from gfdit.core.tasks import TaskKind
from gfdit.workflow import Condition, Embeddings, Image, Latents, Model, Residuals, Workflow, workflow

NUM_PARTS = 3


class Text(Model):
    kind = TaskKind.ENCODE

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_output("embeds", Embeddings)

    def execute(self, components: Any, call: Any, prompt: str) -> dict[str, Any]:
        return {"embeds": {"text": prompt}}


class Noise(Model):
    kind = TaskKind.PREPARE

    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_output("latents", Latents)

    def execute(self, components: Any, call: Any, seed: int) -> dict[str, Any]:
        return {"latents": {"done": (f"noise {seed}",)}}


class Control(Model):
    kind = TaskKind.ENCODE

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_output("condition", Condition)


class Net(Model):
    kind = TaskKind.CONTROL

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_input("scale", float, optional=True)
        self.add_output("residuals", Residuals, streamed=True)


class Base(Model):
    kind = TaskKind.DENOISE

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_input("guidance", float, optional=True)
        self.add_input("residuals", Residuals, deferred=True, many=True, optional=True)
        self.add_output("latents", Latents)

    def candidates(self, num_ranks: int, guided: bool = False) -> tuple[ParallelSpec, ...]:
        return tuple(ParallelSpec(sp) for sp in (1, 2, 4) if sp <= num_ranks)


class Decode(Model):
    kind = TaskKind.DECODE

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_output("image", Image)


def record(num_nets: int = 0, steps: int = 2, name: str = "") -> Workflow:
    text, noise, base, decode = Text("sd"), Noise("sd"), Base("sd"), Decode("sd")
    nets = [Net(f"net-{number}", name=f"net-{number}") for number in range(num_nets)]
    with Workflow(name or f"nets-{num_nets}", steps) as made:
        prompt, seed = made.add_input("prompt", str), made.add_input("seed", int, 0)
        guidance = made.add_input("guidance", float, 1.0)
        embeds, latents = text(prompt=prompt), noise(seed=seed)
        for step in range(steps):
            residuals = [net(step, latents=latents, embeds=embeds) for net in nets]
            latents = base(step, latents=latents, embeds=embeds, residuals=residuals, guidance=guidance)
        made.add_output(decode(latents=latents))
    return made


@workflow(steps=2)
def two_nets(steps: int) -> Workflow:
    return record(2, steps)
