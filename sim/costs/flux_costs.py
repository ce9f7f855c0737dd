"""Step times of FLUX.1-dev on H100, derived: the TetriServe paper prints work per image, not times.

What it says of times, and how the constants below follow:

- Work per image (its table 1). Two floating-point operations per weight of the model and token, with attention,
  give about a fiftieth of it per step at every size: the figures are taken as 50 steps.
- 2048 x 2048 on one H100 takes "up to a minute" (section 1): 25 PFLOP in 60 s are 416 TFLOP/s.
- Small images scale poorly and gain from batching (figure 3, section 5): a step has a part, ``FIXED_S``, that
  neither work nor ranks change.
- Communication exceeds 30 % of a step at high degrees for four images of 256 x 256 or 512 x 512, and matters less
  for large ones (figure 2). Ulysses attention has four all-to-alls in each of the 57 layers: ``ALL_TO_ALL_S`` each
  time that the degree doubles, plus bytes.
- The best fixed degrees for its deadlines (section 6.1) are 1, 1, 2 and 8. With 20 steps, the number of its
  stability measurements, they are so here; a test keeps it so.
- Handing latents over takes at most 0.05 % of a step (table 4): 0.1 ms for the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gfdit.core.cost.file import ArtifactSize, CostEntry, CostTable, StepExchanges
from gfdit.core.tasks import TaskKind

MODEL = "flux.1-dev"
TFLOP_PER_IMAGE = {256: 556.48, 512: 1388.24, 1024: 5045.92, 2048: 24964.72}  # by side
STEPS_PER_IMAGE = 50
TFLOP_PER_S = 416.0
FIXED_S = 0.012
NUM_LAYERS = 57
HIDDEN_SIZE = 3072
TEXT_TOKENS = 512
ALL_TO_ALL_S = 25e-6
BYTES_PER_S = 3.6e11  # 80 % of NVLink's 450 GB/s each way
DEGREES = (1, 2, 4, 8)
BATCHES = {256: (1, 2, 4), 512: (1, 2, 4), 1024: (1,), 2048: (1,)}  # larger images fill a rank alone

ENCODE_S = 0.025  # 512 tokens through an encoder of 4.7e9 weights at the rate above, twice that for kernels
PREPARE_S = 0.001
DECODE_S = 0.005
DECODE_S_PER_PIXEL = 25e-9  # "very small relative to diffusion steps" (section 5)
MIGRATION_LATENCY_S = 1e-4
PROMPT_BYTES = (TEXT_TOKENS * 4096 + 768) * 2
LATENT_CHANNELS = 64  # of a token: 2 x 2 patches of 16 channels


def flux_h100() -> CostTable:
    return CostTable(
        "8 x NVIDIA H100",
        "derived, not measured: work per image of FLUX.1-dev from table 1 of the TetriServe paper, at the rate "
        "its text implies, with communication and fixed parts chosen to give the scaling and batching it "
        "describes; migration latency from its table 4; other tasks and artifact sizes from model sizes",
        MIGRATION_LATENCY_S,
        BYTES_PER_S,
        tuple(_entries()),
        tuple(_sizes()),
        exchanges=(StepExchanges(MODEL, 4 * NUM_LAYERS, 2 * HIDDEN_SIZE),),
    )


def step_s(side: int, sp: int, batch: int) -> float:
    """Seconds of one step of ``batch`` images of ``side`` x ``side`` pixels on ``sp`` ranks."""
    work_s = batch * TFLOP_PER_IMAGE[side] / STEPS_PER_IMAGE / TFLOP_PER_S
    return FIXED_S + work_s / sp + communication_s(side, sp, batch)


def communication_s(side: int, sp: int, batch: int) -> float:
    if sp == 1:
        return 0.0
    tokens = batch * (_image_tokens(side) + TEXT_TOKENS)
    num_bytes = tokens / sp * HIDDEN_SIZE * 2 * (sp - 1) / sp  # that a rank sends in one all-to-all
    return 4 * NUM_LAYERS * (ALL_TO_ALL_S * math.log2(sp) + num_bytes / BYTES_PER_S)


def _image_tokens(side: int) -> int:
    return (side // 16) ** 2


def _entries() -> Iterable[CostEntry]:
    for side in TFLOP_PER_IMAGE:
        times = [(TaskKind.ENCODE, 1, 1, ENCODE_S), (TaskKind.PREPARE, 1, 1, PREPARE_S)]
        times += [
            (TaskKind.DENOISE, sp, batch, step_s(side, sp, batch)) for batch in BATCHES[side] for sp in DEGREES
        ]
        times.append((TaskKind.DECODE, 1, 1, DECODE_S + DECODE_S_PER_PIXEL * side * side))
        for kind, sp, batch, seconds in times:
            yield CostEntry(MODEL, kind, side, side, 1, False, sp, 1, batch, round(seconds, 7))


def _sizes() -> Iterable[ArtifactSize]:
    for side in TFLOP_PER_IMAGE:
        yield ArtifactSize(MODEL, "conditioning", side, side, 1, False, PROMPT_BYTES)
        yield ArtifactSize(MODEL, "latents", side, side, 1, False, _image_tokens(side) * LATENT_CHANNELS * 2)
