"""Runs of the simulator on the tables and traces of tests, and policies to drive it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec, Policy, SchedulerView, TaskKind
from gfdit.core.cost.file import CostTable
from gfdit.observe.timeline import Span, TimelineWriter, read_timeline
from gfdit.sim.simulator import SimulationOptions, SimulationRun, Simulator
from gfdit.sim.trace import TraceRequest
from tests.sim.tables import table


def run(
    policy: Policy, trace: list[TraceRequest], num_ranks: int = 2, costs: CostTable | None = None, **options: Any
) -> SimulationRun:
    options |= {"num_ranks": num_ranks, "check_every_event": True}
    return Simulator(policy, costs or table(), trace, SimulationOptions(**options)).run()


def ends(done: SimulationRun) -> dict[str, float | None]:
    return {request.trace.id: request.end_s for request in done.requests}


def spans_of(policy: Policy, trace: list[TraceRequest], tmp_path: Path, num_ranks: int = 2) -> list[Span]:
    path = tmp_path / "timeline.json"
    with TimelineWriter(path, num_ranks, base_s=0.0) as writer:
        Simulator(policy, table(), trace, SimulationOptions(num_ranks)).run(writer)
    return read_timeline(path)


@dataclass
class Idle:
    """Runs nothing of the requests in ``ignored``; asks to be woken ``every_s``."""

    ignored: tuple[str, ...] = ("b",)
    every_s: float | None = None
    name = "idle"

    def schedule(self, view: SchedulerView) -> Decision:
        free, dispatches = list(view.free_ranks), []
        for task in view.ready:
            if free and task.request_id not in self.ignored:
                dispatches.append(Dispatch((task.id,), ExecutionLayout((free.pop(0),))))
        return Decision(tuple(dispatches), None if self.every_s is None else view.now_s + self.every_s)


@dataclass
class Replay:
    """Every step on the degree and ranks it is told; the other tasks on rank 0."""

    steps: tuple[tuple[int, ...], ...]
    name = "replay"
    run_ahead = True

    def schedule(self, view: SchedulerView) -> Decision:
        task = view.ready[0]
        ranks = self.steps[task.step_index] if task.kind is TaskKind.DENOISE else (0,)
        if not set(ranks) <= set(view.free_ranks):
            return Decision()
        return Decision((Dispatch((task.id,), ExecutionLayout(ranks, ParallelSpec(len(ranks)))),))
