"""What arrives at the control process and the engine that is no message."""

from __future__ import annotations

import logging

import pytest
import zmq

from gfdit.runtime import messages as msg
from gfdit.runtime.sockets import open_socket, push, received
from tests.support.waiting import wait_until


def test_what_cannot_be_read_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    context = zmq.Context()
    reader = open_socket(context, zmq.PULL, "inproc://events", bind=True)
    writer = open_socket(context, zmq.PUSH, "inproc://events")
    good = msg.Heartbeat(1, 0)
    deep = b"\x82\xa4type\xa9Heartbeat\xa1z" + b"\x91" * 3000 + b"\xc0"
    for message in (b"", b"\xc1", deep, msg.encode(good)[:-1], msg.encode(msg.Ready()), good):
        push(writer, message)
    decoder = msg.Decoder(msg.WorkerMessage)
    found: list[object] = []

    def good_one_is_there() -> bool:
        found.extend(received(reader, decoder))
        return bool(found)

    with caplog.at_level(logging.ERROR, "gfdit.runtime"):
        wait_until(good_one_is_there, "what can be read")
    assert found == [good]
    assert len(caplog.messages) == 5 and all("bytes are no message" in one for one in caplog.messages)
    context.destroy(linger=0)
