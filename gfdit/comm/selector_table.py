"""The file that ``gfdit bench comm --save`` writes: how long each way of each exchange took on some hardware.

``{"version": 1, "hardware", "source", "entries": [{"operation", "ranks", "bytes", "path", "chunk_bytes",
"programs", "seconds"}]}``; ``bytes`` is the most on any edge, that is, per pair of ranks.
"""

from __future__ import annotations

import json
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from gfdit.comm.choice import Choice, Path
from gfdit.comm.heap import Operation

VERSION = 1
_MOST = 2**53  # that every JSON reader keeps exactly


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One measurement. ``num_bytes`` per pair of ranks."""

    operation: Operation
    group_size: int
    num_bytes: int
    choice: Choice
    seconds: float


@dataclass(frozen=True, slots=True)
class SelectorTable:
    """``source`` says how and when it was measured."""

    hardware: str
    source: str
    entries: tuple[TableEntry, ...]

    def save(self, path: FilePath) -> None:
        fields = {"version": VERSION, "hardware": self.hardware, "source": self.source}
        lines = ",\n".join(json.dumps(_to_json(entry)) for entry in self.entries)
        path.write_text(f'{json.dumps(fields)[:-1]}, "entries": [\n{lines}\n]}}\n')

    @classmethod
    def load(cls, path: FilePath) -> SelectorTable:
        """Raises OSError if it cannot be read, ValueError that names file, entry and field for anything wrong."""
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError(f"{path}: not a table of collectives of version {VERSION}")
        if not isinstance(given := content.get("entries") or [], list):
            raise ValueError(f"{path}: entries must be a list")
        entries = []
        for number, fields in enumerate(given):
            try:
                entries.append(_from_json(fields))
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}: entries[{number}]: {_reason(error)}") from error
        for name in ("hardware", "source"):
            if not _is_text(content.get(name, "")):
                raise ValueError(f"{path}: {name} must be text, got {_shown(content[name])}")
        return cls(content.get("hardware", ""), content.get("source", ""), tuple(entries))


def _to_json(entry: TableEntry) -> dict[str, Any]:
    return {
        "operation": entry.operation.name.lower(),
        "ranks": entry.group_size,
        "bytes": entry.num_bytes,
        "path": str(entry.choice.path),
        "chunk_bytes": entry.choice.chunk_bytes,
        "programs": entry.choice.num_programs,
        "seconds": entry.seconds,
    }


def _from_json(fields: Any) -> TableEntry:
    if not isinstance(fields, dict):
        raise ValueError("must be an object")
    operations = [operation.name.lower() for operation in Operation]
    paths = [str(path) for path in Path]
    for name, known in (("operation", operations), ("path", paths)):
        if fields[name] not in known:
            raise ValueError(f"unknown {name} {_shown(fields[name])}; known: {', '.join(known)}")
    numbers = {name: fields[name] for name in ("ranks", "bytes", "chunk_bytes", "programs")}
    minima = {"ranks": 1, "bytes": 0, "chunk_bytes": 0, "programs": 1}
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or not minima[name] <= number <= _MOST:
            raise ValueError(f"{name} must be an integer of at least {minima[name]}, got {_shown(number)}")
    seconds = fields["seconds"]
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= sys.float_info.max:
        raise ValueError(f"seconds must be positive, got {_shown(seconds)}")
    seconds = float(seconds)
    choice = Choice(Path(fields["path"]), numbers["chunk_bytes"], numbers["programs"])
    operation = Operation[fields["operation"].upper()]
    return TableEntry(operation, numbers["ranks"], numbers["bytes"], choice, seconds)


def _is_text(value: Any) -> bool:
    """Halves of surrogate pairs, which JSON can escape, are none: side by side they would be one character."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _shown(value: Any) -> str:
    """What is wrong may be of any kind and depth."""
    return reprlib.repr(value)


def _reason(error: Exception) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)
