"""A worker process: one thread per lane, each reading its own first-in-first-out queue, and a watch."""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.host_memory import keep_freed_memory
from gfdit.runtime.sockets import WorkerInbox, WorkerReports

logger = logging.getLogger("gfdit.worker")


def worker_main(rank: int, config: RuntimeConfig) -> None:
    """Entry point of the process: load the model, say ready, run commands until told to stop."""
    # A terminal or a service manager signals every process; the control process says when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s %(asctime)s [rank{rank}] %(message)s")
    context = zmq.Context()
    reports = WorkerReports(context, config)
    try:
        _serve(rank, config, context, reports)
    except Exception as error:
        logger.exception("worker %d stops", rank)
        reports.tell(msg.WorkerFailed(rank, config.incarnation, f"{type(error).__name__}: {error}"))
    finally:
        context.destroy(linger=1000)


def _serve(rank: int, config: RuntimeConfig, context: zmq.Context, reports: WorkerReports) -> None:
    # Imported here: the control process imports this module and needs neither torch nor a model.
    from gfdit.comm import GroupFreeComm, HeapDescriptor, attach_heap
    from gfdit.runtime.claims import Claims
    from gfdit.runtime.completion import make_monitor
    from gfdit.runtime.compute_lane import ComputeLane
    from gfdit.runtime.migration_lane import MigrationLane, own_stream
    from gfdit.runtime.watch import Watch

    heap = attach_heap(HeapDescriptor.from_json(config.heap), rank)
    comm = GroupFreeComm(heap, timeout_s=config.comm_timeout_s)
    comm.warm_up()
    make_executor = _resolve(config.worker)
    executor = make_executor(rank, comm, Path(config.worker_payload_path).read_bytes())
    if executor.device.type == "cpu":
        keep_freed_memory()
    with contextlib.closing(executor):
        to_migrate = WorkerInbox(context, config, "migration", rank, msg.MigrationMessage)
        to_compute = WorkerInbox(context, config, "compute", rank, msg.ComputeMessage)
        to_watch = WorkerInbox(context, config, "watch", rank, msg.WatchMessage)
        copies = comm.lane("migration")
        migration = MigrationLane(rank, to_migrate, reports, executor, copies, config.comm_timeout_s)
        compute = ComputeLane(
            rank,
            config.incarnation,
            to_compute,
            reports,
            executor,
            comm,
            migration,
            Claims(config.claims_dir),
            make_monitor(executor.device),
        )
        beat, interval_s = msg.Heartbeat(rank, config.incarnation), config.heartbeat_timeout_s / 10
        lanes = (to_compute, to_migrate)
        watch = Watch(beat, interval_s, to_watch, reports, comm.open_lanes(), lanes, migration.wake)

        def migrate() -> None:
            try:
                with own_stream(executor.device):
                    migration.run()
            except Exception as error:
                logger.exception("rank %d: the migration lane is broken", rank)
                reports.tell(msg.WorkerFailed(rank, config.incarnation, f"migration lane: {error}"))

        migrating = threading.Thread(target=migrate, name="gfdit-migration", daemon=True)
        migrating.start()
        reports.tell(msg.WorkerReady(rank, config.incarnation))
        watch.start()
        try:
            compute.run()
        finally:
            watch.stop()
        migrating.join(timeout=5.0)


def _resolve(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
