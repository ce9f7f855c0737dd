"""A worker process: one thread per lane, each reading its own first-in-first-out queue, and a watch."""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from gfdit.runtime import messages as msg
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.host_memory import keep_freed_memory
from gfdit.runtime.sockets import open_socket, push

logger = logging.getLogger("gfdit.worker")


def worker_main(rank: int, config: RuntimeConfig) -> None:
    """Entry point of the process: load the model, say ready, run commands until told to stop."""
    # A terminal or a service manager signals every process; the control process says when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s %(asctime)s [rank{rank}] %(message)s")
    context = zmq.Context()
    events = open_socket(context, zmq.PUSH, config.address("events"))
    try:
        _serve(rank, config, context, events)
    except Exception as error:
        logger.exception("worker %d stops", rank)
        push(events, msg.WorkerFailed(rank, config.incarnation, f"{type(error).__name__}: {error}"))
    finally:
        context.destroy(linger=1000)


def _serve(rank: int, config: RuntimeConfig, context: zmq.Context, events: zmq.Socket) -> None:
    # Imported here: the control process imports this module and needs neither torch nor a model.
    from gfdit.comm import GroupFreeComm, HeapDescriptor, attach_heap
    from gfdit.runtime.compute_lane import ComputeLane
    from gfdit.runtime.lanes import MigrationLane
    from gfdit.runtime.watch import Watch

    heap = attach_heap(HeapDescriptor.from_json(config.heap), rank)
    comm = GroupFreeComm(heap, timeout_s=config.comm_timeout_s)
    comm.warm_up()
    make_executor = _resolve(config.worker)
    executor = make_executor(rank, comm, Path(config.worker_payload_path).read_bytes())
    if executor.device.type == "cpu":
        keep_freed_memory()
    with contextlib.closing(executor):
        migration = MigrationLane(rank, config, context, executor, comm.lane("migration"))
        compute = ComputeLane(rank, config, context, events, executor, comm, migration)
        watch = Watch(rank, config, context, comm.open_lanes())
        migration.start()
        push(events, msg.WorkerReady(rank, config.incarnation))
        watch.start()
        try:
            compute.run()
        finally:
            watch.stop()
        migration.join(timeout=5.0)


def _resolve(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
