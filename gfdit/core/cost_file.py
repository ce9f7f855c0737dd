"""The cost table file: task times on one kind of hardware, measured or published."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gfdit.core.json_fields import JsonFields
from gfdit.core.layouts import ParallelSpec
from gfdit.core.tasks import Shape, TaskKind

VERSION = 1


@dataclass(frozen=True, slots=True)
class CostEntry:
    """Seconds one task takes: one line of the file. ``sp`` and ``cfg_parallel`` are parallel degrees."""

    model: str
    task: TaskKind
    height: int
    width: int
    num_frames: int
    cfg: bool
    sp: int
    cfg_parallel: int
    batch: int
    seconds: float

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width, self.num_frames)

    @property
    def parallel(self) -> ParallelSpec:
        return ParallelSpec(self.sp, self.cfg_parallel)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Task times on one kind of hardware, and where they come from."""

    hardware: str
    source: str
    migration_latency_s: float
    migration_bytes_per_s: float
    entries: tuple[CostEntry, ...]

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Raises ``ValueError`` naming file, entry and field, ``OSError`` if it cannot be read."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from error
        fields = JsonFields(data, str(path))
        if (version := fields.take("version")) != VERSION:
            raise fields.error("version", f"must be {VERSION}, got {version!r}")
        migration = JsonFields(fields.take("migration"), f"{path}: migration")
        table = cls(
            hardware=fields.text("hardware"),
            source=fields.text("source"),
            migration_latency_s=migration.number("latency_s", positive=False),
            migration_bytes_per_s=migration.number("bytes_per_s"),
            entries=_read_entries(fields, str(path)),
        )
        migration.end()
        fields.end()
        return table

    def save(self, path: str | Path) -> None:
        head = {
            "version": VERSION,
            "hardware": self.hardware,
            "source": self.source,
            "migration": {
                "latency_s": self.migration_latency_s,
                "bytes_per_s": self.migration_bytes_per_s,
            },
        }
        # One entry a line: a table stays readable and its diffs small.
        lines = [f'"{key}": {json.dumps(value)},' for key, value in head.items()]
        entries = ",\n  ".join(json.dumps(asdict(entry)) for entry in self.entries)
        text = "{" + "\n ".join(lines) + f'\n "entries": [\n  {entries}\n ]\n}}\n'
        Path(path).write_text(text, encoding="utf-8")


def _read_entries(fields: JsonFields, path: str) -> tuple[CostEntry, ...]:
    values = fields.take("entries")
    if not isinstance(values, list) or not values:
        raise fields.error("entries", "must be a list with at least one entry")
    first_at: dict[tuple[Any, ...], int] = {}
    entries = []
    for index, value in enumerate(values):
        where = f"{path}: entries[{index}]"
        entry = _read_entry(JsonFields(value, where))
        key = (entry.model, entry.task, entry.shape, entry.cfg, entry.parallel, entry.batch)
        if key in first_at:
            raise ValueError(f"{where}: repeats entries[{first_at[key]}]")
        first_at[key] = index
        entries.append(entry)
    return tuple(entries)


def _read_entry(fields: JsonFields) -> CostEntry:
    model, task = fields.text("model"), fields.text("task")
    if task not in list(TaskKind):
        raise fields.error("task", f"must be one of {', '.join(TaskKind)}, got {task!r}")
    entry = CostEntry(
        model=model,
        task=TaskKind(task),
        height=fields.integer("height"),
        width=fields.integer("width"),
        num_frames=fields.integer("num_frames"),
        cfg=fields.flag("cfg"),
        sp=fields.integer("sp"),
        cfg_parallel=fields.integer("cfg_parallel"),
        batch=fields.integer("batch"),
        seconds=fields.number("seconds"),
    )
    if entry.cfg_parallel > (2 if entry.cfg else 1):
        raise fields.error("cfg_parallel", f"is {entry.cfg_parallel}, but cfg is {json.dumps(entry.cfg)}")
    fields.end()
    return entry
