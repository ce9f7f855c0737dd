"""What goes wrong in one simulated run, drawn from its seed: every run has a mixture of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec, Policy, SchedulerView
from gfdit.core.components import Load
from gfdit.core.policy.admission import with_admission
from gfdit.policies.edf import Edf
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from gfdit.policies.rssp import Rssp
from gfdit.policies.srtf import Srtf
from gfdit.policies.tetriserve import TetriServe
from gfdit.policies.triage import Triage
from tests.whole.workflows import Pool

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
    """``policy`` that now and then raises, decides what it must not, or does not come back."""

    def __init__(self, policy: Policy, weather: Weather, seed: int, hang: Callable[[], None]) -> None:
        self.name = policy.name
        self.run_ahead = getattr(policy, "run_ahead", False)
        self.sees_memory = getattr(policy, "sees_memory", False)
        self.places_components = getattr(policy, "places_components", False)
        self._policy = policy
        self._weather = weather
        self._draw = random.Random(seed)
        self._hang = hang

    def schedule(self, view: SchedulerView) -> Decision:
        weather, draw = self._weather, self._draw
        if draw.random() < weather.policy_fault:
            raise RuntimeError("not in the mood")
        if draw.random() < weather.policy_hang:
            self._hang()
        decision = self._policy.schedule(view)
        return self._lie(view, decision) if draw.random() < weather.policy_lie else decision

    def _lie(self, view: SchedulerView, decision: Decision) -> Decision:
        """What breaks a rule, beside what does not."""
        draw = self._draw
        task, rank = draw.choice(view.ready), draw.choice(view.ranks)
        on_rank = ExecutionLayout((rank.id,), ParallelSpec(1))
        lies: list[object] = [
            None,
            Decision(),  # for as long as it is in that mood, which may leave every rank idle
            Decision((*decision.dispatches, *decision.dispatches)),
            Decision((*decision.dispatches, Dispatch((task.id,), on_rank))),  # it may be busy, or not be allowed
            Decision((Dispatch((task.id, task.id), on_rank), *decision.dispatches)),
            Decision((Dispatch(("nobody/denoise/1",), on_rank), *decision.dispatches)),
            Decision((Dispatch((task.id,), ExecutionLayout((99,), ParallelSpec(1))),)),
            Decision((Dispatch((), on_rank),)),
            Decision(decision.dispatches, wake_at_s=view.now_s - 1.0),
            Decision(decision.dispatches, wake_at_s=float("nan")),
        ]
        if view.components:
            name = draw.choice(list(view.components))
            lies += [
                Decision(decision.dispatches, loads=("nothing",)),  # type: ignore[arg-type]
                Decision(decision.dispatches, loads=(Load(99, name), *decision.loads)),
                Decision(decision.dispatches, loads=(*decision.loads, *decision.loads)),
                Decision(decision.dispatches, loads=(*decision.loads, Load(rank.id, name))),  # it may be there
                Decision(decision.dispatches, loads=(Load(rank.id, "no component"), *decision.loads)),
                Decision((), loads=(Load(rank.id, name, tuple(view.components)),)),
            ]
        return draw.choice(lies)  # type: ignore[return-value]


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
    faulty_ranks_per_s: float  # their tasks raise, until they are started again or mended
    dead_hosts_per_s: float  # whose ranks never return
    faulty_share: float  # of the tasks of a rank that is
    faulty_for_good: float  # its next processes are, too
    probe_tells: float
    task_error: float
    copy_error: float
    spurious_echo: float
    duplicate: float
    slow_rank: float
    failed_start: float
    restarts: bool  # of lost ranks; on GPUs there are none
    lane_error: float  # per message of a migration lane: its thread ends
    policy_fault: float
    policy_lie: float
    policy_hang: float
    longest_delay_s: float
    longest_detection_s: float
    longest_restart_s: float
    longest_stop_s: float
    longest_lag_s: float  # of a migration lane
    max_artifact_bytes: int | None
    max_queue_s: float | None
    terminates: float  # the server is told to stop while requests come
    admission: str
    tokens_per_rank: int | None  # that its memory is large enough for, in a step
    longest_delivery_s: float | None  # of a result, beside other tasks; None: before them
    split: bool  # nearly every artifact, and several tasks read one at a time: copies of parts cross
    workflows: bool  # some requests are: components come and go
    load_error: float  # of any component
    changes_per_s: float  # an operator drains ranks, has them back and switches policies; never by itself

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
            faulty_ranks_per_s=perhaps(0.1, 0.4),
            dead_hosts_per_s=perhaps(0.02, 0.15),
            faulty_share=draw.choice([0.3, 1.0, 1.0]),
            faulty_for_good=draw.choice([0.0, 0.5, 1.0]),
            probe_tells=draw.choice([0.0, 0.5, 1.0]),
            task_error=perhaps(0.03),
            copy_error=draw.uniform(0.05, 0.2) if split else perhaps(0.02),
            spurious_echo=perhaps(0.03),
            duplicate=perhaps(0.1),
            slow_rank=perhaps(0.5),
            failed_start=perhaps(0.9, 0.4),
            restarts=draw.random() < 0.9,
            lane_error=perhaps(0.02, 0.2),
            policy_fault=perhaps(0.1, 0.2),
            policy_lie=perhaps(0.3, 0.2),
            policy_hang=perhaps(0.02, 0.1),
            longest_delay_s=draw.choice([0.0, 0.001, 0.1, 3.0]),
            longest_detection_s=draw.choice([0.0, 0.1, 5.0]),
            longest_restart_s=draw.choice([0.1, 5.0, 40.0]),
            longest_stop_s=draw.choice([0.1, 5.0, 30.0]),
            longest_lag_s=draw.choice([0.001, 0.5, 20.0]),
            max_artifact_bytes=draw.choice([None, None, None, 100, 300]),
            max_queue_s=draw.choice([None, None, None, 5.0, 60.0]),
            terminates=0.2,
            admission=draw.choice(["none", "none", "none", "deadline", "promise"]),
            tokens_per_rank=random.Random(repr(draw.getstate())).choice([None, None, None, None, 300, 1100, 2500]),
            longest_delivery_s=random.Random(f"{draw.getstate()} delivery").choice([None, None, None, 0.1, 3.0]),
            split=split,
            workflows=(pools := random.Random(f"{draw.getstate()} workflows")).random() < 0.3,
            load_error=pools.choice([0.0, 0.0, 0.1]),
            changes_per_s=0.0,
        )

    @property
    def has_policy_faults(self) -> bool:
        return bool(self.policy_fault or self.policy_lie or self.policy_hang)

    def policy(self, seed: int, hang: Callable[[], None], pool: Pool | None) -> Policy:
        """The same one whenever it is asked for. ``hang`` is what it does that does not come back."""
        draw = random.Random(seed)
        policy: Policy
        if pool is not None:
            policy = pool.policy(draw, seed)
        else:
            policy = ChangingPlaces(seed) if self.split else draw.choice(POLICIES)()
        if self.has_policy_faults:
            policy = Moody(policy, self, seed, hang)
        return with_admission(policy, self.admission)

    def draw_num_ranks(self, draw: random.Random) -> int:
        """Where artifacts are split, few: their layouts overlap."""
        if self.workflows:
            return draw.choice([1, 2, 2, 3, 3, 4, 5])
        return draw.choice([3, 4] if self.split else [1, 2, 3, 4, 4, 5, 6])
