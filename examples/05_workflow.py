"""Several models that make one image: recorded, checked and compiled to tasks, then placed and simulated.

A base model with a ControlNet, whose residuals the base model reads while they are made. Weights and times are
made up here; for models that run see docs/workflows.md. Also try `gfdit workflows examples/05_workflow.py`.

    python examples/05_workflow.py
"""

from functools import partial

from gfdit.core import Request, TaskGraph
from gfdit.core.components import Component
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.core.policy.loading import load_policy
from gfdit.core.tasks import TaskKind
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import Simulator
from gfdit.sim.trace import TraceRequest
from gfdit.workflow import Embeddings, Image, Latents, Model, Residuals, Workflow
from gfdit.workflow.compiling import CompiledWorkflow

STEPS, SIDE, GIB = 8, 1024, 1024**3


class Encoder(Model):
    kind = TaskKind.ENCODE

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_output("embeds", Embeddings)


class Noise(Model):
    kind = TaskKind.PREPARE

    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_output("latents", Latents)


class ControlNet(Model):
    kind = TaskKind.CONTROL

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_output("residuals", Residuals, streamed=True)


class Base(Model):
    kind = TaskKind.DENOISE

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_input("residuals", Residuals, deferred=True)  # the step begins without them
        self.add_output("latents", Latents)


class Decoder(Model):
    kind = TaskKind.DECODE

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_output("image", Image)


encode, noise, net, base, decode = Encoder("text"), Noise("noise"), ControlNet("net"), Base("base"), Decoder("vae")

with Workflow("controlled", STEPS) as workflow:  # nothing runs here: calls are written down
    embeds = encode(prompt=workflow.add_input("prompt", str))
    latents = noise(seed=workflow.add_input("seed", int))
    for step in range(STEPS):
        residuals = net(step, latents=latents, embeds=embeds)
        latents = base(step, latents=latents, embeds=embeds, residuals=residuals)
    workflow.add_output(decode(latents=latents))

MODELS = {  # seconds of a call, GiB of weights
    encode: (0.05, 9.1),
    noise: (0.001, 0.0),
    net: (0.08, 2.8),
    base: (0.10, 22.2),
    decode: (0.15, 0.2),
}


def main() -> None:
    compiled = CompiledWorkflow(workflow)
    costs = CostTable(
        hardware="none",
        source="made up for this example",
        migration_latency_s=0.001,
        migration_bytes_per_s=20e9,
        entries=tuple(
            CostEntry(model.component, model.kind, SIDE, SIDE, 1, False, 1, 1, 1, seconds)
            for model, (seconds, _) in MODELS.items()
        ),
    )
    components = tuple(
        Component(model.component, int(gib * GIB), gib / 9.1, pinned=not gib) for model, (_, gib) in MODELS.items()
    )
    trace = [TraceRequest(f"r{i}", 10.0 * (i > 0), "controlled", SIDE, SIDE, 1, STEPS) for i in range(2)]
    print(f"{compiled.name}: {len(compiled.nodes)} tasks of {len(MODELS)} models")
    for policy, num_ranks in (("lego", 1), ("lego", 2), ("triage", 2)):
        options = SimulationOptions(num_ranks, components=components, component_bytes=40 * GIB)
        graphs = partial(graph, compiled, num_ranks)
        first, later = Simulator(load_policy(policy, {}), costs, trace, options, graphs).run().requests
        assert first.latency_s and later.latency_s
        print(
            f"{policy}, ranks: {num_ranks}: {first.latency_s:.2f} s with loading, {later.latency_s:.2f} s after it"
        )


def graph(compiled: CompiledWorkflow, num_ranks: int, request: Request) -> TaskGraph:
    return compiled.graph(request.id, num_ranks, request.cfg)


if __name__ == "__main__":
    main()
