"""Running ahead changes when a step starts, not what is decided by a policy that goes by its view alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from gfdit.core import Decision, Policy, SchedulerView
from gfdit.policies.edf import Edf
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from gfdit.policies.rssp import Rssp
from gfdit.policies.srtf import Srtf
from gfdit.policies.static import Static
from gfdit.sim.trace import TraceRequest
from tests.sim.runs import ends, run
from tests.sim.tables import line

BY_THE_VIEW: dict[str, Callable[[], Policy]] = {
    "edf": Edf,
    "static": Static,
    "rssp": Rssp,
    "equipartition": Equipartition,
    "random-layout": RandomLayout,
}
# They assign a request to a group when they first see it, which is sooner if they are asked more often.
POLICIES = BY_THE_VIEW | {"fcfs": Fcfs, "fcfs-2": lambda: Fcfs(group_size=2), "srtf": Srtf}


def trace_of(seed: int) -> list[TraceRequest]:
    draw = random.Random(seed)
    arrivals = sorted(draw.uniform(0, 12) for _ in range(draw.randint(1, 9)))
    return [line(f"r{i}", at_s, num_steps=draw.randint(1, 5)) for i, at_s in enumerate(arrivals)]


@pytest.mark.parametrize("name", BY_THE_VIEW)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 6))
def test_without_latency_it_changes_nothing(name: str, seed: int, num_ranks: int) -> None:
    # With jitter, no two tasks end at one moment: then either could come first.
    strict, ahead = (
        run(POLICIES[name](), trace_of(seed), num_ranks=num_ranks, jitter=0.1, run_ahead=run_ahead)
        for run_ahead in (0, 1)
    )
    assert ends(ahead) == {name: approx(end_s) for name, end_s in ends(strict).items()}
    assert [r.rank_seconds for r in ahead.requests] == approx([r.rank_seconds for r in strict.requests])
    assert not ahead.faults


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"random-layout"}))
def test_with_latency_it_is_worth_it(name: str) -> None:
    trace = trace_of(5)
    strict, ahead = (
        run(POLICIES[name](), trace, num_ranks=2, dispatch_latency_s=0.1, run_ahead=run_ahead)
        for run_ahead in (0, 1)
    )
    assert ahead.last_end_s < strict.last_end_s


def test_with_nothing_happening_meanwhile_the_policy_is_asked_as_often() -> None:
    class Counting(Fcfs):
        asked = 0

        def schedule(self, view: SchedulerView) -> Decision:
            self.asked += 1
            return super().schedule(view)

    for run_ahead in (0, 1):
        policy = Counting()
        run(policy, [line("a", num_steps=20)], num_ranks=1, run_ahead=run_ahead)
        assert policy.asked == 23  # encode, prepare, the steps and decode: at every boundary, or before it
