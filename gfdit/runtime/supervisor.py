"""Starts, watches, restarts and stops the worker processes."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import msgspec

from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.worker_process import worker_main


class WorkerDiedError(RuntimeError):
    """A worker process ended or failed, and the runtime cannot go on; the message names the rank."""


@dataclass(slots=True)
class Worker:
    """One process of a rank. ``heard_s`` is when it was last heard of; ``ready`` once it has loaded its model."""

    process: BaseProcess
    heard_s: float
    ready: bool = False


class Supervisor:
    """One process per rank; its first one is incarnation 0, each that replaces it has the next number.

    With ``start_method="forkserver"`` the modules in ``preload`` are imported once and inherited by every
    worker, which makes starting four workers on a small machine several times faster. A CUDA machine uses
    ``spawn``: a driver initialized by an import would not survive the fork.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.workers: dict[int, Worker] = {}
        self._incarnations = [0] * config.num_ranks
        self._failures = [0] * config.num_ranks  # in a row, to become ready
        self._checked_s = time.monotonic()

    @property
    def sentinels(self) -> dict[int, int]:
        """Ranks by the file descriptor that becomes readable when their worker ends."""
        return {worker.process.sentinel: rank for rank, worker in self.workers.items()}

    def config_of(self, rank: int) -> RuntimeConfig:
        """For the next process of ``rank``."""
        return msgspec.structs.replace(self.config, incarnation=self._incarnations[rank])

    def start(self, rank: int) -> None:
        context = multiprocessing.get_context(self.config.start_method)
        if self.config.start_method == "forkserver":
            context.set_forkserver_preload(self.config.preload)
        process = context.Process(  # type: ignore[attr-defined]
            target=worker_main, args=(rank, self.config_of(rank)), name=f"gfdit-rank{rank}", daemon=True
        )
        process.start()
        self.workers[rank] = Worker(process, time.monotonic())

    def may_restart(self, rank: int) -> bool:
        """Not for ever if it never becomes ready, and not where its peers cannot attach to it again."""
        return self.config.restart_workers and self._failures[rank] < self.config.max_restarts

    def remove(self, rank: int) -> None:
        """Kill what is left of a worker; the next one gets another number."""
        worker = self.workers.pop(rank)
        worker.process.kill()  # also one that is stopped
        worker.process.join()
        self._incarnations[rank] += 1
        self._failures[rank] = 0 if worker.ready else self._failures[rank] + 1

    def hear(self, rank: int, incarnation: int, *, ready: bool = False) -> bool:
        """False if that comes from a process that was replaced or given up since."""
        if incarnation != self._incarnations[rank] or rank not in self.workers:
            return False
        worker = self.workers[rank]
        worker.heard_s = time.monotonic()
        worker.ready |= ready
        return True

    def ended(self) -> dict[int, str]:
        """Ranks whose process has ended, and how."""
        return {
            rank: f"its worker ended with exit code {worker.process.exitcode}"
            for rank, worker in self.workers.items()
            if not worker.process.is_alive()
        }

    def silent(self) -> dict[int, str]:
        """Ranks that were not heard of for too long, and how long. To be called again and again.

        Who was stopped himself has heard nobody, and begins to listen anew.
        """
        now_s, timeout_s = time.monotonic(), self.config.heartbeat_timeout_s
        slept = now_s - self._checked_s > timeout_s / 2
        self._checked_s = now_s
        found = {}
        for rank, worker in self.workers.items():
            if slept and worker.ready:
                worker.heard_s = now_s
            limit_s = timeout_s if worker.ready else self.config.start_timeout_s
            if now_s - worker.heard_s > limit_s:
                what = "no heartbeat for" if worker.ready else "not ready after"
                found[rank] = f"{what} {limit_s:g} s"
        return found

    def stop(self, grace_s: float) -> None:
        """Let workers end by themselves for ``grace_s`` seconds (they have been told to), then kill them.

        Who still loads its model does not hear that, and has nothing to end.
        """
        for worker in self.workers.values():
            if not worker.ready:
                worker.process.kill()
        deadline_s = time.monotonic() + grace_s
        for worker in self.workers.values():
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
        for worker in self.workers.values():
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
