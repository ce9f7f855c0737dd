"""Settings of the control process and its workers; written once by the engine, read by both."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from gfdit.core.components import Component


def make_run_dir(prefix: str = "gfdit-") -> Path:
    """A new folder for what the processes share; in memory where possible, since tasks wait for what is in it."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix=prefix, dir=memory if os.access(memory, os.W_OK) else None))


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``run_dir`` holds the sockets. ``model`` is on all ranks; of workflows ``components`` are. ``worker`` is
    ``module:function``, called in each worker process as ``function(rank, comm, payload) -> TaskExecutor``
    with the bytes of ``worker_payload_path``. A worker that ends, is silent for ``heartbeat_timeout_s`` or is
    stuck in a task (for ``task_timeout_s``, see :mod:`gfdit.runtime.time_limits`) is replaced if
    ``restart_workers``, but not after ``max_restarts`` in a row that never became ready. ``incarnation``
    counts the processes of a worker's rank, ``epoch`` those that have been the control process: one that ends,
    or is silent for ``control_timeout_s`` and as long as a policy may think, is replaced, but not after
    ``max_control_restarts`` in a row. ``without_policy``: it has hung, and is done without. Ranks in ``drained``
    are given nothing, but stay. ``traces``: the engine is told what traces are made of. ``logging`` is how every
    process logs (:mod:`gfdit.observe.logs`).
    """

    run_dir: str
    num_ranks: int
    model: str
    components: list[Component] = []
    component_bytes: int | None = None
    policy: str
    policy_args: dict[str, str] = {}
    admission: str = "none"
    costs_path: str | None = None
    timeline_path: str | None = None
    record_path: str | None = None
    traces: bool = False
    logging: dict[str, Any] = {}
    worker: str
    worker_payload_path: str
    start_method: str = "spawn"
    preload: list[str] = []
    heap: str = ""
    run_ahead: int = 1
    max_artifact_bytes: int | None = None
    device_memory_bytes: int | None = None
    max_retries: int = 3
    checkpoint_every_steps: int = 0
    max_queue_s: float | None = None
    drained: tuple[int, ...] = ()
    skips_steps: bool = False
    restart_workers: bool = True
    max_restarts: int = 3
    heartbeat_timeout_s: float = 10.0
    task_timeout_s: float = 60.0
    incarnation: int = 0
    epoch: int = 0
    policy_timeout_s: float = 2.0
    without_policy: bool = False
    control_timeout_s: float = 5.0
    max_control_restarts: int = 3
    comm_timeout_s: float = 60.0
    start_timeout_s: float = 600.0

    @property
    def claims_dir(self) -> str:
        """Where the ranks agree on which queued tasks run."""
        return str(Path(self.run_dir) / "claims")

    @property
    def policy_mark_path(self) -> Path:
        """See :class:`~gfdit.runtime.policy_guard.GuardedPolicy`."""
        return Path(self.run_dir) / "thinking"

    @property
    def lease_path(self) -> Path:
        """Of the pipe by whose end every process learns that the server has ended."""
        return Path(self.run_dir) / "lease"

    @property
    def first_id(self) -> int:
        """Numbers of dispatches, copies and resets begin here: above all those of the control process before."""
        return self.epoch << 32

    @property
    def engine_address(self) -> str:
        return self.address(f"engine{self.epoch}")

    def address(self, name: str) -> str:
        """ZeroMQ address of a socket: ``results``, ``events``, ..."""
        return f"ipc://{Path(self.run_dir) / name}"

    def rank_address(self, queue: str, rank: int) -> str:
        """Of the queue to a rank's process; one that replaces it has another."""
        return self.address(f"{queue}{rank}.{self.incarnation}")


CHANGEABLE = (
    "policy",
    "policy_args",
    "admission",
    "without_policy",
    "costs_path",
    "timeline_path",
    "record_path",
    "max_retries",
    "checkpoint_every_steps",
    "max_queue_s",
    "drained",
)
"""What may change while a server runs."""
