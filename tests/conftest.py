"""Options of the test run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-requests", type=int, default=16, help="requests of the soak test")
    parser.addoption("--soak-seed", type=int, default=0, help="seed of the soak test")
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel variant, not a selection")
