"""The migration lane of a worker: copies and frees. Tasks have a lane of their own, ``compute_lane``.

Each lane runs its commands strictly in the order received, which is what keeps any two ranks agreed on the
order of the collectives they share on that lane. Copies overlap tasks of other requests; a task that needs a
copy, or whose input is being copied away, waits for it first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from gfdit.comm import CommError, GroupFreeComm
from gfdit.comm.cuda_setup import new_stream
from gfdit.core.commands import FreeArtifacts, Migrate, ResetEdges
from gfdit.core.events import EdgesReset, MigrationFinished
from gfdit.migration.staging import Staging
from gfdit.migration.transfer import MigrationError, migrate
from gfdit.runtime import messages as msg
from gfdit.runtime.executor import PeerError, TaskError, TaskExecutor
from gfdit.runtime.made_by import MadeBy
from gfdit.runtime.sockets import Inbox, Reports
from gfdit.runtime.streams import Streams

logger = logging.getLogger("gfdit.worker")


class MigrationLane:
    """Moves and frees artifacts. A transfer that breaks fails on all its ranks, whose edges are reset afterwards.

    Runs in a thread of its own. On a GPU it works on a stream of its own; a copy is done when that stream is done
    with it.
    """

    def __init__(
        self,
        rank: int,
        inbox: Inbox,
        reports: Reports,
        executor: TaskExecutor,
        comm: GroupFreeComm,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
        staging: Staging | None = None,
        streams: Streams | None = None,
    ) -> None:
        """``timeout_s`` bounds every wait for a copy. ``changed``: what those who wait are woken by. ``staging``:
        memory for copies, by default allocated for each."""
        self.rank = rank
        self.made_by = MadeBy()
        self._inbox = inbox
        self._reports = reports
        self._executor = executor
        self._comm = comm
        self._timeout_s = timeout_s
        self._clock = clock
        self._changed = changed or threading.Condition()
        self._staging = staging
        self.streams = streams or Streams(timeout_s, clock, changed)
        self._finished: dict[int, TaskError | None] = {}  # by migration id; None when the copy is done
        self._generation = 0  # the highest of an edge of this lane
        self._reconnected = 0  # the first number of the control process that it last heard of

    def wait_for(self, migrations: Iterable[int]) -> None:
        """Block the compute lane until these copies are done.

        Raises :class:`TaskError` if one failed, :class:`PeerError` if a peer is to blame or one takes too long.
        """
        errors: list[TaskError | None] = []
        with self._changed:
            for migration_id in migrations:
                if not self._wait(partial(self._is_over, migration_id)):
                    raise PeerError(f"migration {migration_id} unfinished after {self._timeout_s:.0f} s")
                if migration_id not in self._finished:
                    raise PeerError(f"migration {migration_id} is of a control process that is gone")
                errors.append(self._finished.pop(migration_id))
        for error in filter(None, errors):
            raise error

    def _is_over(self, migration_id: int) -> bool:
        return migration_id in self._finished or migration_id < self._inbox.first_id

    def await_reconnected(self, first_id: int) -> int:
        """Block the compute lane until this one is through with the last control process, too.

        Returns the highest generation of its edges. Raises :class:`PeerError` if that takes too long.
        """
        with self._changed:
            if not self._wait(lambda: self._reconnected >= first_id):
                raise PeerError(f"the migration lane is stuck for {self._timeout_s:.0f} s")
            return self._generation

    def wake(self) -> None:
        """Have those who wait look again: whom they wait for may be gone."""
        self.streams.abandon(self._inbox.first_id)
        with self._changed:
            self._changed.notify_all()

    def _wait(self, done: Callable[[], bool]) -> bool:
        """With the lock held; False if the time is over."""
        deadline_s = self._clock() + self._timeout_s
        while not done():
            if not self._changed.wait(deadline_s - self._clock()):
                return False
        return True

    def run(self) -> None:
        while (message := self._inbox.get()) is not None:
            match message:
                case Migrate():
                    if message.migration_id >= self._inbox.first_id:
                        self._move(message)
                case FreeArtifacts():
                    if message.before >= self._inbox.first_id:
                        freed = self.made_by.forget(message.artifacts, message.before)
                        self._executor.free(freed)
                        self.streams.forget(freed)
                case ResetEdges():
                    if message.reset_id >= self._inbox.first_id:
                        self._generation = max(self._generation, reset_edges(self._comm, message))
                        self._reports.tell(EdgesReset(message.reset_id, self.rank))
                case msg.Reconnect(first_id):
                    self._inbox.first_id = max(self._inbox.first_id, first_id)  # the watch may hear of it later
                    with self._changed:
                        self._finished.clear()
                        self._reconnected = first_id
                        self._changed.notify_all()
                case msg.Stop():
                    return

    def _move(self, command: Migrate) -> None:
        executor = self._executor
        started_s = self._clock()
        num_bytes, error = 0, None
        try:
            arrived = None
            if command.streamed:
                num_bytes = self.streams.move(self._comm, command)
            else:
                arrived = migrate(
                    self._comm,
                    command,
                    lambda: executor.export_artifact(command.artifact),
                    executor.device,
                    self._staging,
                )
            if arrived is not None:
                if self.made_by.accepts(command.artifact, command.migration_id):
                    executor.import_artifact(command.artifact, arrived.parts, command.view)
                num_bytes = arrived.num_bytes
        except MigrationError as failure:
            # What is not there was lost with an earlier copy.
            error = PeerError(str(failure)) if failure.missing else TaskError(str(failure), culprit=failure.sender)
        except PeerError as failure:
            error = failure
        except CommError as failure:
            self._comm.abort(command.ranks)
            error = PeerError(f"a copy of {command.artifact} broke: {failure}")
        if self.rank in command.target.ranks and not (
            command.keep or command.streamed
        ):  # nobody else has a task that waits for it
            with self._changed:
                self._finished[command.migration_id] = error
                self._changed.notify_all()
        finished_s = self._clock()
        text, seconds = str(error or ""), finished_s - started_s
        self._reports.tell(
            MigrationFinished(
                command.migration_id,
                self.rank,
                seconds,
                num_bytes,
                text,
                isinstance(error, PeerError),
                finished_s,
            )
        )


def reset_edges(comm: GroupFreeComm, command: ResetEdges) -> int:
    """This rank's side of the edges that ``command`` names, on the lane of ``comm``; returns its generation."""
    newest = 0
    for one, other, generation in command.edges:
        if comm.rank in (one, other):
            comm.reset((one, other), generation)
            newest = max(newest, generation)
    return newest


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` and a new stream of it current in this thread; nothing on a CPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.set_device(device)
    return torch.cuda.stream(new_stream(device, urgent=True))
