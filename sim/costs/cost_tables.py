"""Cost tables by path, or by name for those that come with gfdit."""

from __future__ import annotations

from pathlib import Path

from gfdit.core.cost.file import CostTable

FOLDER = Path(__file__).parent


def shipped_tables() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_cost_table(spec: str) -> CostTable:
    """Raises ``ValueError`` for a table that is wrong or not there."""
    path = Path(spec)
    if spec in shipped_tables():
        path = FOLDER / f"{spec}.json"
    elif not path.is_file():
        raise ValueError(
            f"cost table {spec} does not exist; tables that come with gfdit: {', '.join(shipped_tables())}"
        )
    return CostTable.load(path)
