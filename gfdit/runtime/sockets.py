"""Socket helpers shared by the processes of the runtime."""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import Any

import msgspec
import zmq

from gfdit.runtime import messages as msg


def open_socket(context: zmq.Context, kind: int, address: str, *, bind: bool = False) -> zmq.Socket:
    """A socket without a high-water mark: what is in flight is bounded by the tasks in flight."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def push(socket: zmq.Socket, message: msg.Message | bytes) -> None:
    """Send without ever waiting. With no high-water mark only a peer that has died takes nothing.

    Its end is noticed by whoever watches the process, not here.
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
