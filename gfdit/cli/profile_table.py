"""The cost table that `gfdit profile` writes: what the file had before, and what has been measured since."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from pathlib import Path

from gfdit.core.cost.file import ArtifactSize, CostEntry, CostTable, MaskedSteps
from gfdit.core.cost.table import CostKey
from gfdit.core.tasks import Shape
from gfdit.observe.samples import UNLIMITED, Samples, typical

# For a table without a measured copy: the format wants numbers.
NO_COPIES = (0.0, UNLIMITED)


class ProfileTable:
    """The file at ``path``, which may exist. ``method`` is the beginning of its ``source``.

    Raises ``ValueError`` for a file of other hardware, or measured in another way.
    """

    def __init__(self, path: Path, hardware: str, method: str) -> None:
        self.path = path
        self.hardware = hardware
        self.method = method
        self.entries: dict[CostKey, CostEntry] = {}
        self.sizes: dict[tuple[str, str, Shape, bool], ArtifactSize] = {}
        self.masked_steps: dict[str, MaskedSteps] = {}
        self.migration = NO_COPIES
        self._remarks = ""
        if path.exists():
            self._take_over(CostTable.load(path))

    def _take_over(self, table: CostTable) -> None:
        if table.hardware != self.hardware:
            raise ValueError(
                f"{self.path} is of {table.hardware!r}, this is {self.hardware!r}: choose another --out"
            )
        if not table.source.startswith(self.method):
            raise ValueError(f"{self.path} is from {table.source!r}, not {self.method!r}: choose another --out")
        self.entries = {_key_of(entry): entry for entry in table.entries}
        self.sizes = {(size.model, size.artifact, size.shape, size.cfg): size for size in table.artifacts}
        self.masked_steps = {steps.model: steps for steps in table.masked_steps}
        self.migration = table.migration_latency_s, table.migration_bytes_per_s
        self._remarks = table.source.removeprefix(self.method)

    def missing(self, keys: Iterable[CostKey]) -> list[CostKey]:
        return [key for key in keys if key not in self.entries]

    def add(self, key: CostKey, samples: Samples) -> None:
        """What was measured under ``key``."""
        seconds = round(typical(samples.task_s[key]), 7)
        size = (key.shape.height, key.shape.width, key.shape.num_frames)
        degrees = (key.parallel.sp, key.parallel.cfg)
        self.entries[key] = CostEntry(key.model, key.kind, *size, key.cfg, *degrees, key.batch, seconds)

    def has_sizes(self, model: str, shape: Shape, cfg: bool) -> bool:
        return any((size.model, size.shape, size.cfg) == (model, shape, cfg) for size in self.sizes.values())

    def add_copies(self, samples: Samples) -> None:
        """Median sizes of the artifacts that were copied, and what a copy costs."""
        if not samples.copies:
            return
        found: dict[tuple[str, str, Shape, bool], list[int]] = {}
        for copy in samples.copies:
            request = copy.request
            found.setdefault((request.model, copy.kind, request.shape, request.cfg), []).append(copy.num_bytes)
        for key, values in found.items():
            model, kind, shape, cfg = key
            size = (shape.height, shape.width, shape.num_frames)
            self.sizes[key] = ArtifactSize(model, kind, *size, cfg, round(statistics.median(values)))
        latency_s, bytes_per_s = samples.copy_cost()
        self.migration = round(latency_s, 7), round(bytes_per_s)

    def add_masked_steps(self, steps: MaskedSteps) -> None:
        self.masked_steps[steps.model] = steps

    def remark(self, samples: Samples) -> str:
        """What a simulation needs besides the table; also kept in its source."""
        latency_ms, jitter = samples.dispatch_latency_s() * 1e3, samples.jitter()
        self._remarks = f"; dispatch latency {latency_ms:.2f} ms, jitter {jitter:.3f}"
        return f"--dispatch-latency-s {latency_ms / 1e3:.5f} --jitter {jitter:.3f}"

    def save(self) -> None:
        """Write the file, whole or not at all."""
        entries = tuple(sorted(self.entries.values(), key=_place))
        sizes = tuple(self.sizes[key] for key in sorted(self.sizes))
        masked_steps = tuple(self.masked_steps[model] for model in sorted(self.masked_steps))
        source = self.method + self._remarks
        table = CostTable(self.hardware, source, *self.migration, entries, sizes, masked_steps)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        table.save(scratch)
        scratch.replace(self.path)


def _key_of(entry: CostEntry) -> CostKey:
    return CostKey(entry.model, entry.task, entry.shape, entry.cfg, entry.parallel, entry.batch)


def _place(entry: CostEntry) -> tuple[object, ...]:
    """By model, guidance, size and task, in the order tasks run, then from narrow to wide."""
    order = list(type(entry.task))
    size = (entry.shape.num_tokens, entry.height, entry.width)
    return (entry.model, entry.cfg, size, order.index(entry.task), entry.parallel.size, entry.sp, entry.batch)
