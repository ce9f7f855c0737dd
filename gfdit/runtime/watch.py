"""A worker's third thread: says that the process lives, and hears what cannot wait for a lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from gfdit.comm import GroupFreeComm
from gfdit.runtime import messages as msg
from gfdit.runtime.sockets import Inbox, Reports, WorkerInbox


class Watch:
    """A lane may sit in a collective with a peer that is gone: this thread wakes it out of there."""

    def __init__(
        self,
        beat: msg.Heartbeat,
        interval_s: float,
        inbox: WorkerInbox,
        reports: Reports,
        comms: Sequence[GroupFreeComm],
        lanes: Sequence[Inbox],
        wake: Callable[[], None],
    ) -> None:
        """``beat`` is said every ``interval_s``. ``wake``: have a lane that waits for the other one look again."""
        self._beat = beat
        self._interval_s = interval_s
        self._inbox = inbox
        self._reports = reports
        self._comms = comms
        self._lanes = lanes
        self._wake = wake
        self._stopping = threading.Event()

    def run(self) -> None:
        while not (self._stopping.is_set() or self._inbox.ended):
            self._reports.tell(self._beat)
            message = self._inbox.get(self._interval_s)
            if message is not None:
                self.handle(message)
        if self._inbox.ended:  # the lanes end once they are out of their collectives
            self._abort(range(self._comms[0].world_size))

    def handle(self, message: msg.WatchMessage) -> None:
        match message:
            case msg.PeerLost(rank, generations):
                for comm in self._comms:
                    for name, newest in generations.items():
                        if name == comm.lane_name:
                            comm.abort((rank,), newest)
            case msg.Reconnect(first_id):
                for lane in self._lanes:
                    lane.first_id = first_id
                self._abort(range(self._comms[0].world_size))
                self._wake()

    def stop(self) -> None:
        """From another thread: return from :meth:`run` soon."""
        self._stopping.set()

    def _abort(self, ranks: Sequence[int]) -> None:
        for comm in self._comms:
            comm.abort(ranks)
