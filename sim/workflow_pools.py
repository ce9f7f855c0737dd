"""Workflows of many models to simulate: the settings of the LegoDiffusion paper (Table 2), with costs.

Published are the bytes and load time of Stable Diffusion 3 (3.9 GiB in 0.43 s: 9 GiB/s, which all loads take here)
and a speed-up of up to 1.9 on two ranks (§7.3). Derived from the shipped FLUX table and the models' parameters are
all other times and sizes; decoding and control images are small and estimated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gfdit.core import ParallelSpec, Request, Task, TaskGraph, TaskKind
from gfdit.core.components import Component
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.sim.arrivals import arrival_times, pick
from gfdit.sim.trace import TraceRequest

GIB = 2**30
LOAD_BYTES_PER_S = 9 * GIB
SPEED_UP = MappingProxyType({1: 1.0, 2: 1.9})
#: Of a step of two requests at once, in steps of one: they are bound by arithmetic.
BATCH_OF_TWO = 1.9
ENCODE_S, IMAGE_S, NOISE_S, DECODE_S = 0.05, 0.02, 0.001, 0.06
SIDE = 1024
#: Shares of the three workflows of a base model: with no, one and two nets.
SHARES = (0.5, 0.3, 0.2)


@dataclass(frozen=True, slots=True)
class Base:
    """A base model with its ControlNet and text encoders; times of one step on one rank."""

    name: str
    num_steps: int
    step_s: float
    num_bytes: int
    net_s: float
    net_bytes: int
    text_bytes: int


def _base(
    name: str, num_steps: int, step_ms: float, gib: float, net_ms: float, net_gib: float, text: float
) -> Base:
    return Base(name, num_steps, step_ms / 1e3, int(gib * GIB), net_ms / 1e3, int(net_gib * GIB), int(text * GIB))


BASES = MappingProxyType(
    {
        base.name: base
        for base in (
            _base("sd3", 28, 112, 3.8, 38, 1.0, 10.4),
            _base("sd3.5-large", 28, 390, 15.0, 121, 4.0, 10.4),
            _base("flux-schnell", 4, 293, 22.2, 29, 1.4, 9.1),
            _base("flux-dev", 28, 311, 22.2, 30, 1.4, 9.1),
        )
    }
)
SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "S1": ("sd3",),
        "S2": ("sd3.5-large",),
        "S3": ("flux-schnell",),
        "S4": ("flux-dev",),
        "S5": ("sd3", "sd3.5-large"),
        "S6": ("flux-schnell", "flux-dev"),
    }
)
# Models of one family are published with the same text encoders and VAE.
_FAMILY = MappingProxyType({"sd3": "sd3", "sd3.5-large": "sd3", "flux-schnell": "flux", "flux-dev": "flux"})
_VAE_BYTES = int(0.16 * GIB)


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of the components of one workflow; ``nets`` as many as it has."""

    base: Base
    text: str
    vae: str
    nets: tuple[str, ...]

    @classmethod
    def of(cls, workflow: str) -> Parts:
        """``<base>+<number of nets>``."""
        name, _, num_nets = workflow.partition("+")
        family = _FAMILY[name]
        nets = tuple(f"{name}/net-{number}" for number in range(int(num_nets)))
        return cls(BASES[name], f"{family}/text", f"{family}/vae", nets)

    @property
    def alone_s(self) -> float:
        """On one rank, where everything is loaded: one after the other."""
        step_s = self.base.step_s + len(self.nets) * self.base.net_s
        return ENCODE_S + len(self.nets) * IMAGE_S + NOISE_S + self.base.num_steps * step_s + DECODE_S

    @property
    def components(self) -> list[Component]:
        base = self.base
        sizes = {self.text: base.text_bytes, self.vae: _VAE_BYTES, base.name: base.num_bytes}
        sizes |= dict.fromkeys(self.nets, base.net_bytes)
        return [Component(name, size, size / LOAD_BYTES_PER_S) for name, size in sizes.items()]


def workflows_of(setting: str) -> list[str]:
    return [f"{base}+{num_nets}" for base in SETTINGS[setting] for num_nets in range(len(SHARES))]


def components_of(workflows: Sequence[str]) -> tuple[Component, ...]:
    """Each once, whoever shares it."""
    return tuple({one.name: one for workflow in workflows for one in Parts.of(workflow).components}.values())


def cost_table(workflows: Sequence[str]) -> CostTable:
    """Of components, and under a workflow's own name of all of it as one task."""
    entries = {}

    def add(model: str, task: TaskKind, seconds: float, sp: int = 1, batch: int = 1) -> None:
        entries[model, task, sp, batch] = CostEntry(model, task, SIDE, SIDE, 1, False, sp, 1, batch, seconds)

    for workflow in workflows:
        parts = Parts.of(workflow)
        add(workflow, TaskKind.REQUEST, parts.alone_s)
        add(parts.text, TaskKind.ENCODE, ENCODE_S)
        add(parts.vae, TaskKind.ENCODE, IMAGE_S)
        add(parts.vae, TaskKind.PREPARE, NOISE_S)
        add(parts.vae, TaskKind.DECODE, DECODE_S)
        for sp, speed_up in SPEED_UP.items():
            add(parts.base.name, TaskKind.DENOISE, parts.base.step_s / speed_up, sp)
            add(parts.base.name, TaskKind.DENOISE, parts.base.step_s * BATCH_OF_TWO / speed_up, sp, 2)
        for net in parts.nets:
            add(net, TaskKind.CONTROL, parts.base.net_s)
    return CostTable(
        hardware="NVIDIA H800 (LegoDiffusion), times as on an H100",
        source="LegoDiffusion, Table 2 and section 7.3; gfdit.sim.workflow_pools says what is derived",
        migration_latency_s=5e-5,
        migration_bytes_per_s=150e9,
        entries=tuple(entries.values()),
        artifacts=(),
    )


def graph(request: Request) -> TaskGraph:
    """Node by node; residuals are deferred inputs of the base model's steps."""
    parts, name, tasks = Parts.of(request.model), request.id, list[Task]()

    def of(names: Sequence[str]) -> tuple[str, ...]:
        return tuple([f"{name}/{one}" for one in names])

    def add(
        task: str,
        kind: TaskKind,
        component: str,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        step: int = 0,
        deferred: Sequence[str] = (),
    ) -> None:
        specs = tuple(ParallelSpec(sp) for sp in (SPEED_UP if kind is TaskKind.DENOISE else (1,)))
        tasks.append(
            Task(f"{name}/{task}", name, kind, step, of(inputs), of(outputs), specs, of(deferred), component, task)
        )

    add("text", TaskKind.ENCODE, parts.text, (), ("embeds",))
    add("noise", TaskKind.PREPARE, parts.vae, (), ("latents/0",))
    for number in range(len(parts.nets)):
        add(f"image-{number}", TaskKind.ENCODE, parts.vae, (), (f"condition-{number}",))
    for step in range(request.num_steps):
        made, latents = [], f"latents/{step}"
        for number, net in enumerate(parts.nets):
            made.append(f"residuals-{number}/{step}")
            inputs = ("embeds", latents, f"condition-{number}")
            add(f"net-{number}/{step}", TaskKind.CONTROL, net, inputs, made[-1:], step)
        add(
            f"base/{step}",
            TaskKind.DENOISE,
            parts.base.name,
            ("embeds", latents),
            (f"latents/{step + 1}",),
            step,
            made,
        )
    add("decode", TaskKind.DECODE, parts.vae, (f"latents/{request.num_steps}",))
    return TaskGraph(name, tuple(tasks))


def monolithic_graph(request: Request) -> TaskGraph:
    """All of a request as one task of a pipeline that is loaded as a whole."""
    task = Task(f"{request.id}/all", request.id, TaskKind.REQUEST, 0, (), (), component=request.model)
    return TaskGraph(request.id, (task,))


def pipelines_of(workflows: Sequence[str], num_ranks: int | None = None) -> tuple[Component, ...]:
    """Whole pipelines as components that share nothing.

    With ``num_ranks`` each is bound to ranks of its own, as many as its share of the work asks for, and at least
    one; where there are fewer ranks than workflows some have the same rank.
    """
    made = []
    work = [
        Parts.of(workflow).alone_s * share for workflow, share in zip(workflows, _shares(workflows), strict=True)
    ]
    first = 0.0
    for workflow, own in zip(workflows, work, strict=True):
        num_bytes = sum(one.num_bytes for one in Parts.of(workflow).components)
        ranks = None
        if num_ranks is not None:
            last = first + own / sum(work) * num_ranks
            low = min(round(first), num_ranks - 1)
            ranks = tuple(range(low, max(low + 1, round(last))))
            first = last
        made.append(Component(workflow, num_bytes, num_bytes / LOAD_BYTES_PER_S, num_ranks is not None, ranks))
    return tuple(made)


def trace(
    setting: str, per_s: float, num_requests: int, seed: int, *, slo_scale: float = 2.0, cv: float = 1.0
) -> list[TraceRequest]:
    """``slo_scale`` times a workflow's time alone on one rank is the deadline (§7.1); ``cv`` is of arrivals."""
    return list(_lines(setting, per_s, num_requests, seed, slo_scale, cv))


def _lines(
    setting: str, per_s: float, num_requests: int, seed: int, slo_scale: float, cv: float
) -> Iterator[TraceRequest]:
    draw = random.Random(seed)
    workflows = workflows_of(setting)
    shares = _shares(workflows)
    arrivals = arrival_times([(1.0, per_s)], draw, cv)
    for number in range(num_requests):
        arrival_s = next(arrivals)
        workflow = workflows[pick(shares, draw)]
        parts = Parts.of(workflow)
        deadline_s = slo_scale * parts.alone_s
        yield TraceRequest(
            f"r{number}",
            arrival_s,
            workflow,
            SIDE,
            SIDE,
            1,
            parts.base.num_steps,
            slo_class=workflow,
            deadline_s=deadline_s,
        )


def _shares(workflows: Sequence[str]) -> list[float]:
    return [SHARES[int(workflow.partition("+")[2])] for workflow in workflows]


def capacity_per_s(setting: str, num_ranks: int) -> float:
    """Requests that all ranks together could serve if nothing had to be loaded or waited for."""
    workflows = workflows_of(setting)
    shares = _shares(workflows)
    mean_s = sum(s * Parts.of(w).alone_s for s, w in zip(shares, workflows, strict=True)) / sum(shares)
    return num_ranks / mean_s
