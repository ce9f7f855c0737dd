"""The queues to each rank: one per lane, and one for what cannot wait for a lane."""

from __future__ import annotations

from typing import Literal

import zmq

from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.sockets import open_socket, push

Queue = Literal["compute", "migration", "watch"]
_CONNECT_TIMEOUT_MS = 5000
QUEUES: tuple[Queue, ...] = ("compute", "migration", "watch")


class RankQueues:
    """First in, first out. A process that replaces another has queues of its own: nothing old reaches it."""

    def __init__(self, context: zmq.Context, config: RuntimeConfig) -> None:
        self._context = context
        self._sockets: dict[tuple[Queue, int], zmq.Socket] = {}
        for rank in range(config.num_ranks):
            self.renew(rank, config)

    def renew(self, rank: int, config: RuntimeConfig) -> None:
        """Drop what ``rank`` has not taken, and bind the addresses that ``config`` gives its next process."""
        for queue in QUEUES:
            if (old := self._sockets.pop((queue, rank), None)) is not None:
                old.close(linger=0)
            address = config.rank_address(queue, rank)
            self._sockets[queue, rank] = open_socket(self._context, zmq.PUSH, address, bind=True)

    def await_connected(self, rank: int) -> None:
        """A process may say that it is ready before its queues are connected, and what is sent then is lost.

        It is a matter of moments; raises ``TimeoutError`` if it is not.
        """
        for queue in QUEUES:
            if not self._sockets[queue, rank].poll(_CONNECT_TIMEOUT_MS, zmq.POLLOUT):
                raise TimeoutError(f"the {queue} queue of rank {rank} is not connected")

    def send(self, queue: Queue, rank: int, message: msg.Message | bytes) -> None:
        push(self._sockets[queue, rank], message)

    def stop(self) -> None:
        for (queue, _), socket in self._sockets.items():
            if queue != "watch":
                push(socket, msg.Stop())
