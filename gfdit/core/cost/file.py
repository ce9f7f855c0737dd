"""The cost table file: task times and artifact sizes on one kind of hardware, measured or published."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from gfdit.core.json_fields import JsonFields, parse_json
from gfdit.core.layouts import ParallelSpec
from gfdit.core.tasks import Shape, TaskKind

VERSION = 1
SHORTEST_S = 1e-9  # less is no measurement, and a part of it may be nothing
T = TypeVar("T")


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
class ArtifactSize:
    """How large an artifact is, whole, on one rank: one line of the optional list ``artifacts``.

    ``artifact`` is its kind, see :func:`gfdit.core.tasks.artifact_kind`.
    """

    model: str
    artifact: str
    height: int
    width: int
    num_frames: int
    cfg: bool
    num_bytes: int  # "bytes" in the file

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width, self.num_frames)


@dataclass(frozen=True, slots=True)
class MaskedSteps:
    """What steps of one model cost that compute the tokens under a mask: a line of the optional ``masked_steps``.

    Their share of a full step's time is ``unmasked_share`` and a part in proportion to the tokens; ``r_squared``
    says how well that fits what was measured.
    """

    model: str
    unmasked_share: float
    r_squared: float


@dataclass(frozen=True, slots=True)
class StepExchanges:
    """What ranks exchange that share the sequence of one model: a line of the optional ``exchanges``.

    A step has ``num_all_to_alls`` for each branch of guidance: with Ulysses attention queries, keys, values and
    results in every layer. In each a rank has ``bytes_per_token`` for every nominal token that it computes
    (:attr:`gfdit.core.tasks.Shape.num_tokens`), and keeps its own part of that.
    """

    model: str
    num_all_to_alls: int
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """Task times on one kind of hardware, and where they come from.

    Copying an artifact to other ranks takes the latency and, for each of them, its size at the rate given. That is
    also the rate between the ranks of a node, ``ranks_per_node`` of them: times at higher degrees are of several
    nodes. None: every time is of ranks of one node. ``exchanges`` say what a layout across nodes costs more.
    """

    hardware: str
    source: str
    migration_latency_s: float
    migration_bytes_per_s: float
    entries: tuple[CostEntry, ...]
    artifacts: tuple[ArtifactSize, ...] = ()
    masked_steps: tuple[MaskedSteps, ...] = ()
    exchanges: tuple[StepExchanges, ...] = ()
    ranks_per_node: int | None = None

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Raises ``ValueError`` naming file, entry and field, ``OSError`` if it cannot be read."""
        fields = JsonFields(parse_json(Path(path).read_bytes(), str(path)), str(path))
        if (version := fields.take("version")) != VERSION:
            raise fields.error("version", f"must be {VERSION}, got {version!r}")
        migration = JsonFields(fields.take("migration"), f"{path}: migration")
        table = cls(
            hardware=fields.text("hardware"),
            source=fields.text("source"),
            migration_latency_s=migration.number("latency_s", positive=False),
            migration_bytes_per_s=migration.number("bytes_per_s"),
            entries=_read_entries(fields, str(path)),
            artifacts=_read_artifacts(fields, str(path)),
            masked_steps=_read_masked_steps(fields, str(path)),
            exchanges=_read_list(fields, str(path), "exchanges", _read_exchange, lambda one: one.model),
            ranks_per_node=fields.integer_or_none("ranks_per_node"),
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
        parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
        if self.ranks_per_node is not None:
            parts.append(f'"ranks_per_node": {self.ranks_per_node}')
        if self.artifacts:
            parts.append(f'"artifacts": {_one_a_line(map(_size_json, self.artifacts))}')
        if self.masked_steps:
            parts.append(f'"masked_steps": {_one_a_line(map(asdict, self.masked_steps))}')
        if self.exchanges:
            parts.append(f'"exchanges": {_one_a_line(map(asdict, self.exchanges))}')
        parts.append(f'"entries": {_one_a_line(asdict(entry) for entry in self.entries)}')
        Path(path).write_text("{" + ",\n ".join(parts) + "\n}\n", encoding="utf-8")


def _one_a_line(values: Iterable[dict[str, Any]]) -> str:
    """A list that stays readable and whose diffs stay small."""
    return "[\n  " + ",\n  ".join(map(json.dumps, values)) + "\n ]"


def _read_entries(fields: JsonFields, path: str) -> tuple[CostEntry, ...]:
    entries = _read_list(
        fields, path, "entries", _read_entry, lambda e: (e.model, e.task, e.shape, e.cfg, e.parallel, e.batch)
    )
    if not entries:
        raise fields.error("entries", "must be a list with at least one entry")
    return entries


def _read_artifacts(fields: JsonFields, path: str) -> tuple[ArtifactSize, ...]:
    return _read_list(
        fields, path, "artifacts", _read_size, lambda size: (size.model, size.artifact, size.shape, size.cfg)
    )


def _read_masked_steps(fields: JsonFields, path: str) -> tuple[MaskedSteps, ...]:
    return _read_list(fields, path, "masked_steps", _read_steps, lambda steps: steps.model)


def _read_list(
    fields: JsonFields, path: str, name: str, read: Callable[[JsonFields], T], key_of: Callable[[T], Hashable]
) -> tuple[T, ...]:
    """Of an optional field, whose entries differ in what ``key_of`` says."""
    values = fields.take(name, [])
    if not isinstance(values, list):
        raise fields.error(name, "must be a list")
    first_at: dict[Hashable, int] = {}
    found = []
    for index, value in enumerate(values):
        where = f"{path}: {name}[{index}]"
        found.append(read(JsonFields(value, where)))
        key = key_of(found[-1])
        if key in first_at:
            raise ValueError(f"{where}: repeats {name}[{first_at[key]}]")
        first_at[key] = index
    return tuple(found)


def _read_steps(fields: JsonFields) -> MaskedSteps:
    steps = MaskedSteps(
        model=fields.text("model"),
        unmasked_share=fields.number("unmasked_share", positive=False),
        r_squared=fields.number("r_squared", positive=False),
    )
    for name in ("unmasked_share", "r_squared"):
        if getattr(steps, name) > 1:
            raise fields.error(name, f"must be at most 1, got {getattr(steps, name)}")
    fields.end()
    return steps


def _read_size(fields: JsonFields) -> ArtifactSize:
    size = ArtifactSize(
        model=fields.text("model"),
        artifact=fields.text("artifact"),
        height=fields.integer("height"),
        width=fields.integer("width"),
        num_frames=fields.integer("num_frames"),
        cfg=fields.flag("cfg"),
        num_bytes=fields.integer("bytes"),
    )
    fields.end()
    return size


def _size_json(size: ArtifactSize) -> dict[str, Any]:
    fields = asdict(size)
    fields["bytes"] = fields.pop("num_bytes")
    return fields


def _read_exchange(fields: JsonFields) -> StepExchanges:
    exchange = StepExchanges(
        model=fields.text("model"),
        num_all_to_alls=fields.integer("num_all_to_alls"),
        bytes_per_token=fields.number("bytes_per_token"),
    )
    fields.end()
    return exchange


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
    if entry.seconds < SHORTEST_S:
        raise fields.error("seconds", f"must be at least {SHORTEST_S:g}, got {entry.seconds:g}")
    if entry.cfg_parallel > (2 if entry.cfg else 1):
        raise fields.error("cfg_parallel", f"is {entry.cfg_parallel}, but cfg is {json.dumps(entry.cfg)}")
    fields.end()
    return entry
