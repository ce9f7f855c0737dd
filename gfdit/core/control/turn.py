"""One turn of the control plane: an event comes in, commands go out."""

from __future__ import annotations

from gfdit.core.commands import Command


class Turn:
    """When the event of this turn was handed in, and the ``commands`` so far, in the order to emit them.

    Shared by the parts of the control plane: whoever decides something appends what follows from it.
    """

    __slots__ = ("commands", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.commands: list[Command] = []

    def begin(self, now_s: float) -> None:
        self.now_s = now_s
        self.commands = []
