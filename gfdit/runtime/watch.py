"""A worker's third thread: says that the process lives, and hears what cannot wait for a lane."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence

import zmq

from gfdit.comm import GroupFreeComm
from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.sockets import open_socket, push, received

# What an orphan has to end by itself.
_ORPHAN_GRACE_S = 5.0


class Watch(threading.Thread):
    """A lane may sit in a collective with a peer that is gone: this thread wakes it out of there."""

    def __init__(
        self, rank: int, config: RuntimeConfig, context: zmq.Context, comms: Sequence[GroupFreeComm]
    ) -> None:
        super().__init__(name="gfdit-watch", daemon=True)
        self._beat = msg.Heartbeat(rank, config.incarnation)
        self._interval_s = config.heartbeat_timeout_s / 10
        self._comms = comms
        self._commands = open_socket(context, zmq.PULL, config.rank_address("watch", rank))
        self._events = open_socket(context, zmq.PUSH, config.address("events"))
        self._decode = msg.decoder(msg.PeerLost)
        self._stopping = threading.Event()

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        poller = zmq.Poller()
        poller.register(self._commands, zmq.POLLIN)
        poller.register(parent.sentinel, zmq.POLLIN)
        while not self._stopping.is_set():
            push(self._events, self._beat)
            ready = dict(poller.poll(round(self._interval_s * 1000)))
            if parent.sentinel in ready:
                self._end_orphan()
            for message in received(self._commands, self._decode):
                self._abort((message.rank,))

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def _abort(self, ranks: Sequence[int]) -> None:
        for comm in self._comms:
            comm.abort(ranks)

    def _end_orphan(self) -> None:
        """The control process is gone: the lanes end once they are out of their collectives."""
        self._abort(range(self._comms[0].world_size))
        time.sleep(_ORPHAN_GRACE_S)
        os._exit(1)
