"""How a request ended, by the command that says so."""

from __future__ import annotations

from typing import NamedTuple

from gfdit.core import commands as cmd
from gfdit.runtime import messages as msg


class Ended(NamedTuple):
    outcome: str
    error: str = ""
    status_code: int = 500

    @classmethod
    def of(cls, command: msg.RequestEnd) -> Ended:
        match command:
            case cmd.CompleteRequest():
                return cls("completed")
            case cmd.CancelRequest():
                return cls("cancelled")
            case cmd.RejectRequest(_, reason):
                return cls("rejected", reason, 429)
            case cmd.FailRequest(_, error, status_code):
                return cls("failed", error, status_code)
        raise TypeError(command)
