"""What goes wrong in one simulated run, drawn from its seed: every run has a mixture of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gfdit.core import Decision, Dispatch, ExecutionLayout, Policy, SchedulerView
from gfdit.core.policy.admission import with_admission
from gfdit.policies.edf import Edf
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from gfdit.policies.rssp import Rssp
from gfdit.policies.srtf import Srtf
from gfdit.policies.tetriserve import TetriServe
from gfdit.policies.triage import Triage

POLICIES = (RandomLayout, Equipartition, Fcfs, Srtf, Edf, Rssp, TetriServe, Triage)


class ChangingPlaces:
    """Any ranks, but the two that a request had last in reverse order: then both hold the other one's part."""

    name = "changing places"
    run_ahead = True

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def schedule(self, view: SchedulerView) -> Decision:
        free = list(view.free_ranks)
        dispatches = []
        for task in view.ready:
            last = view.requests[task.request_id].last_layout
            specs = [spec for spec in task.candidates if spec.size <= len(free)]
            if not specs:
                continue
            draw = random.Random(f"{self.seed} {task.id}")  # the same answer whenever it is asked
            may_change = last is not None and last.parallel in specs and set(last.ranks) <= set(free)
            if last is not None and may_change and draw.random() < 0.7:
                layout = ExecutionLayout(last.ranks[::-1], last.parallel)
            else:
                spec = draw.choice(specs)
                layout = ExecutionLayout(tuple(draw.sample(free, spec.size)), spec)
            dispatches.append(Dispatch((task.id,), layout))
            free = [rank for rank in free if rank not in layout.ranks]
        return Decision(tuple(dispatches))


class Moody:
    """``policy`` that raises now and then."""

    def __init__(self, policy: Policy, seed: int, share: float) -> None:
        self.name = policy.name
        self.run_ahead = getattr(policy, "run_ahead", False)
        self.sees_memory = getattr(policy, "sees_memory", False)
        self._policy = policy
        self._draw = random.Random(seed)
        self._share = share

    def schedule(self, view: SchedulerView) -> Decision:
        if self._draw.random() < self._share:
            raise RuntimeError("not in the mood")
        return self._policy.schedule(view)


@dataclass(frozen=True, slots=True)
class Weather:
    """Faults per second of simulated time, and probabilities per event; times in seconds."""

    deaths_per_s: float
    hangs_per_s: float  # of a task
    stops_per_s: float  # of a whole process, as by SIGSTOP
    cancel_storms_per_s: float
    clock_jumps_per_s: float
    control_deaths_per_s: float
    control_stops_per_s: float
    task_error: float
    copy_error: float
    spurious_echo: float
    duplicate: float
    slow_rank: float
    failed_start: float
    policy_fault: float
    longest_delay_s: float
    longest_detection_s: float
    longest_restart_s: float
    longest_stop_s: float
    longest_lag_s: float  # of a migration lane
    max_artifact_bytes: int | None
    admission: str
    split: bool  # nearly every artifact, and several tasks read one at a time: copies of parts cross

    @classmethod
    def draw(cls, draw: random.Random) -> Weather:
        """Each kind of fault is absent in about every third run, so that the others show alone, too."""

        def perhaps(most: float, share: float = 0.65) -> float:
            return draw.random() * most if draw.random() < share else 0.0

        split = draw.random() < 0.3
        return cls(
            deaths_per_s=perhaps(0.5),
            hangs_per_s=perhaps(0.1, 0.5),
            stops_per_s=perhaps(0.1, 0.5),
            cancel_storms_per_s=perhaps(0.1),
            clock_jumps_per_s=perhaps(0.1, 0.3),
            control_deaths_per_s=perhaps(0.2, 0.5),
            control_stops_per_s=perhaps(0.1, 0.4),
            task_error=perhaps(0.03),
            copy_error=draw.uniform(0.05, 0.2) if split else perhaps(0.02),
            spurious_echo=perhaps(0.03),
            duplicate=perhaps(0.1),
            slow_rank=perhaps(0.5),
            failed_start=perhaps(0.9, 0.4),
            policy_fault=perhaps(0.1, 0.1),
            longest_delay_s=draw.choice([0.0, 0.001, 0.1, 3.0]),
            longest_detection_s=draw.choice([0.0, 0.1, 5.0]),
            longest_restart_s=draw.choice([0.1, 5.0, 40.0]),
            longest_stop_s=draw.choice([0.1, 5.0, 30.0]),
            longest_lag_s=draw.choice([0.001, 0.5, 20.0]),
            max_artifact_bytes=draw.choice([None, None, None, 100, 300]),
            admission=draw.choice(["none", "none", "none", "deadline", "promise"]),
            split=split,
        )

    def policy(self, seed: int) -> Policy:
        """The same one whenever it is asked for."""
        draw = random.Random(seed)
        policy: Policy = ChangingPlaces(seed) if self.split else draw.choice(POLICIES)()
        if self.policy_fault:
            policy = Moody(policy, seed, self.policy_fault)
        return with_admission(policy, self.admission)

    def draw_num_ranks(self, draw: random.Random) -> int:
        """Where artifacts are split, few: their layouts overlap."""
        return draw.choice([3, 4] if self.split else [1, 2, 3, 4, 4, 5, 6])
