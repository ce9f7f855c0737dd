"""The lanes of a worker, and that for artifact copies; the one for tasks is :mod:`gfdit.runtime.compute_lane`.

Each lane runs its commands strictly in the order received, which is what keeps any two ranks agreed on the
order of the collectives they share on that lane. Copies overlap tasks of other requests; a task that needs a
copy, or whose input is being copied away, waits for it first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable

import torch
import zmq

from gfdit.comm import CommError, GroupFreeComm
from gfdit.core.commands import Migrate, ResetEdges
from gfdit.migration.transfer import MigrationError, migrate
from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.executor import PeerError, TaskError, TaskExecutor
from gfdit.runtime.made_by import MadeBy
from gfdit.runtime.sockets import open_socket, push, wait_for_command

logger = logging.getLogger("gfdit.worker")


class MigrationLane(threading.Thread):
    """Moves and frees artifacts. A transfer that breaks fails on all its ranks, whose edges are reset afterwards.

    On a GPU it works on a stream of its own; a copy is done when that stream is done with it.
    """

    def __init__(
        self,
        rank: int,
        config: RuntimeConfig,
        context: zmq.Context,
        executor: TaskExecutor,
        comm: GroupFreeComm,
    ) -> None:
        super().__init__(name="gfdit-migration", daemon=True)
        self.rank = rank
        self.timeout_s = config.comm_timeout_s
        self._incarnation = config.incarnation
        self._executor = executor
        self._comm = comm
        self._commands = open_socket(context, zmq.PULL, config.rank_address("migration", rank))
        self._events = open_socket(context, zmq.PUSH, config.address("events"))
        self._decode = msg.decoder(msg.MigrationMessage)
        self._changed = threading.Condition()
        self._finished: dict[int, TaskError | None] = {}  # by migration id; None when the copy is done
        self.made_by = MadeBy()

    def wait_for(self, migrations: Iterable[int]) -> None:
        """Block the compute lane until these copies are done.

        Raises :class:`TaskError` if one failed, :class:`PeerError` if a peer is to blame or one takes too long.
        """
        deadline_s = time.monotonic() + self.timeout_s
        errors: list[TaskError | None] = []
        with self._changed:
            for migration_id in migrations:
                while migration_id not in self._finished:
                    if not self._changed.wait(deadline_s - time.monotonic()):
                        raise PeerError(f"migration {migration_id} unfinished after {self.timeout_s:.0f} s")
                errors.append(self._finished.pop(migration_id))
        for error in filter(None, errors):
            raise error

    def run(self) -> None:
        with own_stream(self._executor.device):
            self._serve()

    def _serve(self) -> None:
        try:
            while (data := wait_for_command(self._commands)) is not None:
                match self._decode.decode(data):
                    case msg.Move(command):
                        self._move(command)
                    case msg.Free(command):
                        self._executor.free(self.made_by.forget(command.artifacts, command.before))
                    case msg.Reset(command):
                        reset_edges(self._comm, command)
                        push(self._events, msg.ResetDone(command.reset_id, self.rank))
                    case msg.Stop():
                        return
        except Exception as error:
            logger.exception("rank %d: the migration lane is broken", self.rank)
            push(self._events, msg.WorkerFailed(self.rank, self._incarnation, f"migration lane: {error}"))

    def _move(self, command: Migrate) -> None:
        executor = self._executor
        started_s = time.monotonic()
        num_bytes, error = 0, None
        try:
            arrived = migrate(
                self._comm, command, lambda: executor.export_artifact(command.artifact), executor.device
            )
            if arrived is not None:
                if self.made_by.accepts(command.artifact, command.migration_id):
                    executor.import_artifact(command.artifact, arrived.parts, command.view)
                num_bytes = arrived.num_bytes
        except MigrationError as failure:
            # What is not there was lost with an earlier copy.
            error = PeerError(str(failure)) if failure.missing else TaskError(str(failure))
        except CommError as failure:
            self._comm.abort(command.ranks)
            error = PeerError(f"a copy of {command.artifact} broke: {failure}")
        finished_s = time.monotonic()
        text, caused_by_peer = str(error or ""), isinstance(error, PeerError)
        done = msg.MoveDone(
            command.migration_id, self.rank, num_bytes, started_s, finished_s, text, caused_by_peer
        )
        if self.rank in command.target.ranks and not command.keep:  # nobody else has a task that waits for it
            with self._changed:
                self._finished[command.migration_id] = error
                self._changed.notify_all()
        push(self._events, done)


def reset_edges(comm: GroupFreeComm, command: ResetEdges) -> None:
    """This rank's side of the edges that ``command`` names, on the lane of ``comm``."""
    for one, other, generation in command.edges:
        if comm.rank in (one, other):
            comm.reset((one, other), generation)


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` and a new stream of it current in this thread; nothing on a CPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))
