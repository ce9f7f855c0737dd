"""Every decoder of what processes tell each other, and what is kept of it."""

from __future__ import annotations

from typing import Any

import msgspec

from gfdit.core.commands import Command
from gfdit.core.events import Event
from gfdit.observe.snapshot import Totals
from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from tests.fuzz.mutation import mutated_msgpack
from tests.fuzz.strategies import values_of
from tests.fuzz.targets import Target


def _target(name: str, kind: Any, weight: float = 1.0) -> Target:
    decoder = msg.Decoder(kind)

    def run(data: bytes) -> None:
        message = decoder.decode(data)
        again = msg.encode(message)
        # As bytes: what is no number is not equal to itself.
        assert msg.encode(decoder.decode(again)) == again, "it is another message after it was sent on"
        if isinstance(message, msg.Snapshot):
            Totals().take(message.epoch, message.sums)

    return Target(
        name,
        run,
        mutated_msgpack,
        lambda: values_of(kind).map(msg.encode),
        raises=(msg.DamagedMessageError,),
        weight=weight,
    )


def _config(data: bytes) -> None:
    config = msgspec.json.decode(data, type=RuntimeConfig)
    assert msgspec.json.decode(msgspec.json.encode(config), type=RuntimeConfig) == config


TARGETS = (
    _target("messages of the engine", msg.EngineMessage, 2),
    _target("messages to the engine", msg.ControlMessage, 2),
    _target("messages to a compute lane", msg.ComputeMessage, 2),
    _target("messages to a migration lane", msg.MigrationMessage, 2),
    _target("messages to a watch", msg.WatchMessage),
    _target("messages of a worker", msg.WorkerMessage, 2),
    _target("results", msg.Result),
    _target("events", Event),
    _target("commands", Command),
)
