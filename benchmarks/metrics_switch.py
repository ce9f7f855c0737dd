"""Lets `benchmarks.metrics_cost` switch metrics and traces of a running server off and on, as gfdit itself cannot.

Two halves, one for each process that they cost something: a middleware for the API server's, where requests are
counted and spans made, and a policy for the control process, where tasks are. The switch of that one is a file: on
while it exists. Nothing may run while it changes.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gfdit.core import Decision, SchedulerView
from gfdit.core.policy.loading import DEFAULT_POLICY, load_policy
from gfdit.observe.metrics import SHOWN

PATH = "/switch"
_COUNTING = ("arrived", "started", "ended", "take", "take_worker_counters")


class SwitchedFront:
    """POST ``/switch?on`` or ``/switch?off``."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        server = SHOWN.server
        assert server is not None
        for name in _COUNTING:
            if scope["query_string"] == b"off":
                setattr(server, name, lambda *_: None)
            else:
                vars(server).pop(name, None)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


class SwitchedPolicy:
    """``policy``, in a control process that looks at the file ``switch`` at every turn, on or off."""

    def __init__(self, switch: str, policy: str = DEFAULT_POLICY) -> None:
        self._policy = load_policy(policy, {})
        self.name = self._policy.name
        control = getattr(sys.modules["__main__"], "ControlProcess", None)
        if control is not None:  # else it is only checked whether this policy can be loaded
            _switch_turns(control, Path(switch))

    def schedule(self, view: SchedulerView) -> Decision:
        return self._policy.schedule(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def _switch_turns(control: Any, switch: Path) -> None:
    turn = control.turn
    state: dict[str, Any] = {}

    def switched_turn(self: Any) -> None:
        is_on = switch.exists()
        if is_on != state.get("is_on", True):
            if not is_on:
                state["reports"] = self._task_reports
            switch_control(self, is_on, state["reports"])
        state["is_on"] = is_on
        turn(self)

    control.turn = switched_turn


def switch_control(control: Any, is_on: bool, reports: Any) -> None:
    """``reports`` is what collects for traces while they are on."""
    control.plane.on_task_done = control._meter.task_done if is_on else None
    control.plane.policy.seconds = control._meter.decisions_s if is_on else None
    control._task_reports = reports if is_on else None
    if is_on:
        vars(control).pop("_report", None)
    else:
        control._report = lambda **_: None
