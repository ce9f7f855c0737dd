"""A control plane under a virtual clock with fixed task times, for tests of what a policy does and when."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from gfdit.core import ControlPlane, ExecutionLayout, Policy, RankRecord, TaskKind
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost.table import NominalCostModel
from tests.support.workload import Arrival

STEP_S = 1.0  # of 512 x 512 on one rank; more ranks divide it, more tokens multiply it
OTHER_S = 0.25  # encode, prepare, decode


@dataclass(frozen=True)
class Span:
    """One task that ran."""

    request_id: str
    kind: TaskKind
    step_index: int
    layout: ExecutionLayout
    start_s: float
    finish_s: float

    @property
    def size(self) -> int:
        return self.layout.parallel.size


@dataclass
class Run:
    spans: list[Span]
    finish_s: dict[str, float]
    num_copies: int

    def of(self, request_id: str, kind: TaskKind = TaskKind.DENOISE) -> list[Span]:
        return [span for span in self.spans if (span.request_id, span.kind) == (request_id, kind)]

    def sizes(self, request_id: str) -> list[int]:
        """Number of ranks of each denoising step."""
        return [span.size for span in self.of(request_id)]


def simulate(policy: Policy, num_ranks: int, requests: Iterable[Arrival], *, work_conserving: bool = False) -> Run:
    """Every request must complete. ``work_conserving`` asserts that no task waits beside a free rank."""
    control = ControlPlane(
        policy, [RankRecord(rank, frozenset({"m"})) for rank in range(num_ranks)], NominalCostModel()
    )
    queue: list[tuple[float, int, ev.Event]] = []
    number = 0

    def at(time_s: float, event: ev.Event) -> None:
        nonlocal number
        number += 1
        heapq.heappush(queue, (time_s, number, event))

    for request, graph in requests:
        at(request.arrival_s, ev.RequestArrived(request, graph))
    run = Run([], {}, 0)
    while queue:
        now_s, _, event = heapq.heappop(queue)
        commands = control.handle(event, now_s)
        control.check_integrity()
        if work_conserving:
            assert not control.state.has_work(), f"at {now_s} tasks wait beside a free rank"
        for command in commands:
            if isinstance(command, cmd.RunTask):
                span = _span(command, control, now_s)
                run.spans.append(span)
                for rank in command.layout.ranks:
                    at(span.finish_s, ev.TaskFinished(command.dispatch_id, rank, span.finish_s - now_s))
            elif isinstance(command, cmd.Migrate):
                run.num_copies += command.num_copies
                for rank in command.ranks:
                    at(now_s, ev.MigrationFinished(command.migration_id, rank))
            elif isinstance(command, cmd.WakeAt):
                at(command.at_s, ev.WakeUp())
            elif isinstance(command, cmd.CompleteRequest):
                run.finish_s[command.request_id] = now_s
            else:
                assert isinstance(command, (cmd.FreeArtifacts, cmd.StartRequest)), command
    assert control.idle
    return run


def _span(command: cmd.RunTask, control: ControlPlane, now_s: float) -> Span:
    task, layout = command.tasks[0], command.layout
    seconds = OTHER_S
    if task.kind is TaskKind.DENOISE:
        tokens = control.state.requests[task.request_id].request.shape.num_tokens
        seconds = STEP_S * tokens / 1024 / layout.parallel.size
    return Span(task.request_id, task.kind, task.step_index, layout, now_s, now_s + seconds)
