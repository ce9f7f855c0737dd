"""Waiting for what is to happen, however long that takes on a slow or busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
HANG_S = 600.0  # what has not happened by then never will; that says nothing about speed


def wait_until(happened: Callable[[], T], what: str, timeout_s: float = HANG_S) -> T:
    """The first value of ``happened()`` that is true. Raises ``AssertionError`` with ``what`` did not happen."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := happened()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
    return value
