"""Shared by the tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.test_runtime import Runtime


@pytest.fixture(autouse=True)
def no_server_of_a_test_that_failed_goes_on() -> Iterator[None]:
    """It would be in the way of those after it."""
    before = list(Runtime.opened)
    yield
    for runtime in [each for each in Runtime.opened if each not in before]:
        runtime.close()
