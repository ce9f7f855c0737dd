"""Cost tables from published measurements of whole generations, one shape each, and what was derived of them.

Measured are the seconds of one shape at some degrees. What is not published follows from it by these rules:

- *Steps of the measured shape.* Where the whole generation was measured, what encoding, preparing and decoding are
  taken to need is subtracted and the rest divided by the steps.
- *Other shapes.* A step has the operations of a transformer: with ``L`` layers of width ``h`` and ``n`` tokens,
  text included, ``L (24 h^2 n + 4 h n^2)``. On one rank time follows them. They explain the published steps of
  Qwen-Image on H20 at three sizes, :data:`gfdit.sim.costs.published_costs.QWEN_STEP_MS`, within 4 %.
- *Other shapes on several ranks.* Of a measured time, an equal share of one rank's follows the operations. Of what
  is beside that, the latency of four all-to-alls in every layer (:data:`flux_costs.ALL_TO_ALL_S` each time that
  the degree doubles) stays as it is and the rest follows the tokens, as what is exchanged does.
- *Other degrees* are those of FLUX only; see there.

None of it was measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gfdit.core.cost.file import ArtifactSize, CostEntry, CostTable, StepExchanges
from gfdit.core.layouts import SINGLE, ParallelSpec
from gfdit.core.tasks import Shape, TaskKind
from gfdit.sim.costs import flux_costs

MIGRATION_LATENCY_S = flux_costs.MIGRATION_LATENCY_S
LATENT_CHANNELS = 64  # of a token, in all four: 2 x 2 patches of 16 channels
PREPARE_S = 0.001
Times = Mapping[ParallelSpec, float]


@dataclass(frozen=True, slots=True)
class Transformer:
    """A diffusion transformer, as far as it says how times and exchanges follow the shape."""

    model: str
    num_layers: int
    hidden_size: int
    text_tokens: int  # in the sequence of the image's

    def num_tokens(self, shape: Shape) -> int:
        return shape.num_tokens + self.text_tokens

    def operations(self, shape: Shape) -> float:
        """Of one step and one branch of guidance, in floating point."""
        n, h = self.num_tokens(shape), self.hidden_size
        return self.num_layers * (24.0 * h * h * n + 4.0 * h * n * n)

    @property
    def exchanges(self) -> StepExchanges:
        """Queries, keys, values and results, in bfloat16."""
        return StepExchanges(self.model, 4 * self.num_layers, 2.0 * self.hidden_size)

    def latency_s(self, sp: int) -> float:
        """Of the all-to-alls of a step, whatever they exchange."""
        return 4 * self.num_layers * flux_costs.ALL_TO_ALL_S * math.log2(sp)


@dataclass(frozen=True, slots=True)
class Measured:
    """``steps_s`` are of ``shape``; tables have ``shapes``, by the rules above.

    ``beside_s`` is what each degree takes beside an equal share of one rank's time, by default as in ``steps_s``.
    No step on several ranks takes less than ``host_s``: what it takes to launch it.
    """

    transformer: Transformer
    hardware: str
    source: str
    shape: Shape
    shapes: tuple[Shape, ...]
    cfg: bool
    steps_s: Times
    encode_s: float
    decode_s: Callable[[Shape], Times]
    prompt_bytes: int
    link_bytes_per_s: float
    ranks_per_node: int | None = None
    beside_s: Times | None = None
    host_s: float = 0.0

    def step_s(self, shape: Shape, spec: ParallelSpec) -> float:
        if shape == self.shape:
            return self.steps_s[spec]
        work = self.transformer.operations(shape) / self.transformer.operations(self.shape)
        tokens = self.transformer.num_tokens(shape) / self.transformer.num_tokens(self.shape)
        share_s = self.steps_s[SINGLE] / spec.size
        if spec == SINGLE:
            return share_s * work
        beside_s = self.steps_s[spec] - share_s if self.beside_s is None else self.beside_s[spec]
        if beside_s <= 0:  # faster than equal shares: as much faster for any shape
            return max(self.host_s, (share_s + beside_s) * work)
        latency_s = min(beside_s, self.transformer.latency_s(spec.sp))
        return max(self.host_s, share_s * work + latency_s + (beside_s - latency_s) * tokens)

    def table(self) -> CostTable:
        return CostTable(
            self.hardware,
            self.source,
            MIGRATION_LATENCY_S,
            self.link_bytes_per_s,
            tuple(self._entries()),
            tuple(self._sizes()),
            exchanges=(self.transformer.exchanges,),
            ranks_per_node=self.ranks_per_node,
        )

    def _entries(self) -> Iterable[CostEntry]:
        for shape in self.shapes:
            times = [(TaskKind.ENCODE, SINGLE, self.encode_s), (TaskKind.PREPARE, SINGLE, PREPARE_S)]
            times += [(TaskKind.DENOISE, spec, self.step_s(shape, spec)) for spec in self.steps_s]
            times += [(TaskKind.DECODE, spec, seconds) for spec, seconds in self.decode_s(shape).items()]
            for kind, spec, seconds in times:
                what = (self.transformer.model, kind, *shape.size, self.cfg, spec.sp, spec.cfg, 1)
                yield CostEntry(*what, round(seconds, 7))

    def _sizes(self) -> Iterable[ArtifactSize]:
        for shape in self.shapes:
            where = (*shape.size, self.cfg)
            yield ArtifactSize(self.transformer.model, "conditioning", *where, self.prompt_bytes)
            yield ArtifactSize(self.transformer.model, "latents", *where, shape.num_tokens * LATENT_CHANNELS * 2)


def _steps(whole_s: Mapping[int, float], num_steps: int, others_s: float) -> dict[ParallelSpec, float]:
    """Seconds of a step, by degree, where whole generations took ``whole_s``."""
    return {ParallelSpec(sp): (seconds - others_s) / num_steps for sp, seconds in whole_s.items()}


SIZES = "artifact sizes from tensor shapes"
RULES = "other shapes: by operations and tokens (gfdit.sim.costs.measured_costs)"


# FLUX.1-dev on H100. Compiled, a step took 18 ms beside an equal share on two ranks and on four, and is taken to
# do so on eight. Eager, four ranks were as fast as two: the host launches no faster, whatever the shape. But for
# that they are taken to need beside an equal share what they do compiled.

FLUX = Transformer(flux_costs.MODEL, flux_costs.NUM_LAYERS, flux_costs.HIDDEN_SIZE, flux_costs.TEXT_TOKENS)
FLUX_SHAPE = Shape(1024, 1024)
FLUX_NUM_STEPS = 28
FLUX_EAGER_S = MappingProxyType({1: 6.71, 2: 4.38, 4: 4.24})
FLUX_COMPILED_S = MappingProxyType({1: 4.30, 2: 2.68, 4: 1.63})
FLUX_SOURCE = (
    "xDiT, docs/performance/flux.md: FLUX.1-dev, 1024 x 1024, 28 steps, Ulysses 1, 2, 4 on H100, {how}: "
    "{seconds} s for the whole generation, measured there. Derived: encode, prepare and decode, as in flux-h100, "
    "subtracted from that; degree 8: {eight}; "
    f"{RULES}; {SIZES}"
)


def _flux_decode_s(shape: Shape) -> Times:
    return {SINGLE: flux_costs.DECODE_S + flux_costs.DECODE_S_PER_PIXEL * shape.height * shape.width}


def _flux_steps(whole_s: Mapping[int, float]) -> dict[ParallelSpec, float]:
    others_s = flux_costs.ENCODE_S + PREPARE_S + _flux_decode_s(FLUX_SHAPE)[SINGLE]
    return _steps(whole_s, FLUX_NUM_STEPS, others_s)


def _flux_beside() -> dict[ParallelSpec, float]:
    steps_s = _flux_steps(FLUX_COMPILED_S)
    beside_s = {spec: seconds - steps_s[SINGLE] / spec.size for spec, seconds in steps_s.items()}
    return {**beside_s, ParallelSpec(8): beside_s[ParallelSpec(4)]}


def flux_h100_compiled() -> CostTable:
    steps_s = _flux_steps(FLUX_COMPILED_S)
    steps_s[ParallelSpec(8)] = steps_s[SINGLE] / 8 + _flux_beside()[ParallelSpec(8)]
    eight = "an eighth of one rank's time and what four take beside a quarter"
    return _flux("torch.compile", FLUX_COMPILED_S, steps_s, eight).table()


def flux_h100_eager() -> CostTable:
    steps_s = _flux_steps(FLUX_EAGER_S)
    host_s = steps_s[ParallelSpec(8)] = steps_s[ParallelSpec(4)]
    eight = "as four, which the host launches no faster than two; no step on several ranks is taken to be faster"
    return _flux("eager", FLUX_EAGER_S, steps_s, eight, host_s=host_s).table()


def _flux(how: str, whole_s: Mapping[int, float], steps_s: Times, eight: str, host_s: float = 0.0) -> Measured:
    return Measured(
        FLUX,
        "8 x NVIDIA H100",
        FLUX_SOURCE.format(how=how, seconds=" / ".join(map(str, whole_s.values())), eight=eight),
        FLUX_SHAPE,
        tuple(Shape(side, side) for side in flux_costs.TFLOP_PER_IMAGE),
        False,
        steps_s,
        flux_costs.ENCODE_S,
        _flux_decode_s,
        flux_costs.PROMPT_BYTES,
        flux_costs.BYTES_PER_S,
        beside_s=_flux_beside(),
        host_s=host_s,
    )


# Qwen-Image on H800. The time on one rank is that of diffusers, the others are vLLM-Omni's.

QWEN = Transformer("qwen-image", 60, 3072, 256)
QWEN_SHAPE = Shape(2048, 2048)
QWEN_NUM_STEPS = 50
QWEN_H800_S = MappingProxyType({1: 112.5, 2: 65.2, 4: 39.6, 8: 30.8})
QWEN_ENCODE_S = 0.035
QWEN_DECODE_S_PER_PIXEL = 0.017 / (512 * 512)
QWEN_PROMPT_BYTES = 256 * 3584 * 2
H800_BYTES_PER_S = 1.6e11  # 80 % of NVLink's 200 GB/s each way


def _qwen_decode_s(shape: Shape) -> Times:
    return {SINGLE: QWEN_DECODE_S_PER_PIXEL * shape.height * shape.width}


def qwen_image_h800() -> CostTable:
    others_s = QWEN_ENCODE_S + PREPARE_S + _qwen_decode_s(QWEN_SHAPE)[SINGLE]
    return Measured(
        QWEN,
        "8 x NVIDIA H800",
        "vLLM-Omni, parallelism acceleration guide: Qwen-Image, 2048 x 2048, 50 steps, H800: diffusers on one, "
        "Ulysses 2, 4, 8: 112.5 / 65.2 / 39.6 / 30.8 s for the whole generation, measured there. Encode, decode: "
        "measured on H200 at 512 x 512 (vllm-omni#3266: 35 and 17 ms), decode by pixels. Derived: steps, from the "
        f"rest; {RULES}; {SIZES}",
        QWEN_SHAPE,
        tuple(Shape(side, side) for side in (512, 1024, 1536, 2048)),
        False,
        _steps(QWEN_H800_S, QWEN_NUM_STEPS, others_s),
        QWEN_ENCODE_S,
        _qwen_decode_s,
        QWEN_PROMPT_BYTES,
        H800_BYTES_PER_S,
    ).table()


# Wan2.2-A14B on GB200 NVL72, one NVLink domain of 72: degrees of guidance 2 and the sequence. A denoising loop
# of 40 steps; the loop alone is the published figure, without the tail that does not shrink.

WAN = Transformer("wan2.2-a14b", 40, 5120, 0)
WAN_SHAPE = Shape(720, 1280, 80)
WAN_NUM_STEPS = 40
WAN_GB200_S = MappingProxyType(
    {
        ParallelSpec(1): 348.40,
        ParallelSpec(1, 2): 174.00,
        ParallelSpec(2, 2): 95.89,
        ParallelSpec(4, 2): 48.06,
        ParallelSpec(8, 2): 25.60,
        ParallelSpec(12, 2): 18.46,
        ParallelSpec(16, 2): 14.12,
        ParallelSpec(32, 2): 8.48,
        ParallelSpec(36, 2): 7.04,
    }
)
WAN_DECODE_S = MappingProxyType({1: 2.72, 2: 1.72, 4: 1.04, 8: 0.83})  # on 16 no faster: 0.85
WAN_ENCODE_S = 0.055
WAN_PROMPT_BYTES = 2 * 512 * 4096 * 2
GB200_BYTES_PER_S = 7.2e11  # 80 % of NVLink's 900 GB/s each way


def _by_pixels(shape: Shape, measured: Shape) -> float:
    return math.prod(shape.size) / math.prod(measured.size)


def _wan_decode_s(shape: Shape) -> Times:
    scale = _by_pixels(shape, WAN_SHAPE)
    return {ParallelSpec(sp): scale * seconds for sp, seconds in WAN_DECODE_S.items()}


def wan22_gb200() -> CostTable:
    return Measured(
        WAN,
        "NVIDIA GB200 NVL72",
        "TensorRT-LLM, pull request 13821: Wan2.2-T2V-A14B, 40 steps, 1280 x 720, 80 frames, on 1, 2, 4, 8, 16, "
        "24, 32, 64 GB200, guidance on two, Ulysses and ring attention: 348.40 / 174.00 / 95.89 / 48.06 / 25.60 / "
        "18.46 / 14.12 / 8.48 s; its tech blog 25: on 72 with Attention2D 7.04 s, decode on 1, 2, 4, 8: 2.72 / "
        "1.72 / 1.04 / 0.83 s; measured there. Encode: as in wan2.2-synthetic. Derived: "
        f"{RULES}; {SIZES}",
        WAN_SHAPE,
        (Shape(480, 832, 48), Shape(480, 832, 80), WAN_SHAPE),
        True,
        {spec: seconds / WAN_NUM_STEPS for spec, seconds in WAN_GB200_S.items()},
        WAN_ENCODE_S,
        _wan_decode_s,
        WAN_PROMPT_BYTES,
        GB200_BYTES_PER_S,
    ).table()


# HunyuanVideo on H100. 960 x 960 was measured, too, at degrees that differ (3 and 6): as many tokens, 9 % faster
# on one rank.

HUNYUAN = Transformer("hunyuanvideo", 60, 3072, 256)
HUNYUAN_SHAPE = Shape(720, 1280, 129)
HUNYUAN_NUM_STEPS = 50
HUNYUAN_H100_S = MappingProxyType({1: 1904.08, 2: 925.04, 4: 514.08, 8: 337.58})
HUNYUAN_ENCODE_S = 0.1
H100_OF_GB200 = 2.5  # rates of dense bfloat16 operations: 2.5 and 0.99 PFLOP/s
HUNYUAN_PROMPT_BYTES = (256 * 4096 + 768) * 2


def _hunyuan_decode_s(shape: Shape) -> Times:
    return {SINGLE: WAN_DECODE_S[1] * H100_OF_GB200 * _by_pixels(shape, WAN_SHAPE)}


def hunyuanvideo_h100() -> CostTable:
    others_s = HUNYUAN_ENCODE_S + PREPARE_S + _hunyuan_decode_s(HUNYUAN_SHAPE)[SINGLE]
    return Measured(
        HUNYUAN,
        "8 x NVIDIA H100",
        "xDiT, docs/performance/hunyuanvideo.md: HunyuanVideo, 1280 x 720, 129 frames, 50 steps, Ulysses 1, 2, 4, "
        "8 on H100: 1904.08 / 925.04 / 514.08 / 337.58 s for the whole generation, measured there. Derived: "
        "decode, that of wan2.2-gb200 by pixels and frames at 2.5 times the time, and encode, 0.1 s, assumed, "
        f"subtracted from that; {RULES}; {SIZES}",
        HUNYUAN_SHAPE,
        (Shape(544, 960, 65), Shape(544, 960, 129), HUNYUAN_SHAPE),
        False,
        _steps(HUNYUAN_H100_S, HUNYUAN_NUM_STEPS, others_s),
        HUNYUAN_ENCODE_S,
        _hunyuan_decode_s,
        HUNYUAN_PROMPT_BYTES,
        flux_costs.BYTES_PER_S,
    ).table()
