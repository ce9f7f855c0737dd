"""The cost tables that come with gfdit, from published figures: ``python -m gfdit.sim.costs.published_costs``.

The tables of Qwen-Image and Wan take encode, prepare and decode times from the generator constants of the GF-DiT
repository, which publishes none for Qwen-Image. Its 0.5 ms to finalise a request count as decoding. Encoding,
preparing and decoding run on one rank, as in the server. FLUX is in :mod:`gfdit.sim.costs.flux_costs`, tables from
measurements of whole generations are in :mod:`gfdit.sim.costs.measured_costs`.

Nobody has published artifact sizes: they follow from the shapes of the tensors, two bytes a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gfdit.core.cost.file import ArtifactSize, CostEntry, CostTable, StepExchanges
from gfdit.core.tasks import Shape, TaskKind
from gfdit.sim.costs import flux_costs, flux_edits, measured_costs
from gfdit.sim.costs.cost_tables import FOLDER

QWEN_STEP_MS = {  # by side of the image, on 1, 2 and 4 ranks
    512: (155, 161, 172),
    1024: (605, 350, 207),
    1536: (1557, 880, 464),
}
QWEN_PROMPT_BYTES = 256 * 3584 * 2  # a prompt of 256 tokens in the text encoder's width
QWEN_LATENT_CHANNELS = 64  # of a token: 2 x 2 patches of 16 channels
WAN_SHAPES = (Shape(480, 832, 49), Shape(480, 832, 81), Shape(720, 1280, 81))
WAN_SPEEDUP = {1: 1.00, 2: 1.82, 4: 3.33, 8: 5.88}
WAN_PROMPT_BYTES = 2 * 512 * 4096 * 2  # prompt and negative prompt, padded to 512 tokens
WAN_NUM_LAYERS, WAN_HIDDEN_SIZE = 30, 3072  # of the model of 5e9 weights
WAN_NOMINAL_TOKENS = 4  # 16 x 16 pixels each, for one of its tokens
WAN_LATENT_CHANNELS = 48  # of the model that compresses 16 x 16 pixels, as the published token counts imply

ENCODE_MS = 55.0
PREPARE_MS = 52.0
FINALISE_MS = 0.5
MIGRATION_LATENCY_S = 0.003
# NVLink of H20 and H100: 450 GB/s each way, of which large copies reach about 80 %.
MIGRATION_BYTES_PER_S = 3.6e11
SIZES_SOURCE = "artifact sizes: derived from tensor shapes; bytes_per_s: 80 % of NVLink's 450 GB/s each way"


def qwen_image_h20() -> CostTable:
    steps_ms = {Shape(side, side): dict(zip((1, 2, 4), row, strict=True)) for side, row in QWEN_STEP_MS.items()}
    return CostTable(
        "8 x NVIDIA H20",
        "denoise: README of the GF-DiT repository, Qwen-Image 20B on H20; encode, prepare, decode, migration "
        f"latency: constants of its synthetic workload generator; {SIZES_SOURCE}",
        MIGRATION_LATENCY_S,
        MIGRATION_BYTES_PER_S,
        tuple(_entries("qwen-image", steps_ms, cfg=False)),
        tuple(_sizes("qwen-image", steps_ms, False, QWEN_PROMPT_BYTES, _qwen_latent_bytes)),
        exchanges=(measured_costs.QWEN.exchanges,),
    )


def wan22_synthetic() -> CostTable:
    steps_ms = {shape: {sp: _wan_step_ms(shape, sp) for sp in WAN_SPEEDUP} for shape in WAN_SHAPES}
    return CostTable(
        "synthetic",
        "constants of the GF-DiT repository's synthetic workload generator, Wan2.2-like; a step computes both "
        f"guidance branches on every rank of its group; {SIZES_SOURCE}",
        MIGRATION_LATENCY_S,
        MIGRATION_BYTES_PER_S,
        tuple(_entries("wan2.2", steps_ms, cfg=True)),
        tuple(_sizes("wan2.2", steps_ms, True, WAN_PROMPT_BYTES, _wan_latent_bytes)),
        exchanges=(StepExchanges("wan2.2", 4 * WAN_NUM_LAYERS, 2 * WAN_HIDDEN_SIZE / WAN_NOMINAL_TOKENS),),
    )


def _wan_step_ms(shape: Shape, sp: int) -> float:
    tokens = ((shape.num_frames - 1) // 4 + 1) * (shape.height // 32) * (shape.width // 32)
    return 0.1323 * tokens / WAN_SPEEDUP[sp] + 20 * (sp - 1)


def _decode_ms(shape: Shape) -> float:
    return 9e-8 * shape.height * shape.width * shape.num_frames + 100 + FINALISE_MS


def _qwen_latent_bytes(shape: Shape) -> int:
    return (shape.height // 16) * (shape.width // 16) * QWEN_LATENT_CHANNELS * 2


def _wan_latent_bytes(shape: Shape) -> int:
    frames = (shape.num_frames - 1) // 4 + 1
    return frames * (shape.height // 16) * (shape.width // 16) * WAN_LATENT_CHANNELS * 2


def _entries(model: str, steps_ms: Mapping[Shape, Mapping[int, float]], *, cfg: bool) -> Iterable[CostEntry]:
    for shape, by_sp in steps_ms.items():
        times = [
            (TaskKind.ENCODE, 1, ENCODE_MS),
            (TaskKind.PREPARE, 1, PREPARE_MS),
            *((TaskKind.DENOISE, sp, ms) for sp, ms in by_sp.items()),
            (TaskKind.DECODE, 1, _decode_ms(shape)),
        ]
        for kind, sp, ms in times:
            seconds = round(ms / 1000, 7)
            yield CostEntry(model, kind, *shape.size, cfg, sp, cfg_parallel=1, batch=1, seconds=seconds)


def _sizes(
    model: str, shapes: Iterable[Shape], cfg: bool, prompt_bytes: int, latent_bytes: Callable[[Shape], int]
) -> Iterable[ArtifactSize]:
    for shape in shapes:
        yield ArtifactSize(model, "conditioning", *shape.size, cfg, prompt_bytes)
        yield ArtifactSize(model, "latents", *shape.size, cfg, latent_bytes(shape))


TABLES = (
    ("flux-h100", flux_costs.flux_h100),
    ("flux-h100-compiled", measured_costs.flux_h100_compiled),
    ("flux-h100-eager", measured_costs.flux_h100_eager),
    ("flux-h100-edits", flux_edits.edit_table),
    ("hunyuanvideo-h100", measured_costs.hunyuanvideo_h100),
    ("qwen-image-h20", qwen_image_h20),
    ("qwen-image-h800", measured_costs.qwen_image_h800),
    ("wan2.2-gb200", measured_costs.wan22_gb200),
    ("wan2.2-synthetic", wan22_synthetic),
)


def write_all(folder: Path) -> None:
    for name, make in TABLES:
        make().save(folder / f"{name}.json")


if __name__ == "__main__":
    write_all(FOLDER)
