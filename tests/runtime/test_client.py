"""The engine's end of the runtime under a virtual clock: how soon a control process that is stopped is noticed."""

from __future__ import annotations

from gfdit.runtime import messages as msg
from gfdit.runtime.client import ALIVE_INTERVAL_S, ControlClient, FromRuntime
from gfdit.runtime.config import RuntimeConfig

# Promised to who runs a server; see docs/faults.md.
NOTICED_S = 10.0


class Stoppable:
    """An :class:`EngineLink` to a process that says that it is alive, until it is stopped as by SIGSTOP."""

    pid, returncode = 1, None

    def __init__(self) -> None:
        self.now_s = self._said_s = 0.0
        self.stopped_s: float | None = None
        self.noticed_s: float | None = None

    def wait(self, timeout_s: float) -> FromRuntime:
        self.now_s += timeout_s
        if self.stopped_s is not None or self.now_s - self._said_s < ALIVE_INTERVAL_S:
            return FromRuntime()
        first, self._said_s = self._said_s == 0.0, self.now_s
        return FromRuntime(from_control=[msg.Ready() if first else msg.Alive()])

    def kill(self) -> None:
        self.noticed_s = self.now_s

    def start(self, config: RuntimeConfig) -> None: ...

    def drop(self) -> None: ...

    def tell(self, message: msg.EngineMessage) -> None: ...

    def wake(self) -> None: ...

    def close(self, grace_s: float) -> None: ...


def client_of(link: Stoppable) -> ControlClient:
    config = RuntimeConfig(
        run_dir="", num_ranks=1, model="m", policy="p", worker="module:function", worker_payload_path=""
    )
    return ControlClient(config, link, lambda: link.now_s)


def test_a_control_process_that_is_stopped_is_noticed_within_ten_seconds() -> None:
    """By the settings that a server has by default, however little happens."""
    link = Stoppable()
    client = client_of(link)
    for _ in range(100):
        client.receive(None)
    assert client.config.epoch == 0 and link.noticed_s is None, "it lives"
    link.stopped_s = link.now_s
    while link.noticed_s is None and link.now_s < link.stopped_s + 100:
        client.receive(None)
    assert link.noticed_s is not None and link.noticed_s - link.stopped_s <= NOTICED_S
    assert client.config.epoch == 1, "another one goes on"


def test_an_engine_that_was_stopped_itself_blames_nobody() -> None:
    """Negative control: it has heard nobody for long, and the control process has said what it always says."""
    link = Stoppable()
    client = client_of(link)
    client.receive(None)
    link.now_s += 3600
    for _ in range(100):
        client.receive(None)
    assert link.noticed_s is None and client.config.epoch == 0
