"""What is simulated beside tasks and their times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gfdit.core.components import Component
from gfdit.core.cost.nodes import Nodes
from gfdit.sim.costs.edit_costs import EditCosts
from gfdit.sim.device_memory import DeviceMemory
from gfdit.sim.rank_faults import RankFailure, SlowRank, check_failures, check_slow_ranks


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """``jitter`` is the relative spread of task times around the table's, ``seed`` that of its draws.

    A task starts ``dispatch_latency_s`` after the decision; with ``run_ahead`` 1 the next one may have been
    queued behind it by then and starts at once. ``check_every_event`` checks the control plane's bookkeeping
    after every event, not only at the end. Without ``memory`` everything fits. Of workflows, ``component_bytes``
    of their ``components`` fit on a rank; of a component in ``component_failures`` that many loads fail at
    first. With ``edits`` steps under a mask take less; without, masks in a trace say nothing. Without ``nodes``
    all ranks are on one; with ``hides_nodes`` policies are told so and pay for it all the same. With
    ``steps_per_task`` so many denoising steps are one task: fewer decisions and a faster simulation, see
    :mod:`gfdit.sim.coarse`. Raises ``ValueError`` for numbers out of range and ranks that do not exist.
    """

    num_ranks: int
    dispatch_latency_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    check_every_event: bool = False
    run_ahead: int = 0
    failures: tuple[RankFailure, ...] = ()
    slow_ranks: tuple[SlowRank, ...] = ()
    memory: DeviceMemory | None = None
    components: tuple[Component, ...] = ()
    component_bytes: int | None = None
    component_failures: tuple[tuple[str, int], ...] = ()
    edits: EditCosts | None = None
    nodes: Nodes | None = None
    hides_nodes: bool = False
    steps_per_task: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {self.num_ranks}")
        for name in ("dispatch_latency_s", "jitter"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a non-negative number, got {value}")
        if self.run_ahead not in (0, 1):
            raise ValueError(f"run_ahead must be 0 or 1, got {self.run_ahead}")
        if self.steps_per_task < 1:
            raise ValueError(f"steps_per_task must be at least 1, got {self.steps_per_task}")
        if self.steps_per_task > 1:
            for name in ("dispatch_latency_s", "jitter", "run_ahead"):
                if getattr(self, name):
                    raise ValueError(f"{name} is of single steps: leave it out, or steps_per_task")
        check_failures(self.failures, self.num_ranks)
        check_slow_ranks(self.slow_ranks, self.num_ranks)
