"""Starts, watches and stops the worker processes."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.process import BaseProcess

from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.worker_process import worker_main


class WorkerDiedError(RuntimeError):
    """A worker process ended or failed; the message names the rank."""


class Supervisor:
    """One process per rank.

    With ``start_method="forkserver"`` the modules in ``preload`` are imported once and inherited by every
    worker, which makes starting four workers on a small machine several times faster. A CUDA machine uses
    ``spawn``: a driver initialized by an import would not survive the fork.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._processes: list[BaseProcess] = []

    @property
    def sentinels(self) -> list[int]:
        """File descriptors that become readable when a worker ends."""
        return [process.sentinel for process in self._processes]

    def start(self) -> None:
        context = multiprocessing.get_context(self.config.start_method)
        if self.config.start_method == "forkserver":
            context.set_forkserver_preload(self.config.preload)
        for rank in range(self.config.num_ranks):
            process = context.Process(  # type: ignore[attr-defined]
                target=worker_main, args=(rank, self.config), name=f"gfdit-rank{rank}", daemon=True
            )
            process.start()
            self._processes.append(process)

    def raise_for_dead(self) -> None:
        """Raise :class:`WorkerDiedError` naming the ranks that have ended."""
        dead = [(rank, process.exitcode) for rank, process in enumerate(self._processes) if not process.is_alive()]
        if dead:
            raise WorkerDiedError("; ".join(f"worker {rank} ended with exit code {code}" for rank, code in dead))

    def stop(self, grace_s: float) -> None:
        """Let workers end by themselves for ``grace_s`` seconds (they have been told to), then kill them."""
        deadline_s = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
