"""Several servers under one virtual clock, each with a control plane of its own, and a router in front of them.

The router is told of a server what a real one is: the load that ``/v1/gfdit/load`` has, made of the same snapshot,
and not at the moment it asks but once an interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gfdit.core import Policy
from gfdit.core.cost.file import CostTable
from gfdit.core.routing import Ask, Replica, ReplicaLoad, Service, ask_for, choose, due_within_s, weight_percent
from gfdit.core.tasks import Shape
from gfdit.observe.meter import Meter
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import SimulationRun, Simulator
from gfdit.sim.trace import TraceRequest

ROUTERS = ("round-robin", "least-connections", "least-backlog", "deadline-aware")


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """``interval_s`` is how old what the router knows of a replica's work gets. Raises ``ValueError``.

    - ``round-robin``: one after the other.
    - ``least-connections``: the fewest open requests, which the router counts itself.
    - ``least-backlog``: the fewest open requests by weight, as HAProxy with ``gfdit agent``.
    - ``deadline-aware``: where nothing becomes late by it, as the Ray Serve router (:mod:`gfdit.core.routing`).
    """

    num_replicas: int
    router: str = "least-connections"
    interval_s: float = 1.0

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"the number of replicas must be at least 1, got {self.num_replicas}")
        if self.router not in ROUTERS:
            raise ValueError(f"the router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        if not (math.isfinite(self.interval_s) and self.interval_s > 0):
            raise ValueError(f"the router's interval must be a positive number of seconds, got {self.interval_s}")


class _Server:
    """One of the fleet: its simulation, what it said last, and how many requests the router has open there."""

    def __init__(self, simulator: Simulator, options: SimulationOptions) -> None:
        self.simulator = simulator
        self.known = Replica()
        self.weight = 0
        self._meter = Meter(simulator.control, options.num_ranks, ())
        self._restarts = [0] * options.num_ranks
        self._steps_per_task = options.steps_per_task

    @property
    def num_open(self) -> int:
        return len(self.simulator.control.state.requests)

    def load(self, now_s: float) -> ReplicaLoad:
        snapshot = self._meter.snapshot(now_s, self._restarts, ())
        due: dict[float, float] = {}
        for row in snapshot.requests:
            within_s = due_within_s(row.deadline_s, now_s)
            due[within_s] = due.get(within_s, 0.0) + (row.left_rank_s or 0.0)
        live_ranks = sum([rank.up for rank in snapshot.ranks])
        return ReplicaLoad(
            ready=live_ranks > 0,
            live_ranks=live_ranks,
            alive=len(snapshot.requests),
            due=tuple(sorted(due.items())),
            num_unknown=sum([row.left_rank_s is None for row in snapshot.requests]),
            services=tuple(
                [Service(one.size, one.num_steps * self._steps_per_task, one.seconds) for one in snapshot.services]
            ),
        )


class Fleet:
    """One run of ``trace``. Raises what :class:`Simulator` does.

    Every server has ``options``; the first of them have those in ``others`` instead.
    """

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        table: CostTable,
        trace: Sequence[TraceRequest],
        options: SimulationOptions,
        fleet: FleetOptions,
        others: Sequence[SimulationOptions] = (),
    ) -> None:
        self._trace = trace
        self._fleet = fleet
        of_servers = [*others, *[options] * (fleet.num_replicas - len(others))]
        self._num_ranks = sum([one.num_ranks for one in of_servers])
        self._servers = [
            _Server(Simulator(make_policy(), table, (), one, to_come=trace), one) for one in of_servers
        ]
        self._turns = itertools.count()
        self._told_s = -math.inf
        routers: dict[str, Callable[[TraceRequest], int]] = {
            "round-robin": self._next_in_turn,
            "least-connections": partial(self._least_connections, weighted=False),
            "least-backlog": partial(self._least_connections, weighted=True),
            "deadline-aware": self._deadline_aware,
        }
        self._choose = routers[fleet.router]
        self._asks_loads = fleet.router in ("least-backlog", "deadline-aware")
        self.now_s = 0.0

    @property
    def num_happened(self) -> int:
        """How far it is; may be read from another thread."""
        return sum([server.simulator.num_happened for server in self._servers])

    def run(self) -> SimulationRun:
        """All servers' together, requests in the order of the trace."""
        for request in self._trace:
            if self._asks_loads:
                self._ask_loads(request.arrival_s)
            self._advance(request.arrival_s)
            self._servers[self._choose(request)].simulator.submit(request)
        self._advance(math.inf)
        return self._together([server.simulator.end() for server in self._servers])

    def _advance(self, until_s: float) -> None:
        for server in self._servers:
            server.simulator.advance(until_s)
        self.now_s = until_s

    def _ask_loads(self, now_s: float) -> None:
        """As at the last tick before ``now_s``, unless that has been done."""
        tick_s = math.floor(now_s / self._fleet.interval_s) * self._fleet.interval_s
        if tick_s <= self._told_s:
            return
        self._told_s = tick_s
        self._advance(tick_s)
        for server in self._servers:
            server.known.num_open = server.num_open
            server.known.told(load := server.load(tick_s), tick_s)
            server.weight = weight_percent(load)

    # Routers

    def _next_in_turn(self, request: TraceRequest) -> int:
        return next(self._turns) % len(self._servers)

    def _least_connections(self, request: TraceRequest, *, weighted: bool) -> int:
        """Of equals one after the other, as HAProxy does; 0 open requests come first whatever the weight."""
        turn = next(self._turns)

        def place(index: int) -> tuple[float, int]:
            server = self._servers[index]
            num_open, weight = server.num_open, max(1, server.weight) if weighted else 1
            return (num_open + 1) / weight if num_open else 0.0, (index - turn) % len(self._servers)

        return min(range(len(self._servers)), key=place)

    def _deadline_aware(self, request: TraceRequest) -> int:
        turn = next(self._turns) % len(self._servers)
        servers = self._servers[turn:] + self._servers[:turn]
        for server in servers:
            server.known.num_open = server.num_open
        loads = [server.known.load for server in servers]
        shape = str(Shape(request.height, request.width, request.num_frames))
        ask: Ask = ask_for(loads, shape, request.num_steps, request.deadline_s)
        chosen = choose(loads, ask)
        assert chosen is not None, "no server has a rank"
        servers[chosen].known.sent(ask, request.arrival_s)
        return (chosen + turn) % len(self._servers)

    def _together(self, runs: Sequence[SimulationRun]) -> SimulationRun:
        by_id = {request.trace.id: request for run in runs for request in run.requests}
        whole: dict[str, Any] = {
            name: sum([getattr(run, name) for run in runs])
            for name in ("num_tasks", "num_migrations", "num_loads", "loaded_bytes")
        }
        return SimulationRun(
            runs[0].policy,
            self._num_ranks,
            [by_id[request.id] for request in self._trace],
            first_start_s=min(run.first_start_s for run in runs),
            last_end_s=max(run.last_end_s for run in runs),
            faults=[fault for run in runs for fault in run.faults],
            **whole,
        )
