"""Parameters of tests that `make test` leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(values: Iterable[object]) -> list[Any]:
    """For ``pytest.mark.parametrize``: run by `make thorough` only."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]
