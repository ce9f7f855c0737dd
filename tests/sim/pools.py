"""A small pool of components, and requests of workflows on it: with no, one or two nets beside the base model."""

from __future__ import annotations

from collections.abc import Sequence

from gfdit.core import ParallelSpec, Policy, Request, Task, TaskGraph, TaskKind
from gfdit.core.components import Component
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.sim.simulator import SimulationOptions, SimulationRun, Simulator
from gfdit.sim.trace import TraceRequest

GIB = 2**30
TEXT, BASE, VAE, NETS = "text", "base", "vae", ("net-0", "net-1")
COMPONENTS = (
    Component(TEXT, 2 * GIB, 0.4),
    Component(BASE, 4 * GIB, 0.8),
    Component(VAE, GIB // 4, 0.05),
    *(Component(name, GIB, 0.2) for name in NETS),
)
STEP_S, NET_S = 0.1, 0.04
_DEGREES = (ParallelSpec(1), ParallelSpec(2))


def cost_table() -> CostTable:
    def entry(model: str, task: TaskKind, seconds: float, sp: int = 1, batch: int = 1) -> CostEntry:
        return CostEntry(model, task, 1024, 1024, 1, False, sp, 1, batch, seconds)

    return CostTable(
        hardware="none",
        source="made up",
        migration_latency_s=1e-4,
        migration_bytes_per_s=1e11,
        entries=(
            entry(TEXT, TaskKind.ENCODE, 0.03),
            entry(VAE, TaskKind.PREPARE, 0.001),
            entry(VAE, TaskKind.DECODE, 0.05),
            *(entry(name, TaskKind.CONTROL, NET_S) for name in NETS),
            entry(BASE, TaskKind.DENOISE, STEP_S),
            entry(BASE, TaskKind.DENOISE, STEP_S * 0.55, sp=2),
            entry(BASE, TaskKind.DENOISE, STEP_S * 1.7, batch=2),
        ),
        artifacts=(),
    )


def graph(request: Request, num_nets: int) -> TaskGraph:
    name = request.id
    tasks: list[Task] = []

    def of(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{name}/{one}" for one in names)

    def add(
        task: str,
        kind: TaskKind,
        component: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        step: int = 0,
        deferred: Sequence[str] = (),
    ) -> None:
        specs = _DEGREES if kind is TaskKind.DENOISE else _DEGREES[:1]
        tasks.append(
            Task(f"{name}/{task}", name, kind, step, of(inputs), of(outputs), specs, of(deferred), component, task)
        )

    add("text", TaskKind.ENCODE, TEXT, (), ("embeds",))
    add("noise", TaskKind.PREPARE, VAE, (), ("latents/0",))
    for step in range(request.num_steps):
        residuals = [f"residuals-{net}/{step}" for net in range(num_nets)]
        for net, made in enumerate(residuals):
            add(f"net-{net}/{step}", TaskKind.CONTROL, NETS[net], ("embeds", f"latents/{step}"), (made,), step)
        inputs, latents = ("embeds", f"latents/{step}"), (f"latents/{step + 1}",)
        add(f"base/{step}", TaskKind.DENOISE, BASE, inputs, latents, step, residuals)
    add("decode", TaskKind.DECODE, VAE, (f"latents/{request.num_steps}",), ())
    return TaskGraph(name, tuple(tasks))


def workflow(request: Request) -> TaskGraph:
    """Of a model named ``nets-<number>``."""
    return graph(request, int(request.model.rpartition("-")[2]))


def line(number: int, arrival_s: float, num_nets: int, deadline_s: float | None = None) -> TraceRequest:
    name = f"r{number}"
    return TraceRequest(name, arrival_s, f"nets-{num_nets}", 1024, 1024, 1, 4, deadline_s=deadline_s)


def simulate(policy: Policy, trace: Sequence[TraceRequest], num_ranks: int, **options: object) -> SimulationRun:
    pool = {"components": COMPONENTS, "check_every_event": True, **options}
    run = SimulationOptions(num_ranks, **pool)  # type: ignore[arg-type]
    return Simulator(policy, cost_table(), trace, run, workflow).run()
