"""Cost tables by path, or by name for those that come with gfdit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gfdit.core.cost.file import CostTable

FOLDER = Path(__file__).with_name("costs")


def shipped_tables() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_cost_table(spec: str | Sequence[str]) -> CostTable:
    """One table, or several as one, see :func:`merged`; several in one ``spec`` have commas between them.

    Raises ``ValueError`` for a table that is wrong or not there.
    """
    specs = [one for part in ([spec] if isinstance(spec, str) else spec) for one in part.split(",")]
    return merged({one: _load(one) for one in specs})


def merged(tables: Mapping[str, CostTable]) -> CostTable:
    """The models of all of them on one kind of rank, with the slowest copies of any.

    Raises ``ValueError`` for a model that two of them have.
    """
    first, *others = tables.values()
    if not others:
        return first
    home: dict[str, str] = {}
    for name, table in tables.items():
        for model in dict.fromkeys(entry.model for entry in table.entries):
            if home.setdefault(model, name) != name:
                raise ValueError(f"model {model!r} is in two cost tables: {home[model]} and {name}")
    return replace(
        first,
        hardware=", ".join(dict.fromkeys(table.hardware for table in tables.values())),
        source="; ".join(f"{name}: {table.source}" for name, table in tables.items()),
        migration_latency_s=max(table.migration_latency_s for table in tables.values()),
        migration_bytes_per_s=min(table.migration_bytes_per_s for table in tables.values()),
        entries=tuple(entry for table in tables.values() for entry in table.entries),
        artifacts=tuple(size for table in tables.values() for size in table.artifacts),
        masked_steps=tuple(steps for table in tables.values() for steps in table.masked_steps),
    )


def _load(spec: str) -> CostTable:
    path = Path(spec)
    if spec in shipped_tables():
        path = FOLDER / f"{spec}.json"
    elif not path.is_file():
        raise ValueError(
            f"cost table {spec} does not exist; tables that come with gfdit: {', '.join(shipped_tables())}"
        )
    return CostTable.load(path)
