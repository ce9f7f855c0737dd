"""Starts, watches, restarts and stops the worker processes.

They outlive the control process that has started them: the one in its place finds them by what is written in the
run folder, and adopts them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import msgspec

from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.guard import start_guarded
from gfdit.runtime.worker_process import worker_main

BACK_OFF_S = 1.0
"""Before the second start in a row that came to nothing; twice as long before every further one."""
LONGEST_BACK_OFF_S = 60.0
LASTING_S = 60.0
"""A worker that was ready for as long has come to something, even if there was nothing to do."""


class WorkerDiedError(RuntimeError):
    """A worker process ended or failed, and the runtime cannot go on; the message names the rank."""


class Process(Protocol):
    """A worker process. ``sentinel`` is a file descriptor that becomes readable when it has ended."""

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class AdoptedProcess:
    """One that was started by another control process. Raises ``ProcessLookupError`` if it has ended already."""

    exitcode = None  # only a parent is told

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sentinel = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        return not self._poll(0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        self._poll(timeout)

    def _poll(self, timeout_s: float | None) -> bool:
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


class StartingProcess:
    """A worker process that is being started on a thread of its own.

    The first one of a control process waits until everything that workers share is imported: for many seconds, in
    which the control process has other things to do. Nobody hears of the worker before it is there.
    """

    def __init__(self, start: Callable[[], BaseProcess]) -> None:
        self._process: BaseProcess | None = None
        self._error: BaseException | None = None
        self._started = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = start_guarded(lambda: self._run(start), name="gfdit-start", on_error=self._fail)

    def _run(self, start: Callable[[], BaseProcess]) -> None:
        self._process = start()
        os.eventfd_write(self._started, 1)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        os.eventfd_write(self._started, 1)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def sentinel(self) -> int:
        return self._started if self._process is None else self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        return None if self._process is None else self._process.exitcode

    def is_alive(self) -> bool:
        return self._error is None and (self._process is None or self._process.is_alive())

    def kill(self) -> None:
        """One that is not there yet as soon as it is."""
        if self._process is not None:
            self._process.kill()
        elif self._error is None:
            threading.Thread(target=self._kill_later, daemon=True).start()

    def _kill_later(self) -> None:
        self._thread.join()
        if self._process is not None:
            self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        if self._process is not None:
            self._process.join(timeout)
            if self._started >= 0 and not self._process.is_alive():
                os.close(self._started)
                self._started = -1


class ProcessStarter:
    """How processes are made, and found again.

    With ``start_method="forkserver"`` the modules in ``preload`` are imported once and inherited by every
    worker, which makes starting four workers on a small machine several times faster. A CUDA machine uses
    ``spawn``: a driver initialized by an import would not survive the fork.
    """

    def start(self, rank: int, config: RuntimeConfig) -> Process:
        context = multiprocessing.get_context(config.start_method)
        if config.start_method == "forkserver":
            context.set_forkserver_preload(config.preload)
        process = context.Process(  # type: ignore[attr-defined]
            target=worker_main, args=(rank, config), name=f"gfdit-rank{rank}", daemon=True
        )

        def start() -> BaseProcess:
            process.start()
            file = _record_of(config, rank)
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{config.incarnation} {process.pid}")
            return process

        return StartingProcess(start)

    def find(self, rank: int, config: RuntimeConfig) -> tuple[int, Process | None]:
        """The incarnation of the last process of ``rank``, and that process if it is alive."""
        try:
            incarnation, pid = map(int, _record_of(config, rank).read_text().split())
        except (FileNotFoundError, ValueError):
            return 0, None
        try:
            return incarnation, AdoptedProcess(pid)
        except ProcessLookupError:
            return incarnation, None


def _record_of(config: RuntimeConfig, rank: int) -> Path:
    return Path(config.run_dir) / "workers" / str(rank)


@dataclass(slots=True)
class Worker:
    """One process of a rank. ``heard_s`` is when it was last heard of, ``ready_s`` when it had loaded its model.

    ``worked``: it has done a task.
    """

    process: Process
    heard_s: float
    ready_s: float | None = None
    worked: bool = False

    @property
    def ready(self) -> bool:
        return self.ready_s is not None


@dataclass(slots=True)
class _Rank:
    """``num_failures``: processes in a row that came to nothing: they neither did a task nor lasted for long.

    ``start_s`` is when the next start is due, if one is.
    """

    incarnation: int = 0
    num_failures: int = 0
    start_s: float | None = None


class Supervisor:
    """One process per rank; its first one is incarnation 0, each that replaces it has the next number."""

    def __init__(
        self,
        config: RuntimeConfig,
        clock: Callable[[], float] = time.monotonic,
        starter: ProcessStarter | None = None,
    ) -> None:
        self.config = config
        self.workers: dict[int, Worker] = {}
        self._clock = clock
        self._starter = starter or ProcessStarter()
        self._ranks = [_Rank() for _ in range(config.num_ranks)]
        self._checked_s = clock()

    @property
    def sentinels(self) -> list[int]:
        return [worker.process.sentinel for worker in self.workers.values()]

    def config_of(self, rank: int) -> RuntimeConfig:
        """For the process of ``rank`` that is there, or the next one."""
        return msgspec.structs.replace(self.config, incarnation=self._ranks[rank].incarnation)

    # Starting

    def start(self, rank: int) -> None:
        self._ranks[rank].start_s = None
        process = self._starter.start(rank, self.config_of(rank))
        self.workers[rank] = Worker(process, self._clock())

    def adopt(self, rank: int) -> bool:
        """Take over the process that another control process has started; False if it is gone."""
        self._ranks[rank].incarnation, process = self._starter.find(rank, self.config)
        if process is None:
            self._ranks[rank].incarnation += 1
            return False
        self.workers[rank] = Worker(process, self._clock(), self._clock(), worked=True)
        return True

    def plan_start(self, rank: int) -> bool:
        """Have :meth:`due` name a lost rank when it may be started again; False if it is given up.

        Not for ever if it comes to nothing, and not where its peers cannot attach to it again.
        """
        state = self._ranks[rank]
        if not self.config.restart_workers or state.num_failures > self.config.max_restarts:
            return False
        waits_s = 0.0
        if state.num_failures > 1:
            waits_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2.0 ** (state.num_failures - 2))
        state.start_s = self._clock() + waits_s
        return True

    def due(self) -> list[int]:
        """Ranks to start now."""
        now_s = self._clock()
        return [
            rank for rank, state in enumerate(self._ranks) if state.start_s is not None and state.start_s <= now_s
        ]

    @property
    def next_start_s(self) -> float | None:
        return min([state.start_s for state in self._ranks if state.start_s is not None], default=None)

    @property
    def any_to_come(self) -> bool:
        """Whether a rank is there, or will be."""
        return bool(self.workers) or self.next_start_s is not None

    @property
    def restarts(self) -> list[int]:
        """By rank, how often its process was started again since the server was."""
        return [
            state.incarnation if rank in self.workers else max(0, state.incarnation - 1)
            for rank, state in enumerate(self._ranks)
        ]

    def is_gone(self, rank: int) -> bool:
        """Lost, and not to be started again."""
        return rank not in self.workers and self._ranks[rank].start_s is None

    def give_up(self, rank: int) -> None:
        """Never start ``rank`` again."""
        self._ranks[rank].start_s, self._ranks[rank].num_failures = None, self.config.max_restarts + 1

    # Watching

    def hear(self, rank: int, incarnation: int, *, ready: bool = False) -> bool:
        """False if that comes from a process that was replaced or given up since."""
        if incarnation != self._ranks[rank].incarnation or rank not in self.workers:
            return False
        worker = self.workers[rank]
        worker.heard_s = self._clock()
        if ready and not worker.ready:
            worker.ready_s = worker.heard_s
        return True

    def worked(self, rank: int) -> None:
        """``rank`` has done a task."""
        if rank in self.workers:
            self.workers[rank].worked = True

    def ended(self) -> dict[int, str]:
        """Ranks whose process has ended, and how."""
        return {
            rank: "its worker ended"
            + ("" if worker.process.exitcode is None else f" with exit code {worker.process.exitcode}")
            for rank, worker in self.workers.items()
            if not worker.process.is_alive()
        }

    def silent(self) -> dict[int, str]:
        """Ranks that were not heard of for too long, and how long. To be called again and again.

        Who was stopped himself has heard nobody, and begins to listen anew.
        """
        now_s, timeout_s = self._clock(), self.config.heartbeat_timeout_s
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

    # Ending

    def remove(self, rank: int) -> None:
        """Kill what is left of a worker; the next one gets another number."""
        worker = self.workers.pop(rank)
        worker.process.kill()  # also one that is stopped
        worker.process.join(JOIN_S)
        state = self._ranks[rank]
        state.incarnation += 1
        lasted = worker.ready_s is not None and self._clock() - worker.ready_s > LASTING_S
        state.num_failures = 1 if worker.worked or lasted else state.num_failures + 1

    def stop(self, grace_s: float) -> None:
        """Let workers end by themselves for ``grace_s`` seconds (they have been told to), then kill them.

        Who still loads its model does not hear that, and has nothing to end.
        """
        for worker in self.workers.values():
            if not worker.ready:
                worker.process.kill()
        deadline_s = self._clock() + grace_s
        for worker in self.workers.values():
            worker.process.join(max(0.0, deadline_s - self._clock()))
        for worker in self.workers.values():
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(JOIN_S)


JOIN_S = 5.0
"""A killed process may sit in the kernel for a while (a driver, a disk): nobody waits for it for ever."""
