"""Edits with FLUX.1-dev at 1024 x 1024 on an H100: derived figures, each with its source; nothing was measured.

The step is that of :mod:`gfdit.sim.costs.flux_costs`. How much a batch of edits gains is an assumption on its own,
:data:`GAIN_OF_FOUR`, and 1 is as good a choice: report both.
"""

from __future__ import annotations

from collections.abc import Iterable

from gfdit.core.cost.file import CostEntry, CostTable, MaskedSteps
from gfdit.core.tasks import TaskKind
from gfdit.sim.costs import flux_costs
from gfdit.sim.costs.edit_costs import EditCosts

GIB = 2**30
SIDE = 1024
NUM_STEPS = 28  # as many as diffusers' FLUX pipelines run by default
UNMASKED_SHARE = 0.05  # of a step, what is not in blocks: gfdit.core.cost.calibrated assumes the same
IMAGE_TOKENS = (SIDE // 16) ** 2
BYTES_PER_BLOCK = 2 * IMAGE_TOKENS * flux_costs.HIDDEN_SIZE * 2  # keys and values in bfloat16: 48 MiB
HOST_BYTES_PER_S = 50e9  # PCIe Gen5 x16 has 63 GB/s; what is left where rows are gathered in pinned memory
DISK_BYTES_PER_S = 3e9  # FlashPS, section 4.2: "the order of GiB/s"; one NVMe drive
TEMPLATE_BYTES = NUM_STEPS * flux_costs.NUM_LAYERS * BYTES_PER_BLOCK  # 75 GiB
GAIN_OF_FOUR = 1.29  # FlashPS, section 1: throughput of masked steps in batches of 4, of that of single ones
MAX_BATCH = 8  # FlashPS, section 4.2: throughput plateaus there


def flux_edits(host_bytes: float = 2048 * GIB, recorded: tuple[str, ...] = ()) -> EditCosts:
    """A host of 2 TiB, the example of FlashPS, section 4.2, has room for 27 of these templates."""
    return EditCosts(
        num_blocks=flux_costs.NUM_LAYERS,
        block_full_s=(1 - UNMASKED_SHARE) * flux_costs.step_s(SIDE, 1, 1) / flux_costs.NUM_LAYERS,
        bytes_per_block=BYTES_PER_BLOCK,
        host_bytes_per_s=HOST_BYTES_PER_S,
        disk_bytes_per_s=DISK_BYTES_PER_S,
        template_bytes=TEMPLATE_BYTES,
        host_bytes=host_bytes,
        text_share=flux_costs.TEXT_TOKENS / (IMAGE_TOKENS + flux_costs.TEXT_TOKENS),
        recorded=recorded,
    )


def edit_table(gain_of_four: float = GAIN_OF_FOUR) -> CostTable:
    """That of :func:`flux_h100` at 1024 x 1024, with steps of up to eight edits at once.

    Part of a step's time is there once for all of a batch, as much as makes four gain that factor. That is said of
    steps under masks; here all steps do, since a table has one time for each shape.
    """
    flux = flux_costs.flux_h100()
    own = [entry for entry in flux.entries if entry.shape.size == (SIDE, SIDE, 1)]
    sizes = tuple(size for size in flux.artifacts if size.shape.size == (SIDE, SIDE, 1))
    source = f"{flux.source}; batches: steps of four at once gain {gain_of_four:g} times (FlashPS, section 1)"
    if gain_of_four == 1:
        source = f"{flux.source}; batches gain nothing"
    masked = (MaskedSteps(flux_costs.MODEL, UNMASKED_SHARE, 1.0),)
    return CostTable(
        flux.hardware,
        source,
        flux.migration_latency_s,
        flux.migration_bytes_per_s,
        (*own, *_batches(own, gain_of_four)),
        sizes,
        masked,
        flux.exchanges,
    )


def batch_s(step_s: float, size: int, gain_of_four: float = GAIN_OF_FOUR) -> float:
    """Seconds of one step of ``size`` edits, each of which takes ``step_s`` alone."""
    shared = (4 - 4 / gain_of_four) / 3
    return step_s * (shared + size * (1 - shared))


def _batches(entries: Iterable[CostEntry], gain_of_four: float) -> Iterable[CostEntry]:
    for entry in entries:
        if (entry.task, entry.sp) == (TaskKind.DENOISE, 1):
            for size in range(2, MAX_BATCH + 1):
                seconds = round(batch_s(entry.seconds, size, gain_of_four), 7)
                where = (entry.height, entry.width, entry.num_frames, entry.cfg)
                yield CostEntry(entry.model, entry.task, *where, 1, 1, size, seconds)
