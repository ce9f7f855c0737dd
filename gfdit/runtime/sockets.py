"""Socket helpers shared by the processes of the runtime."""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import Any

import msgspec
import zmq

from gfdit.runtime import messages as msg

# Far more than can be in flight to a peer that works: a few for every request that is alive.
MAX_MESSAGES = 100_000


def open_socket(context: zmq.Context, kind: int, address: str, *, bind: bool = False) -> zmq.Socket:
    """A socket that holds at most ``MAX_MESSAGES`` for a peer that does not take them."""
    socket = context.socket(kind)
    socket.set_hwm(MAX_MESSAGES)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def push(socket: zmq.Socket, message: msg.Message | bytes) -> None:
    """Send without ever waiting. Only a peer that has died or hung takes nothing.

    That is noticed by whoever watches the process, not here.
    """
    with contextlib.suppress(zmq.Again):
        socket.send(message if isinstance(message, bytes) else msg.encode(message), zmq.NOBLOCK)


def received(socket: zmq.Socket, decoder: msgspec.msgpack.Decoder) -> list[Any]:
    """Every message that has arrived, without waiting."""
    messages = []
    while True:
        try:
            messages.append(decoder.decode(socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages


def wait_for_command(socket: zmq.Socket) -> bytes | None:
    """A worker's next command, or None once the control process is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(parent.sentinel, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if socket in ready:
            return socket.recv()
        if parent.sentinel in ready:
            return None
