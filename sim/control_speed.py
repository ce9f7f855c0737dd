"""How fast the control plane and the policies are: in whole simulations, and in a steady state of many requests.

Times are CPU times of this thread, which a busy machine stretches least; decisions are timed by the wall clock,
too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gfdit.core import Decision, Policy, SchedulerView
from gfdit.core import events as ev
from gfdit.core.cost.file import CostTable
from gfdit.sim.devices import Execution
from gfdit.sim.options import SimulationOptions
from gfdit.sim.request_classes import RequestClass
from gfdit.sim.simulator import SimulatedRequest, Simulator, Status
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workflow_mixes import WorkflowMix

WORKFLOW_RANK_BYTES = 72 * 2**30
DEADLINE_FACTORS = (1.5, 6.0)  # drawn between these: of the time alone on one rank, times requests per rank


def additions_per_s(num_additions: int = 1_000_000) -> float:
    """Integers that a loop adds in a second of CPU time, the best of five: how fast this machine runs Python."""
    elapsed_s = []
    for _ in range(5):
        started_s, total = time.thread_time(), 0
        for number in range(num_additions):
            total += number
        elapsed_s.append(time.thread_time() - started_s)
    return num_additions / min(elapsed_s)


def simulated_tasks_per_s(
    policy: Policy, table: CostTable, trace: Sequence[TraceRequest], num_ranks: int
) -> float:
    """Tasks simulated in a second of CPU time. Raises ``ValueError`` if the policy made mistakes."""
    simulator = Simulator(policy, table, trace, SimulationOptions(num_ranks))
    started_s = time.thread_time()
    done = simulator.run()
    elapsed_s = time.thread_time() - started_s
    unfinished = sum(request.status is not Status.COMPLETED for request in done.requests)
    if done.faults or unfinished:
        detail = done.faults[0] if done.faults else f"{unfinished} requests did not complete"
        raise ValueError(f"policy {policy.name!r}: {detail}")
    return done.num_tasks / elapsed_s


@dataclass(frozen=True, slots=True)
class Load:
    """What a control plane had to do for ``simulated_s`` seconds of serving.

    ``control_s`` is the CPU time of the control plane without the policy, ``decisions_s`` that of each call of the
    policy, ``latencies_s`` the same by the wall clock. ``mean_task_s`` is the simulated time of a task.
    """

    simulated_s: float
    num_tasks: int
    mean_task_s: float
    control_s: float
    decisions_s: tuple[float, ...]
    latencies_s: tuple[float, ...]


class SteadyState(Simulator):
    """``in_flight`` requests at any time: for each that ends another arrives. They may ask for ``workflows``."""

    def __init__(
        self,
        policy: Policy,
        table: CostTable,
        classes: Sequence[RequestClass],
        *,
        num_ranks: int,
        in_flight: int,
        seed: int = 0,
        workflows: WorkflowMix | None = None,
    ) -> None:
        self._classes = classes
        self._draw = random.Random(seed)
        self._slack = max(1.0, in_flight / num_ranks)
        self._num_made = 0
        self._policy = _TimedPolicy(policy)
        self._clear()
        # They start in different places of their trajectories, or all would end together; workflows are of
        # different lengths.
        first = [self._make(0.0, shortest=1 if workflows is None else None) for _ in range(in_flight)]
        options, graphs = SimulationOptions(num_ranks), None
        if workflows is not None:
            options = replace(options, components=workflows.components, component_bytes=WORKFLOW_RANK_BYTES)
            graphs = workflows.graphs(num_ranks)
        super().__init__(self._policy, table, first, options, graphs)

    def measure(self, num_tasks: int, *, warm_up: int) -> Load:
        """Serve ``warm_up`` tasks, then ``num_tasks`` that count; to be called once."""
        self._serve(warm_up)
        self._clear()
        start_s = self._now_s
        self._serve(warm_up + num_tasks)
        decisions_s, latencies_s = self._policy.decisions_s, self._policy.latencies_s
        return Load(
            simulated_s=self._now_s - start_s,
            num_tasks=num_tasks,
            mean_task_s=self._task_s / num_tasks,
            control_s=self._handled_s - sum(decisions_s),
            decisions_s=tuple(decisions_s),
            latencies_s=tuple(latencies_s),
        )

    def _serve(self, until_task: int) -> None:
        while self._result.num_tasks < until_task:
            self._happen_next()

    def _clear(self) -> None:
        self._handled_s = self._task_s = 0.0
        self._policy.decisions_s, self._policy.latencies_s = [], []

    def _make(self, now_s: float, shortest: int | None = None) -> TraceRequest:
        """A request that arrives now; of a length drawn from ``shortest`` on, else in full."""
        kind = self._classes[int(self._draw.random() * len(self._classes))]
        num_steps = kind.num_steps
        if shortest is not None:
            num_steps = shortest + int(self._draw.random() * (num_steps - shortest + 1))
        low, high = DEADLINE_FACTORS
        factor = (low + self._draw.random() * (high - low)) * self._slack
        self._num_made += 1
        return TraceRequest(
            f"r{self._num_made}",
            now_s,
            kind.model,
            *kind.shape.size,
            num_steps,
            kind.cfg,
            kind.name,
            factor * kind.service_s,
        )

    def _handle(self, event: ev.Event) -> None:
        started_s = time.thread_time()
        commands = self._control.handle(event, self._now_s)
        self._handled_s += time.thread_time() - started_s
        for command in commands:
            self._emitters[type(command)](command)

    def _account(self, execution: Execution) -> None:
        super()._account(execution)
        self._task_s += execution.seconds

    def _end(self, request_id: str, status: Status, detail: str = "") -> None:
        if status is not Status.COMPLETED:
            raise ValueError(f"policy {self._result.policy!r}: request {request_id} was {status}: {detail}")
        del self._requests[request_id]
        request = self._make(self._now_s)
        self._requests[request.id] = SimulatedRequest(request)
        self._at(self._now_s, self._arrive, request)


class _TimedPolicy:
    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.run_ahead = getattr(policy, "run_ahead", False)
        self.places_components = getattr(policy, "places_components", False)
        self.decisions_s: list[float] = []
        self.latencies_s: list[float] = []
        self._policy = policy

    def schedule(self, view: SchedulerView) -> Decision:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        decision = self._policy.schedule(view)
        self.decisions_s.append(time.thread_time() - cpu_s)
        self.latencies_s.append(time.perf_counter() - wall_s)
        return decision
