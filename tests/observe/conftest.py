"""No file of a test is given up, however busy the machine is."""

from __future__ import annotations

import pytest

from gfdit.observe import writers


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "OPEN_TIMEOUT_S", 300.0)
    monkeypatch.setattr(writers, "CLOSE_TIMEOUT_S", 300.0)
