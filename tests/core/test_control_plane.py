"""The control plane under random legal events: nothing is lost, leaked or run where it cannot run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfdit.core import Decision, Policy, SchedulerView
from gfdit.core import commands as cmd
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from tests.support.cluster import Cluster, Faults
from tests.support.scripted_policy import Scripted
from tests.support.workload import random_requests

SEEDS = st.integers(0, 2**32 - 1)
FAULTS = Faults(task=0.05, cancel=0.01, rank_lost=0.01, late_report=0.05)


@dataclass
class RaisesAtRandom:
    """A good policy that fails in a third of its calls."""

    name: str = "raises"
    inner: Policy = field(default_factory=Equipartition)
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def schedule(self, view: SchedulerView) -> Decision:
        if self.draw.random() < 0.3:
            raise RuntimeError("out of ideas")
        return self.inner.schedule(view)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "fcfs-2": lambda: Fcfs(group_size=2),
    "fcfs-3": lambda: Fcfs(group_size=3),
    "fcfs-9": lambda: Fcfs(group_size=9),
    "equipartition": Equipartition,
    "equipartition-2": lambda: Equipartition(max_sp=2),
    "random-layout": RandomLayout,
    "scripted": lambda: Scripted("sp2@1,0 sp4@3,1,0,2 sp1@2 cfg2xsp1@0,2", decode_rank=3, per_request=1),
    "raises": RaisesAtRandom,
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num_ranks=st.integers(4, 6), num_requests=st.integers(1, 9))
def test_random_events_leave_nothing_behind(name: str, seed: int, num_ranks: int, num_requests: int) -> None:
    cluster = Cluster(POLICIES[name](), num_ranks, seed, faults=FAULTS)
    cluster.run(random_requests(random.Random(seed), num_requests))


@pytest.mark.parametrize("name", ["fcfs", "fcfs-3", "fcfs-9", "equipartition", "equipartition-2", "random-layout"])
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, num_ranks=st.integers(1, 6), num_requests=st.integers(1, 9))
def test_without_faults_every_request_completes(
    name: str, seed: int, num_ranks: int, num_requests: int
) -> None:
    cluster = Cluster(POLICIES[name](), num_ranks, seed)
    cluster.run(random_requests(random.Random(seed), num_requests))
    assert {type(ending) for endings in cluster.endings.values() for ending in endings} == {cmd.CompleteRequest}
    assert cluster.reports == []
