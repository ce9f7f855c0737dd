"""What a lane does with orders of a control process that is gone, which may come behind those of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest

from gfdit.core.commands import FreeArtifacts, LoadComponent
from gfdit.runtime import messages as msg
from gfdit.runtime.completion import HostMonitor
from gfdit.runtime.compute_lane import ComputeLane
from gfdit.runtime.migration_lane import MigrationLane

FIRST_ID = 1 << 32


class Inbox:
    """Messages in an order of the test's choice; the watch has not said anything."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self.first_id = 0
        self.messages = list(messages)

    def get(self) -> Any | None:
        return self.messages.pop(0) if self.messages else None


@pytest.mark.parametrize("number", [7, FIRST_ID + 7])
def test_an_old_order_behind_a_new_control_process_is_passed_over(number: int) -> None:
    reports, executor = MagicMock(), MagicMock()
    executor.load_component.return_value = 1
    reconnect = msg.Reconnect(FIRST_ID)
    frees, loads = FreeArtifacts((0,), ("a",), number), LoadComponent(number, 0, "base")
    migration = MigrationLane(0, Inbox([reconnect, frees]), reports, executor, MagicMock(), 1.0)
    migration.run()
    inbox: Any = Inbox([reconnect, loads])
    compute = ComputeLane(0, 0, inbox, reports, executor, MagicMock(), migration, MagicMock(), HostMonitor())
    compute.run()
    is_new = number > FIRST_ID
    freed = [call.args for call in executor.free.call_args_list if call.args != ((),)]
    assert freed == ([(("a",),)] if is_new else [])
    assert executor.load_component.called is is_new
