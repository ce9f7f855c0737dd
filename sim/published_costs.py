"""The cost tables that come with gfdit, computed from published figures: ``python -m gfdit.sim.published_costs``.

Both take encode, prepare and decode times from the generator constants of the GF-DiT repository, which
publishes none for Qwen-Image. Its 0.5 ms to finalise a request count as decoding. Encoding, preparing and
decoding run on one rank, as in the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gfdit.core.cost_file import CostEntry, CostTable
from gfdit.core.tasks import Shape, TaskKind
from gfdit.sim.cost_tables import FOLDER

QWEN_STEP_MS = {  # by side of the image, on 1, 2 and 4 ranks
    512: (155, 161, 172),
    1024: (605, 350, 207),
    1536: (1557, 880, 464),
}
WAN_SHAPES = (Shape(480, 832, 49), Shape(480, 832, 81), Shape(720, 1280, 81))
WAN_SPEEDUP = {1: 1.00, 2: 1.82, 4: 3.33, 8: 5.88}

ENCODE_MS = 55.0
PREPARE_MS = 52.0
FINALISE_MS = 0.5
MIGRATION_LATENCY_S = 0.003
# No figure is published and the simulator charges the latency alone; an order of magnitude for NVLink.
MIGRATION_BYTES_PER_S = 1e11


def qwen_image_h20() -> CostTable:
    steps_ms = {Shape(side, side): dict(zip((1, 2, 4), row, strict=True)) for side, row in QWEN_STEP_MS.items()}
    return _table(
        "8 x NVIDIA H20",
        "denoise: README of the GF-DiT repository, Qwen-Image 20B on H20; encode, prepare, decode, migration: "
        "constants of its synthetic workload generator",
        _entries("qwen-image", steps_ms, cfg=False),
    )


def wan22_synthetic() -> CostTable:
    steps_ms = {shape: {sp: _wan_step_ms(shape, sp) for sp in WAN_SPEEDUP} for shape in WAN_SHAPES}
    return _table(
        "synthetic",
        "constants of the GF-DiT repository's synthetic workload generator, Wan2.2-like; a step computes both "
        "guidance branches on every rank of its group",
        _entries("wan2.2", steps_ms, cfg=True),
    )


def _wan_step_ms(shape: Shape, sp: int) -> float:
    tokens = ((shape.num_frames - 1) // 4 + 1) * (shape.height // 32) * (shape.width // 32)
    return 0.1323 * tokens / WAN_SPEEDUP[sp] + 20 * (sp - 1)


def _decode_ms(shape: Shape) -> float:
    return 9e-8 * shape.height * shape.width * shape.num_frames + 100 + FINALISE_MS


def _table(hardware: str, source: str, entries: Iterable[CostEntry]) -> CostTable:
    return CostTable(hardware, source, MIGRATION_LATENCY_S, MIGRATION_BYTES_PER_S, tuple(entries))


def _entries(model: str, steps_ms: Mapping[Shape, Mapping[int, float]], *, cfg: bool) -> Iterable[CostEntry]:
    for shape, by_sp in steps_ms.items():
        times = [
            (TaskKind.ENCODE, 1, ENCODE_MS),
            (TaskKind.PREPARE, 1, PREPARE_MS),
            *((TaskKind.DENOISE, sp, ms) for sp, ms in by_sp.items()),
            (TaskKind.DECODE, 1, _decode_ms(shape)),
        ]
        for kind, sp, ms in times:
            size = (shape.height, shape.width, shape.num_frames)
            yield CostEntry(model, kind, *size, cfg, sp, cfg_parallel=1, batch=1, seconds=round(ms / 1000, 7))


TABLES = (("qwen-image-h20", qwen_image_h20), ("wan2.2-synthetic", wan22_synthetic))


def write_all(folder: Path) -> None:
    for name, make in TABLES:
        make().save(folder / f"{name}.json")


if __name__ == "__main__":
    write_all(FOLDER)
