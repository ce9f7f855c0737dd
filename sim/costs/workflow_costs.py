"""What components of workflows cost on H800, published where it is, derived where not (LegoDiffusion paper).

- SD3 takes 3.9 GiB and 430 ms to load, a LoRA 886 MiB and 100 ms (section 7.3): everything loads at that rate.
- The other sizes are those of the published weights in 16 bit. Pipelines are 1.4 to 3.8 times the base model alone
  (paper: 1.7 to 4), encoders of SD3 and SD3.5 are the same, and so are encoders and VAE of FLUX.
- Step times are work at 1024 x 1024 at the rate of the shipped table ``flux-h100``, with both branches of guidance
  for SD3 and SD3.5; nets are their share of the blocks. A 4.7 % part of a step that neither ranks nor batches
  change, and the communication of sequence parallelism, are those of :mod:`gfdit.sim.costs.flux_costs`. Guidance
  on two ranks is then 1.91 times as fast (paper, figure 10: up to 1.9).
- Residuals are what nets of these families make in 16 bit: FLUX 2, SD3 6 and SD3.5 19, of either branch for the
  last two. Encoding a control image is taken to cost what decoding does.
- Reading a LoRA costs 0.5 s before the first step, 0.05 s if steps go on meanwhile (section 7.4, SDXL).

None of it was measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gfdit.core.components import Component
from gfdit.core.cost.file import ArtifactSize, CostEntry, CostTable
from gfdit.core.layouts import SINGLE, ParallelSpec
from gfdit.core.tasks import Shape, TaskKind
from gfdit.sim.costs import flux_costs
from gfdit.workflow import Condition, Embeddings, Latents, Residuals
from gfdit.workflow.compiling import CompiledWorkflow

GIB = 2**30
MIB = 2**20
SHAPE = Shape(1024, 1024)
LOAD_BYTES_PER_S = 9.1 * GIB
LORA_BYTES = 886 * MIB
LORA_READ_S = 0.5
LORA_HIDDEN_S = 0.05
VAE_GIB = 0.16
BATCHES = (1, 2, 3, 4)
DEGREES = (1, 2, 4, 8)
_FIXED = flux_costs.FIXED_S / flux_costs.step_s(1024, 1, 1)
_ENCODE_FIXED = 0.5  # "twice that for kernels", in the table of FLUX


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model and its nets. Those of one ``family`` share encoders and VAE."""

    name: str
    family: str
    gib: float
    step_s: float
    num_steps: int
    net_gib: float
    net_s: float
    residual_bytes: int  # of one net, for one step

    @property
    def guided(self) -> bool:
        return self.family == "sd3"

    @property
    def specs(self) -> tuple[ParallelSpec, ...]:
        specs = [ParallelSpec(sp, cfg) for sp in DEGREES for cfg in ((1, 2) if self.guided else (1,))]
        return tuple(sorted(specs, key=lambda spec: (spec.size, -spec.cfg)))


BASES = MappingProxyType(
    {
        one.name: one
        for one in (
            BaseModel("sd3", "sd3", 3.8, 0.112, 28, 1.0, 0.038, 144 * MIB),
            BaseModel("sd3.5-large", "sd3", 15.0, 0.390, 28, 4.0, 0.121, 722 * MIB),
            BaseModel("flux-schnell", "flux", 22.2, 0.293, 4, 1.4, 0.029, 48 * MIB),
            BaseModel("flux-dev", "flux", 22.2, 0.311, 28, 1.4, 0.030, 48 * MIB),
        )
    }
)
ENCODER_GIB = MappingProxyType({"sd3": 10.4, "flux": 9.1})
_BYTES: Mapping[tuple[str, type], int] = MappingProxyType(
    {
        ("sd3", Embeddings): 2 * (333 * 4096 + 2048) * 2,
        ("flux", Embeddings): flux_costs.PROMPT_BYTES,
        ("sd3", Latents): 16 * 128 * 128 * 2,
        ("flux", Latents): 4096 * flux_costs.LATENT_CHANNELS * 2,
        ("sd3", Condition): 2 * 16 * 128 * 128 * 2,
        ("flux", Condition): 4096 * flux_costs.LATENT_CHANNELS * 2,
    }
)


def step_s(base: BaseModel, parallel: ParallelSpec = SINGLE, batch: int = 1) -> float:
    """Seconds of one step of ``batch`` images of 1024 x 1024."""
    alone = flux_costs.step_s(1024, 1, 1)
    communication = flux_costs.communication_s(1024, parallel.sp, batch) / alone
    return base.step_s * (_FIXED + (1 - _FIXED) * batch / parallel.size + communication)


def component_table(bases: Iterable[BaseModel], num_nets: int = 2) -> tuple[Component, ...]:
    """Encoders, VAE and noise of their families, each base model, and ``num_nets`` nets for each."""
    made: dict[str, Component] = {}
    for base in bases:
        family, name = base.family, base.name
        sizes = {f"{family}-text": ENCODER_GIB[family], f"{family}-vae": VAE_GIB, name: base.gib}
        sizes |= {f"{name}-net-{number}": base.net_gib for number in range(1, num_nets + 1)}
        made |= {one: _component(one, gib) for one, gib in sizes.items()}
        made[f"{family}-noise"] = Component(f"{family}-noise", 0, pinned=True)
    return tuple(made.values())


def cost_table(
    bases: Sequence[BaseModel],
    workflows: Iterable[CompiledWorkflow] = (),
    *,
    num_nets: int = 2,
    hides_lora: bool = True,
) -> CostTable:
    """Times by component, and sizes of what ``workflows`` pass on. ``hides_lora``: a LoRA is read beside steps."""
    entries = {(e.model, e.task, e.cfg, e.parallel, e.batch): e for e in _entries(bases, num_nets, hides_lora)}
    return CostTable(
        "NVIDIA H800",
        "derived, not measured: the LegoDiffusion paper's loading times, published sizes of weights, work at the "
        "rate of flux-h100; see gfdit.sim.costs.workflow_costs",
        flux_costs.MIGRATION_LATENCY_S,
        flux_costs.BYTES_PER_S,
        tuple(entries.values()),
        tuple(dict.fromkeys(size for one in workflows for size in _sizes(one, bases))),
    )


def _component(name: str, gib: float) -> Component:
    num_bytes = int(gib * GIB)
    return Component(name, num_bytes, round(num_bytes / LOAD_BYTES_PER_S, 4))


def _entries(bases: Iterable[BaseModel], num_nets: int, hides_lora: bool) -> Iterator[CostEntry]:
    pixels = SHAPE.height * SHAPE.width
    vae_s = flux_costs.DECODE_S + flux_costs.DECODE_S_PER_PIXEL * pixels
    for base in bases:
        family = base.family

        def entry(
            model: str,
            task: TaskKind,
            seconds: float,
            batch: int = 1,
            spec: ParallelSpec = SINGLE,
            cfg: bool = base.guided,
        ) -> CostEntry:
            return CostEntry(model, task, *SHAPE.size, cfg, spec.sp, spec.cfg, batch, round(seconds, 7))

        yield entry(f"{family}-noise", TaskKind.PREPARE, flux_costs.PREPARE_S)
        yield entry(base.name, TaskKind.ENCODE, LORA_HIDDEN_S if hides_lora else LORA_READ_S)
        for batch in BATCHES:
            encode_s = flux_costs.ENCODE_S * (_ENCODE_FIXED + (1 - _ENCODE_FIXED) * batch)
            yield entry(f"{family}-text", TaskKind.ENCODE, encode_s, batch)
            yield entry(f"{family}-vae", TaskKind.ENCODE, vae_s * batch, batch)
            yield entry(f"{family}-vae", TaskKind.DECODE, vae_s * batch, batch)
            for number in range(1, num_nets + 1):
                seconds = base.net_s * (_FIXED + (1 - _FIXED) * batch)
                yield entry(f"{base.name}-net-{number}", TaskKind.CONTROL, seconds, batch)
            for spec in base.specs:
                yield entry(base.name, TaskKind.DENOISE, step_s(base, spec, batch), batch, spec)


def _sizes(one: CompiledWorkflow, bases: Iterable[BaseModel]) -> Iterator[ArtifactSize]:
    """Under the name of the workflow and of every component that reads them."""
    used = {model.component for model in one.models}
    (base,) = (base for base in bases if base.name in used)
    for node in one.nodes.values():
        for deferred in (False, True):
            for value in node.values(deferred=deferred):
                made = value.port.type
                num_bytes = base.residual_bytes if made is Residuals else _BYTES[base.family, made]
                kind = one.artifact(value).partition("/")[0]
                for model in (one.name, node.model.component):
                    yield ArtifactSize(model, kind, *SHAPE.size, base.guided, num_bytes)
