"""Interpreted kernels are slow: `make test` runs some of every kind, `make thorough` all."""

from __future__ import annotations

from pathlib import Path

import pytest

THOROUGH = (
    "test_containment",
    "test_large_path_controls",
    "test_large_paths",
    "test_lost_ranks",
    "test_low_latency_controls",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = Path(item.path)
        if path.parent.name == "kernels" and path.stem in THOROUGH:
            item.add_marker(pytest.mark.thorough)
