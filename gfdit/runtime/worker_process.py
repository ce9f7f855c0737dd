"""A worker process: one thread per lane, each reading its own first-in-first-out queue, and a watch."""

from __future__ import annotations

import contextlib
import importlib
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from gfdit.observe.logs import log_as_vllm
from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.guard import ErrorHandler, guarded, start_guarded
from gfdit.runtime.host_memory import keep_freed_memory
from gfdit.runtime.sockets import WorkerInbox, WorkerReports, end_with_server


def worker_main(rank: int, config: RuntimeConfig) -> None:
    """Entry point of the process: load the model, say ready, run commands until told to stop."""
    # A terminal or a service manager signals every process; the control process says when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_as_vllm(config.logging, f"gfdit-rank{rank}")
    context = zmq.Context()
    reports = WorkerReports(context, config)

    def fail(error: BaseException) -> None:
        """The control process has this one replaced."""
        reports.tell(msg.WorkerFailed(rank, config.incarnation, f"{type(error).__name__}: {error}"))

    start_guarded(partial(end_with_server, config.lease_path), name="gfdit-lease", on_error=fail)
    with guarded(f"worker {rank}", fail):
        _serve(rank, config, context, reports, fail)
    context.destroy(linger=1000)


def _serve(
    rank: int, config: RuntimeConfig, context: zmq.Context, reports: WorkerReports, fail: ErrorHandler
) -> None:
    # Imported here: the control process imports this module and needs neither torch nor a model.
    from gfdit.comm import GroupFreeComm, HeapDescriptor, attach_heap
    from gfdit.migration.staging import STAGING_BYTES, Staging
    from gfdit.runtime.claims import Claims
    from gfdit.runtime.completion import make_monitor
    from gfdit.runtime.compute_lane import ComputeLane
    from gfdit.runtime.deliveries import DeliveryThread
    from gfdit.runtime.migration_lane import MigrationLane, own_stream
    from gfdit.runtime.watch import Watch

    heap = attach_heap(HeapDescriptor.from_json(config.heap), rank)
    comm = GroupFreeComm(heap, timeout_s=config.comm_timeout_s)
    comm.warm_up()
    # Before the model is loaded: if there is not as much memory, that is the time to say so.
    staging = Staging(comm.device, STAGING_BYTES if comm.device.type == "cuda" else 0)
    if comm.device.type == "cpu":
        keep_freed_memory()  # before there are threads
    make_executor = _resolve(config.worker)
    log_as_vllm(config.logging, f"gfdit-rank{rank}")  # once more: vLLM, if that is what was imported, has done it
    executor = make_executor(rank, comm, Path(config.worker_payload_path).read_bytes())
    with contextlib.closing(executor):
        to_migrate = WorkerInbox(context, config, "migration", rank, msg.MigrationMessage)
        to_compute = WorkerInbox(context, config, "compute", rank, msg.ComputeMessage)
        to_watch = WorkerInbox(context, config, "watch", rank, msg.WatchMessage)
        copies = comm.lane("migration")
        migration = MigrationLane(
            rank, to_migrate, reports, executor, copies, config.comm_timeout_s, staging=staging
        )
        compute = ComputeLane(
            rank,
            config.incarnation,
            to_compute,
            reports,
            executor,
            comm,
            migration,
            Claims(config.claims_dir),
            make_monitor(executor.device, fail),
            # On a CPU the rank would compete with it for the same cores.
            DeliveryThread(partial(own_stream, executor.device), fail) if executor.device.type == "cuda" else None,
        )
        beat, interval_s = msg.Heartbeat(rank, config.incarnation), config.heartbeat_timeout_s / 10
        lanes = (to_compute, to_migrate)
        watch = Watch(beat, interval_s, to_watch, reports, comm.open_lanes(), lanes, migration.wake)

        def migrate() -> None:
            with own_stream(executor.device):
                migration.run()

        migrating = start_guarded(migrate, name="gfdit-migration", on_error=fail)
        reports.tell(msg.WorkerReady(rank, config.incarnation))
        watching = start_guarded(watch.run, name="gfdit-watch", on_error=fail)
        try:
            compute.run()
        finally:
            watch.stop()
            watching.join()
        migrating.join(timeout=5.0)


def _resolve(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
