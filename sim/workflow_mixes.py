"""Workflows to simulate, and when they are asked for: settings of the LegoDiffusion paper, and a production mix.

The paper's settings (its table 2) are the workflows of one or two base models: alone, with one net and with two.
(It may also mean: with either of two nets; ``stacked=False``.) Requests arrive by a gamma process, with a deadline
of ``slo_scale`` times what the workflow takes alone on one rank, one task after the other (section 7.1). The
shares of workflows are not published, and even here.

The production mix follows Alibaba's log as it was described: 87 base models, of which ten get 87 % of requests,
and 16 % of requests with a LoRA. Popularity falls with 1/rank within these ten and within the others, and base
models are fine-tuned ones of the four kinds that have costs, in turn: both are assumptions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from gfdit.core import Request, TaskGraph, TaskKind
from gfdit.core.components import Component
from gfdit.core.cost.file import CostTable
from gfdit.core.layouts import SINGLE, ParallelSpec
from gfdit.sim.arrivals import arrival_times, pick
from gfdit.sim.costs.workflow_costs import (
    BASES,
    LOAD_BYTES_PER_S,
    LORA_BYTES,
    SHAPE,
    BaseModel,
    component_table,
    cost_table,
)
from gfdit.sim.request_classes import RequestClass
from gfdit.sim.trace import TraceRequest
from gfdit.workflow import Condition, Embeddings, Image, Latents, Model, Residuals, Workflow
from gfdit.workflow.compiling import CompiledWorkflow

SETTINGS = {
    "S1": ("sd3",),
    "S2": ("sd3.5-large",),
    "S3": ("flux-schnell",),
    "S4": ("flux-dev",),
    "S5": ("sd3", "sd3.5-large"),
    "S6": ("flux-schnell", "flux-dev"),
}
MIXES = (*SETTINGS, "production")
DEFAULT_SLO_SCALE = 2.0
NUM_PRODUCTION_BASES = 87
_NUM_POPULAR, _SHARE_POPULAR = 10, 0.87
_SHARE_LORA = 0.16


class Simulated(Model):
    """Without weights: its ``source`` is the component that has costs."""

    @property
    def component(self) -> str:
        return self.source


class Text(Simulated):
    kind = TaskKind.ENCODE

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_output("embeds", Embeddings)


class ControlImage(Simulated):
    kind = TaskKind.ENCODE

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_output("condition", Condition)


class Noise(Simulated):
    kind = TaskKind.PREPARE

    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_output("latents", Latents)


class Lora(Simulated):
    """Takes the time that a LoRA costs before the first step, on a rank with the base model."""

    kind = TaskKind.ENCODE

    def setup_io(self) -> None:
        self.add_output("patched", Condition)


class Net(Simulated):
    kind = TaskKind.CONTROL

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_input("condition", Condition)
        self.add_output("residuals", Residuals, streamed=True)


class Base(Simulated):
    kind = TaskKind.DENOISE

    def __init__(self, figures: BaseModel) -> None:
        super().__init__(figures.name, name="base")
        self.figures = figures

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_input("embeds", Embeddings)
        self.add_input("patched", Condition, optional=True)
        self.add_input("residuals", Residuals, deferred=True, many=True, optional=True)
        self.add_output("latents", Latents)

    def candidates(self, num_ranks: int, guided: bool = False) -> tuple[ParallelSpec, ...]:
        return tuple(spec for spec in self.figures.specs if spec.size <= num_ranks)


class Decode(Simulated):
    kind = TaskKind.DECODE

    def setup_io(self) -> None:
        self.add_input("latents", Latents)
        self.add_output("image", Image)


@dataclass(frozen=True, slots=True)
class Variant:
    """One workflow: ``base`` with the nets of these numbers, and a LoRA or none."""

    base: BaseModel
    nets: tuple[int, ...] = ()
    lora: bool = False

    @property
    def name(self) -> str:
        return self.base.name + "".join(f"+cn{number}" for number in self.nets) + ("+lora" if self.lora else "")

    def record(self) -> Workflow:
        family, name = self.base.family, self.base.name
        text, vae = Text(f"{family}-text"), ControlImage(f"{family}-vae", name="control-image")
        noise, decode = Noise(f"{family}-noise", pinned=True), Decode(f"{family}-vae")
        base, lora = Base(self.base), Lora(name)
        nets = [Net(f"{name}-net-{number}", name=f"net-{number}") for number in self.nets]
        with Workflow(self.name, self.base.num_steps) as made:
            embeds, latents = (
                text(prompt=made.add_input("prompt", str)),
                noise(seed=made.add_input("seed", int, 0)),
            )
            given: dict[str, Any] = {"patched": lora()} if self.lora else {}
            conditions = [vae(image=made.add_input(f"image-{number}", Image)) for number in self.nets]
            for step in range(self.base.num_steps):
                common = {"latents": latents, "embeds": embeds}
                residuals = [net(step, condition=c, **common) for net, c in zip(nets, conditions, strict=True)]
                latents = base(step, residuals=residuals, **common, **given)
                given = {}
            made.add_output(decode(latents=latents))
        return made


@dataclass
class WorkflowMix:
    """Workflows with their shares of requests, and everything that a simulation of them needs."""

    variants: dict[str, Variant]
    shares: tuple[float, ...]
    hides_lora: bool = True
    _compiled: dict[str, CompiledWorkflow] = field(default_factory=dict, init=False, repr=False)
    _tasks: dict[str, TaskGraph] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def bases(self) -> tuple[BaseModel, ...]:
        return tuple({variant.base.name: variant.base for variant in self.variants.values()}.values())

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Those that some workflow uses."""
        used = {model.component for name in self.variants for model in self.compiled(name).models}
        return tuple(one for one in component_table(self.bases) if one.name in used)

    @cached_property
    def costs(self) -> CostTable:
        return cost_table(self.bases, map(self.compiled, self.variants), hides_lora=self.hides_lora)

    def compiled(self, name: str) -> CompiledWorkflow:
        if name not in self._compiled:
            self._compiled[name] = CompiledWorkflow(self.variants[name].record())
        return self._compiled[name]

    def graphs(self, num_ranks: int) -> Any:
        """What makes the graph of a request whose model is the name of a workflow, for the simulator."""

        def graph(request: Request) -> TaskGraph:
            return self.compiled(request.model).graph(request.id, num_ranks, request.cfg)

        return graph

    def alone_s(self, name: str) -> float:
        """Time of a request on one rank that has everything, one task after the other."""
        entries = {
            (e.model, e.task): e.seconds for e in self.costs.entries if (e.batch, e.parallel) == (1, SINGLE)
        }
        nodes = self.compiled(name).nodes.values()
        return sum(entries[node.model.component, node.model.kind] for node in nodes)

    def classes(self, slo_scale: float = DEFAULT_SLO_SCALE) -> tuple[RequestClass, ...]:
        """One for each workflow."""
        made = []
        for name, variant in self.variants.items():
            alone_s = self.alone_s(name)
            base = variant.base
            made.append(RequestClass(name, name, SHAPE, base.num_steps, base.guided, alone_s, slo_scale * alone_s))
        return tuple(made)

    def num_bytes_apart(self) -> int:
        """Of as many pipelines as there are workflows, each with components of its own, and with its LoRA."""
        sizes = {one.name: one.num_bytes for one in self.components}
        models = [sizes[name] for w in self.variants for name in {m.component for m in self.compiled(w).models}]
        return sum(models) + LORA_BYTES * sum(variant.lora for variant in self.variants.values())

    def trace(
        self,
        num_requests: int | None,
        *,
        per_min: float | None = None,
        load: float | None = None,
        num_ranks: int = 1,
        cv: float = 1.0,
        slo_scale: float = DEFAULT_SLO_SCALE,
        seed: int = 0,
        until_s: float = math.inf,
    ) -> list[TraceRequest]:
        """Requests at a rate, or at a ``load``: the share of ``num_ranks`` ranks' time that they take, one by one.

        ``cv`` is the coefficient of variation of the gaps between them. Without ``num_requests`` all until
        ``until_s``. Raises ``ValueError`` for neither or both of rate and load, and for what has no end.
        """
        if (per_min is None) == (load is None):
            raise ValueError("give either a number of requests a minute or a load")
        if num_requests is None and until_s == math.inf:
            raise ValueError("give either a number of requests or a time")
        least = num_ranks if num_requests is None else min(num_requests, num_ranks)
        if least < 1 or cv < 0 or not slo_scale > 0 or not (per_min or load or 0) > 0:
            raise ValueError("requests, ranks, rate, load and SLO scale must be positive, cv at least 0")
        names = list(self.variants)
        alone = {name: self.alone_s(name) for name in names}
        if load is not None:
            mean_s = sum(share * alone[name] for share, name in zip(self.shares, names, strict=True))
            per_min = 60 * load * num_ranks * sum(self.shares) / mean_s
        assert per_min is not None
        draw = random.Random(seed)
        times = arrival_times([(3600.0, per_min / 60)], draw, cv)
        made = []
        for number, at_s in enumerate(islice(times, num_requests)):
            if at_s >= until_s:
                break
            name = names[pick(self.shares, draw)]
            base = self.variants[name].base
            made.append(
                TraceRequest(
                    id=f"r{number}",
                    arrival_s=round(at_s, 6),
                    model=name,
                    height=SHAPE.height,
                    width=SHAPE.width,
                    num_frames=1,
                    num_steps=base.num_steps,
                    cfg=base.guided,
                    slo_class=name,
                    deadline_s=round(slo_scale * alone[name], 6),
                )
            )
        return made


def paper_setting(name: str, *, stacked: bool = True, lora: bool = False, hides_lora: bool = True) -> WorkflowMix:
    """S1 to S6. ``lora``: each workflow also with one, for half of requests. ``ValueError`` for another name."""
    if name not in SETTINGS:
        raise ValueError(f"there is no setting {name!r}, settings: {', '.join(SETTINGS)}")
    nets: Sequence[tuple[int, ...]] = ((), (1,), (1, 2) if stacked else (2,))
    made = [
        Variant(BASES[b], n, with_lora)
        for b in SETTINGS[name]
        for n in nets
        for with_lora in (False, True)[: 1 + lora]
    ]
    return WorkflowMix({variant.name: variant for variant in made}, (1.0,) * len(made), hides_lora)


def production_mix(num_bases: int = NUM_PRODUCTION_BASES, *, hides_lora: bool = True) -> WorkflowMix:
    """Fine-tuned base models ``<kind>-<rank>``, each also with a LoRA. Raises ``ValueError`` for ten or fewer."""
    if num_bases <= _NUM_POPULAR:
        raise ValueError(f"num_bases must be above {_NUM_POPULAR}, got {num_bases}")
    weights = [1 / (rank + 1) for rank in range(num_bases)]
    popular, rest = sum(weights[:_NUM_POPULAR]), sum(weights[_NUM_POPULAR:])
    kinds = list(BASES.values())
    variants, shares = {}, []
    for rank, weight in enumerate(weights):
        kind = kinds[rank % len(kinds)]
        base = replace(kind, name=f"{kind.name}-{rank}")
        share = weight * (_SHARE_POPULAR / popular if rank < _NUM_POPULAR else (1 - _SHARE_POPULAR) / rest)
        for lora, part in ((False, 1 - _SHARE_LORA), (True, _SHARE_LORA)):
            variant = Variant(base, lora=lora)
            variants[variant.name] = variant
            shares.append(share * part)
    return WorkflowMix(variants, tuple(shares), hides_lora)


def mix_of(name: str) -> WorkflowMix:
    """One of :data:`MIXES`; ``ValueError`` for another name."""
    return production_mix() if name == "production" else paper_setting(name)


def lora_swap_s() -> float:
    """Of what is in host memory already."""
    return LORA_BYTES / LOAD_BYTES_PER_S
