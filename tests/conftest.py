"""Options of the test run."""

import pytest

SLOW_TO_START = ("engine", "fork_server")
"""Fixtures of the whole session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-requests", type=int, default=16, help="requests of the soak test")
    parser.addoption("--soak-seed", type=int, default=0, help="seed of the soak test")
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel variant, not a selection")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In parallel, tests that share something slow to start run in one process, and those of a file do."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        group = next((name for name in SLOW_TO_START if name in fixtures), item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
