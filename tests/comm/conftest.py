"""Ranks of these tests are forked from one process, whoever starts them first."""

from __future__ import annotations

import pytest

from tests.comm.worlds import start_fork_server


@pytest.fixture(scope="session", autouse=True)
def ranks_are_forked() -> None:
    start_fork_server()
