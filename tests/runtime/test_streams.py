"""What is read while it is made, on one rank, when its maker or its control process is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from gfdit.runtime.executor import PeerError
from gfdit.runtime.streams import Streams

OLD, NEW = 7, 1 << 32


def reading(streams: Streams) -> tuple[threading.Thread, list[Exception]]:
    """A thread that waits for a part of ``a``, which dispatch ``OLD`` makes."""
    errors: list[Exception] = []

    def read() -> None:
        try:
            streams.fetch("a", 0)
        except Exception as error:
            errors.append(error)

    streams.begin(OLD + 1, (), {"a": OLD})
    thread = threading.Thread(target=read)
    thread.start()
    return thread, errors


# The storm finds it seldom if a stream outlives its control process: this is what holds it.
@pytest.mark.parametrize("waits_first", [True, False])
def test_who_waits_for_a_stream_hears_that_the_control_process_is_gone(waits_first: bool) -> None:
    streams = Streams(timeout_s=600.0)
    thread: threading.Thread | None = None
    errors: list[Exception] = []
    if waits_first:
        thread, errors = reading(streams)
        until(lambda: streams.any_held)
    streams.abandon(NEW)
    if thread is None:
        thread, errors = reading(streams)
    thread.join()
    assert [(type(error), str(error)) for error in errors] == [
        (PeerError, "a does not come: its control process is gone")
    ]
    streams.end()
    assert not streams.any_held


def test_a_maker_that_goes_on_leaves_nothing_behind() -> None:
    streams = Streams()
    streams.begin(OLD, ("a",), {})
    streams.emit("a", torch.zeros(2))
    streams.abandon(NEW)
    streams.emit("a", torch.zeros(2))
    streams.end()
    assert not streams.any_held
    streams.begin(NEW, ("a",), {})  # made again
    streams.emit("a", torch.zeros(2))
    assert streams.any_held


def until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.001)
